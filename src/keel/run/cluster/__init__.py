"""Runs on a Ray cluster: where processes are placed, how they are followed, what is started again."""
