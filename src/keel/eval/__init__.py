"""Held-out evaluation of a policy and its statistics."""
