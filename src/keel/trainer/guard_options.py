"""The guards' limits and answers: a part of what a run is made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GuardOptions:
    """Limits and answers; the budget is the largest mean KL of the run, in its unit."""

    max_consecutive_nans: int = 5
    on_nans: str = "rollback"
    recovery_lr_factor: float = 0.5
    max_rollbacks: int = 3
    grad_spike: float = 10.0
    on_spike: str = "warn"
    constant_steps: int = 10
    budget: float | None = None
    budget_unit: str = "per_token"
    budget_action: str = "stop"

    @property
    def may_roll_back(self) -> bool:
        """Whether the start is worth a checkpoint, because there may be nothing else to go back to."""
        broken = self.budget is not None and self.budget_action == "rollback"
        return self.max_rollbacks > 0 and (broken or self.on_nans == "rollback")
