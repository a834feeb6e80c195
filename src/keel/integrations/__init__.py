"""Keel's KL, guards and findings inside other trainers. A training step of Keel's own imports nothing of it."""
