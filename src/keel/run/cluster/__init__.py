"""Runs on a Ray cluster: placement, supervision and restarts of processes."""
