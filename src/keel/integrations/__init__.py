"""Keel's KL, guards and findings inside other trainers. Keel's own training step imports nothing from this package."""
