"""Experiments of the preflight; measures.py turns them into measures."""
