"""What every room stands on: data that travels, metrics, errors, files."""
