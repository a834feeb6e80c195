"""The log of a run of Keel or another trainer, with Keel's metric names."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from keel.doctor.runs import number, option_of

Record = Mapping[str, Any]
LARGEST = 3.4e38  # the largest fp32 value; larger values come from an overflow, and squaring them would overflow
MOVING = ("ema", "snapshot", "kl_triggered")  # reference kinds that change during training
KL_NAMES = ("kl/policy_ref/exact/mean", "kl/policy_ref/k3/mean", "kl/policy_ref/k2/mean", "kl/policy_ref/k1/mean")


@dataclass(frozen=True)
class Series:
    """One metric over steps. Non-finite values are NaN."""

    steps: tuple[float, ...]
    values: tuple[float, ...]

    @classmethod
    def of(cls, pairs: Iterable[tuple[float, Any]]) -> Series:
        """A series from (step, value) pairs. Anything but a finite number becomes NaN."""
        points = [(float(step), _finite(value)) for step, value in pairs]
        return cls(tuple(step for step, _ in points), tuple(value for _, value in points))

    @cached_property
    def finite(self) -> Series:
        """The finite values only."""
        known = [(s, v) for s, v in zip(self.steps, self.values, strict=True) if math.isfinite(v)]
        return self if len(known) == len(self) else Series(*zip(*known, strict=True)) if known else Series((), ())

    @property
    def bad_steps(self) -> tuple[int, ...]:
        """Steps with a non-finite value."""
        return tuple(self.where(lambda value: not math.isfinite(value)))

    def mapped(self, function: Callable[[float], float]) -> Series:
        """The series with a function applied to every value."""
        return Series.of(zip(self.steps, map(function, self.values), strict=True))

    def scaled(self, factor: float) -> Series:
        """The series times `factor`."""
        return self if factor == 1 else self.mapped(lambda value: factor * value)

    def beside(self, other: Series) -> Iterator[tuple[float, float, float]]:
        """(step, value, the other's value) at common steps."""
        at = dict(zip(other.steps, other.values, strict=True))
        return ((s, v, at[s]) for s, v in zip(self.steps, self.values, strict=True) if s in at)

    def where(self, holds: Callable[[float], bool]) -> list[int]:
        """The steps whose value satisfies the condition."""
        return [int(step) for step, value in zip(self.steps, self.values, strict=True) if holds(value)]

    def head(self, count: int) -> Series:
        """The first `count` values."""
        return Series(self.steps[:count], self.values[:count])

    def since(self, step: float) -> Series:
        """The values from a step on."""
        first = bisect_left(self.steps, step)
        return Series(self.steps[first:], self.values[first:])

    def tail(self, count: int) -> Series:
        """The last `count` values."""
        return Series(self.steps[-count:], self.values[-count:])

    @property
    def mean(self) -> float:
        """The mean of the finite values; NaN if there are none."""
        known = [value for value in self.values if math.isfinite(value)]
        return statistics.fmean(known) if known else math.nan

    @property
    def span(self) -> str:
        """The steps as text for evidence, such as `steps 51–60`."""
        if not self.steps:
            return "no step"
        first, last = int(self.steps[0]), int(self.steps[-1])
        return f"step {first}" if first == last else f"steps {first}–{last}"

    def top(self) -> tuple[int, float]:
        """(step, value) of the largest finite value."""
        finite = self.finite
        value = max(finite.values)
        return int(finite.steps[finite.values.index(value)]), value

    def __len__(self) -> int:
        return len(self.values)


def finite(value: Any) -> float | None:
    """A finite number within the range of fp32, or None."""
    known = number(value)
    return known if known is not None and abs(known) <= LARGEST else None


def step_of(record: Record) -> int:
    """The step of an event or a rollout; 0 if it has none."""
    return int(finite(record.get("step")) or 0)


def _finite(value: Any) -> float:
    known = finite(value)
    return math.nan if known is None else known


@dataclass(frozen=True)
class History:
    """The log of a run. `config` is Keel's configuration, or the options of another trainer that have a Keel name."""

    source: str  # "keel", "TRL", "TensorBoard", "table"
    path: Path
    series: Mapping[str, Series] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    events: tuple[Record, ...] = ()
    evaluations: tuple[Record, ...] = ()
    rollouts: tuple[Record, ...] = ()
    vocabulary: int | None = None
    running: bool = False
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def get(self, name: str) -> Series | None:
        """A metric that was recorded at least once with a finite value, or None."""
        series = self.series.get(name)
        return series if series is not None and len(series.finite) else None

    @property
    def kl(self) -> tuple[str, Series] | None:
        """(name, series) of the best estimate of KL(policy‖reference) per token; exact is preferred to k3."""
        for name in KL_NAMES:
            series = self.get(name)
            if series is not None:
                return name.removesuffix("/mean"), series
        return None

    @property
    def final_kl(self) -> float | None:
        """KL(policy‖reference) per token after the last update; None if it was not measured."""
        finals = [event for event in self.events if event.get("kind") == "kl/final"]
        if not finals or finals[-1].get("step") != self.steps:
            return None  # the run continued afterwards
        measured = finals[-1].get("metrics")
        if not isinstance(measured, Mapping):
            return None
        return next((_finite(measured[name]) for name in KL_NAMES if name in measured), None)

    @property
    def unpenalized(self) -> bool:
        """Whether a KL of exactly 0 may mean that there is no KL term: β is 0, or unknown in a log that may omit it."""
        return self.beta == 0 or (self.beta is None and self.source != "TRL")  # TRL logs no KL at β = 0

    @property
    def moves_reference(self) -> bool:
        """Whether the reference changes during training by design."""
        return self.option("reference.kind") in MOVING or bool(self.option("reference.moves"))

    @property
    def steps(self) -> int:
        """The last recorded step."""
        return int(max((series.steps[-1] for series in self.series.values() if series.steps), default=0))

    def since(self, step: float) -> Self:
        """The history from a step on."""
        return replace(self, series={name: series.since(step) for name, series in self.series.items()})

    def option(self, dotted: str) -> Any:
        """An option's value, or None if it is unknown."""
        return option_of(self.config, dotted)

    def figure(self, dotted: str) -> float | None:
        """An option's value if it is a finite number, else None."""
        return finite(self.option(dotted))

    @property
    def beta(self) -> float | None:
        """The KL coefficient: the last logged one, or the configured one."""
        logged = self.get("kl/beta")
        return logged.finite.values[-1] if logged is not None else self.figure("kl.beta")


def series_of(lines: Iterable[Record], step: str = "step") -> dict[str, Series]:
    """Convert metric lines, each with its step, to one series per name. A null is a non-finite value."""
    pairs: dict[str, list[tuple[float, Any]]] = {}
    for index, line in enumerate(lines, start=1):
        at = _finite(line.get(step))
        at = float(index) if math.isnan(at) else at
        for name, value in line.items():
            if name != step and (value is None or (isinstance(value, int | float) and not isinstance(value, bool))):
                pairs.setdefault(name, []).append((at, value))
    return {name: in_order(points) for name, points in pairs.items()}


def in_order(points: Iterable[tuple[float, Any]]) -> Series:
    """Points sorted by step. If a step was logged twice, for example after a resume, the later value is kept."""
    pairs = list(points)
    last = dict(pairs)
    # if few steps are distinct, the step is not a real one and all points are kept
    once = last.items() if 2 * len(last) >= len(pairs) else pairs
    return Series.of(sorted(once, key=lambda pair: pair[0]))


def divides_by_std(history: History) -> bool:
    """Whether advantages are divided by the rewards' deviation. True if the options do not say."""
    scale = history.option("loss.scale_rewards")
    return scale is not False and (scale or history.option("loss.loss_type")) not in ("none", "dr_grpo")


def early_moves(history: History) -> list[tuple[float, int]]:
    """(change of the KL, step) of single updates, until shortly after the learning rate first peaks.

    A change must persist for two steps: k3 is heavy-tailed, and one rare token may dominate the mean of a step.
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
    """The first step with the maximum learning rate, within the first half of the run."""
    rates = history.get("optim/learning_rate")
    if rates is None:
        return 1.0
    first_half = rates.finite.head(max(1, len(rates) // 2))
    return first_half.steps[first_half.values.index(max(first_half.values))]
