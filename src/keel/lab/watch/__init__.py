"""Runs while they go on: their report as a page on loopback that keeps itself up to date."""

PORT = 5335  # KEEL on a telephone's keys
