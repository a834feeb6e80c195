"""How far the first updates of a run moved the policy."""

from __future__ import annotations

from keel.lab.doctor.history import History


def early_moves(history: History) -> list[tuple[float, int]]:
    """(change of the KL, step that shows it) of single updates, until shortly after the first at the full rate.

    A change has to stay for two steps: k3 is heavy-tailed, and one rare token may make a step's mean.
    """
    if history.kl is None:
        return []
    series = history.kl[1].finite
    until = _full_rate(history) + 5
    stays = [min(series.values[i : i + 3]) for i in range(len(series))]
    return [
        (stays[i + 1] - series.values[i], int(series.steps[i + 1]))
        for i in range(len(series) - 1)
        if series.steps[i + 1] - series.steps[i] == 1 and series.steps[i + 1] <= until
    ]


def _full_rate(history: History) -> float:
    """The step at which the learning rate is first at its largest, in the first half of the run."""
    rates = history.get("optim/learning_rate")
    if rates is None:
        return 1.0
    first_half = rates.finite.head(max(1, len(rates) // 2))
    return first_half.steps[first_half.values.index(max(first_half.values))]
