"""Held-out evaluation of a policy, with statistics."""
