"""What every check works with: its two kinds of answer, and the trend of the reward."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from keel.base.thresholds import Thresholds
from keel.lab.doctor.findings import Finding
from keel.lab.doctor.history import History, Series
from keel.lab.doctor.names import option_name

RECENT = 10  # steps that "now" is the mean of


@dataclass(frozen=True)
class Unchecked:
    """A code that could not be decided, and why."""

    code: str
    why: str


CheckResults = Iterator[Finding | Unchecked]
Check = Callable[[History, Thresholds], CheckResults]


@dataclass(frozen=True)
class Trend:
    """The reward's last third against its first: means, and the gain in standard errors."""

    before: float
    after: float
    z_score: float

    @property
    def text(self) -> str:
        """For evidence."""
        return f"reward {self.before:.3g} → {self.after:.3g} ({self.z_score:+.1f} standard errors)"


def reward_trend(history: History) -> Trend | None:
    """None where fewer than six steps have a reward."""
    rewards = history.get("reward/mean")
    if rewards is None or len(rewards.finite) < 6:
        return None
    values = rewards.finite.values
    third = max(3, len(values) // 3)
    first, last = values[:third], values[-third:]
    gain = statistics.fmean(last) - statistics.fmean(first)
    noise = math.sqrt(statistics.variance(first) / third + statistics.variance(last) / third)
    z_score = gain / noise if noise > 0 else math.copysign(math.inf, gain) if gain else 0.0
    return Trend(statistics.fmean(first), statistics.fmean(last), z_score)


def no_trend(code: str, history: History) -> Unchecked:
    """Why there is no trend."""
    rewards = history.get("reward/mean")
    return (
        not_recorded(code, "the reward") if rewards is None else Unchecked(code, "fewer than six steps have a reward")
    )


def reward_rose(history: History, thresholds: Thresholds) -> bool:
    """Whether the reward has grown by more than noise."""
    trend = reward_trend(history)
    return trend is not None and trend.z_score > thresholds["flat_reward"]


def solved(history: History, thresholds: Thresholds) -> bool:
    """Whether the held-out accuracy of the trained task leaves nothing to learn."""
    trained = [record for record in history.evaluations if record.get("split") == "trained"]
    last = trained[-1].get("pass@1") if trained else None
    return isinstance(last, int | float) and last >= thresholds["solved_accuracy"]


def running_median(series: Series, index: int, window: int = 20, least: int = 5) -> float | None:
    """Of the finite values before `index`; None where there are too few."""
    before = [value for value in series.values[max(0, index - window) : index] if math.isfinite(value)]
    return statistics.median(before) if len(before) >= least else None


def opt(history: History, dotted: str) -> str:
    """An option under the name that the run's own trainer has for it."""
    return option_name(dotted, history.source)


def not_recorded(code: str, what: str) -> Unchecked:
    """The commonest reason."""
    return Unchecked(code, f"{what} was not recorded")
