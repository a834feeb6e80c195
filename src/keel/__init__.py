"""Keel: GRPO on verifiable rewards with a KL term that can be trusted."""

__version__ = "0.1.0"
