"""Experiments that are no measures yet."""
