"""References: the policy that the KL is measured against. `keel.reference.kinds` builds them by name."""

from keel.reference.base import Reference, packs_rows, shortest_context, starts_at_policy

__all__ = ["Reference", "packs_rows", "shortest_context", "starts_at_policy"]
