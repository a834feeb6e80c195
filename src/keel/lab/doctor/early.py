"""How far the first updates of a run moved the policy."""

from __future__ import annotations

import math
from itertools import pairwise

from keel.lab.doctor.history import History


def early_moves(history: History) -> list[tuple[float, int]]:
    """(change of the KL, step that shows it) of single updates, until shortly after the first at the full rate."""
    if history.kl is None:
        return []
    _, series = history.kl
    until = _full_rate(history) + 5
    return [
        (after - before, int(step))
        for (before, from_step), (after, step) in pairwise(zip(series.values, series.steps, strict=True))
        if step - from_step == 1 and step <= until and math.isfinite(after) and math.isfinite(before)
    ]


def _full_rate(history: History) -> float:
    """The step at which the learning rate is first at its largest, in the first half of the run."""
    rates = history.get("optim/learning_rate")
    if rates is None:
        return 1.0
    first_half = rates.finite.head(max(1, len(rates) // 2))
    return first_half.steps[first_half.values.index(max(first_half.values))]
