"""Keel's KL, guards and findings inside other trainers. Nothing of a training step of Keel's own imports this room."""
