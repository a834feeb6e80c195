"""What every room stands on: data that travels, metrics, errors, files, thresholds, names that moved."""
