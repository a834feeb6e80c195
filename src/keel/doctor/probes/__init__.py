"""Experiments of the preflight, which preflight.py registers as measures."""
