"""Shared foundations: data classes, metrics, errors, files, process groups."""
