"""A run's past as data: whoever wrote it, under Keel's names."""

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
LARGEST = 3.4e38  # of fp32: what a training run logs beyond it has overflowed, and its square would here
MOVING = ("ema", "snapshot", "kl_triggered")  # references
KL_NAMES = ("kl/policy_ref/exact/mean", "kl/policy_ref/k3/mean", "kl/policy_ref/k2/mean", "kl/policy_ref/k1/mean")


@dataclass(frozen=True)
class Series:
    """One metric over steps; what was not finite is NaN."""

    steps: tuple[float, ...]
    values: tuple[float, ...]

    @classmethod
    def of(cls, pairs: Iterable[tuple[float, Any]]) -> Series:
        """From (step, value) pairs; anything that is no finite number becomes NaN."""
        points = [(float(step), _finite(value)) for step, value in pairs]
        return cls(tuple(step for step, _ in points), tuple(value for _, value in points))

    @cached_property
    def finite(self) -> Series:
        """Only the finite ones."""
        known = [(s, v) for s, v in zip(self.steps, self.values, strict=True) if math.isfinite(v)]
        return self if len(known) == len(self) else Series(*zip(*known, strict=True)) if known else Series((), ())

    @property
    def bad_steps(self) -> tuple[int, ...]:
        """Steps at which the value was not finite."""
        return tuple(self.where(lambda value: not math.isfinite(value)))

    def mapped(self, function: Callable[[float], float]) -> Series:
        """A function of every value."""
        return Series.of(zip(self.steps, map(function, self.values), strict=True))

    def scaled(self, factor: float) -> Series:
        """Every value times `factor`."""
        return self if factor == 1 else self.mapped(lambda value: factor * value)

    def beside(self, other: Series) -> Iterator[tuple[float, float, float]]:
        """(step, value, the other's value) at the steps that both have."""
        at = dict(zip(other.steps, other.values, strict=True))
        return ((s, v, at[s]) for s, v in zip(self.steps, self.values, strict=True) if s in at)

    def where(self, holds: Callable[[float], bool]) -> list[int]:
        """The steps whose value is as asked."""
        return [int(step) for step, value in zip(self.steps, self.values, strict=True) if holds(value)]

    def head(self, count: int) -> Series:
        """The first values."""
        return Series(self.steps[:count], self.values[:count])

    def since(self, step: float) -> Series:
        """From a step on."""
        first = bisect_left(self.steps, step)
        return Series(self.steps[first:], self.values[first:])

    def tail(self, count: int) -> Series:
        """The last values."""
        return Series(self.steps[-count:], self.values[-count:])

    @property
    def mean(self) -> float:
        """Of the finite values; NaN where there is none."""
        known = [value for value in self.values if math.isfinite(value)]
        return statistics.fmean(known) if known else math.nan

    @property
    def span(self) -> str:
        """`steps 51–60`, for evidence."""
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
    """A number that training could have had, or None."""
    known = number(value)
    return known if known is not None and abs(known) <= LARGEST else None


def step_of(record: Record) -> int:
    """The step of an event or a rollout, 0 where it has none."""
    return int(finite(record.get("step")) or 0)


def _finite(value: Any) -> float:
    known = finite(value)
    return math.nan if known is None else known


@dataclass(frozen=True)
class History:
    """What was recorded of a run. `config` is Keel's configuration, or as much of a peer's as has a Keel name."""

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
        """(name, series) of the best measurement of KL(policy‖reference) per token: exact before k3."""
        for name in KL_NAMES:
            series = self.get(name)
            if series is not None:
                return name.removesuffix("/mean"), series
        return None

    @property
    def final_kl(self) -> float | None:
        """KL(policy‖reference) per token that the last update has left, measured after it; None where it was not."""
        finals = [event for event in self.events if event.get("kind") == "kl/final"]
        if not finals or finals[-1].get("step") != self.steps:
            return None  # the run went on from there
        measured = finals[-1].get("metrics")
        if not isinstance(measured, Mapping):
            return None
        return next((_finite(measured[name]) for name in KL_NAMES if name in measured), None)

    @property
    def unpenalized(self) -> bool:
        """Whether a KL of exactly 0 may mean that there is no KL term: β is 0, or unknown where 0 is logged then."""
        return self.beta == 0 or (self.beta is None and self.source != "TRL")  # TRL logs no KL at β = 0

    @property
    def moves_reference(self) -> bool:
        """Whether the reference is meant to move."""
        return self.option("reference.kind") in MOVING or bool(self.option("reference.moves"))

    @property
    def steps(self) -> int:
        """The last step that was recorded."""
        return int(max((series.steps[-1] for series in self.series.values() if series.steps), default=0))

    def since(self, step: float) -> Self:
        """The same with what was recorded from a step on."""
        return replace(self, series={name: series.since(step) for name, series in self.series.items()})

    def option(self, dotted: str) -> Any:
        """A value of the configuration, None where it is not known."""
        return option_of(self.config, dotted)

    def figure(self, dotted: str) -> float | None:
        """A value of the configuration that is a finite number, None otherwise."""
        return finite(self.option(dotted))

    @property
    def beta(self) -> float | None:
        """The KL coefficient: the last that was logged, or the configured one."""
        logged = self.get("kl/beta")
        return logged.finite.values[-1] if logged is not None else self.figure("kl.beta")


def series_of(lines: Iterable[Record], step: str = "step") -> dict[str, Series]:
    """Lines of metrics, each with its step, as one series a name; a null is a value that was not finite."""
    pairs: dict[str, list[tuple[float, Any]]] = {}
    for index, line in enumerate(lines, start=1):
        at = _finite(line.get(step))
        at = float(index) if math.isnan(at) else at
        for name, value in line.items():
            if name != step and (value is None or (isinstance(value, int | float) and not isinstance(value, bool))):
                pairs.setdefault(name, []).append((at, value))
    return {name: in_order(points) for name, points in pairs.items()}


def in_order(points: Iterable[tuple[float, Any]]) -> Series:
    """Sorted by step; of a step that was logged twice, as after a resume, the later value."""
    pairs = list(points)
    last = dict(pairs)
    once = last.items() if 2 * len(last) >= len(pairs) else pairs  # a step that hardly ever changes is none
    return Series.of(sorted(once, key=lambda pair: pair[0]))


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
