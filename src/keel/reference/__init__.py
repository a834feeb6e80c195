"""What a reference is: the policy that the KL is measured against. Made by name in `keel.reference.kinds`."""

from keel.reference.base import Reference, packs_rows, shortest_context, starts_at_policy

__all__ = ["Reference", "packs_rows", "shortest_context", "starts_at_policy"]
