"""What the loop does when numbers go wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from keel.errors import KeelError
from keel.train.state import State


@dataclass(frozen=True)
class GuardOptions:
    """Limits; the budget is the largest mean KL of the run, in its unit."""

    max_consecutive_nans: int = 5
    budget: float | None = None
    budget_unit: str = "per_token"
    budget_action: str = "stop"


def check_skips(state: State, options: GuardOptions) -> None:
    """Stop a run whose updates have all been skipped for a while: it would only go on burning time."""
    if state.consecutive_skips >= options.max_consecutive_nans:
        raise KeelError(
            f"{state.consecutive_skips} updates in a row were skipped up to step {state.step} because the loss or its "
            "gradient was not finite: start again with a lower optim.learning_rate or model.dtype=float32"
        )


def over_budget(metrics: Mapping[str, float], options: GuardOptions) -> str | None:
    """One line that says how far the KL is over its budget, or None."""
    if options.budget is None:
        return None
    per_token = options.budget_unit == "per_token"
    name = "kl/policy_ref/k3/mean" if per_token else "kl/policy_ref/sequence/mean"
    spent = metrics.get(name)
    if spent is None or not spent > options.budget:
        return None
    unit = "token" if per_token else "sequence"
    return f"{name} is {spent:.4g} nats per {unit}, over kl.budget.max {options.budget:g}"
