"""A run's past as data: whoever wrote it, under Keel's names."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keel.lab.runs import number, option_of

Record = Mapping[str, Any]
KL_NAMES = ("kl/policy_ref/exact/mean", "kl/policy_ref/k3/mean", "kl/policy_ref/k2/mean", "kl/policy_ref/k1/mean")


@dataclass(frozen=True)
class Series:
    """One metric over steps; what was not finite is NaN."""

    steps: tuple[float, ...]
    values: tuple[float, ...]

    @classmethod
    def of(cls, pairs: Iterable[tuple[float, Any]]) -> Series:
        """From (step, value) pairs; anything that is no finite number becomes NaN."""
        finite = [(float(step), _finite(value)) for step, value in pairs]
        return cls(tuple(step for step, _ in finite), tuple(value for _, value in finite))

    @property
    def finite(self) -> Series:
        """Only the finite ones."""
        return Series.of((s, v) for s, v in zip(self.steps, self.values, strict=True) if math.isfinite(v))

    @property
    def bad_steps(self) -> tuple[int, ...]:
        """Steps at which the value was not finite."""
        return tuple(int(s) for s, v in zip(self.steps, self.values, strict=True) if not math.isfinite(v))

    def head(self, count: int) -> Series:
        """The first values."""
        return Series(self.steps[:count], self.values[:count])

    def tail(self, count: int) -> Series:
        """The last values."""
        return Series(self.steps[-count:], self.values[-count:])

    @property
    def mean(self) -> float:
        """Of the finite values; NaN where there is none."""
        finite = [value for value in self.values if math.isfinite(value)]
        return statistics.fmean(finite) if finite else math.nan

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


def _finite(value: Any) -> float:
    finite = number(value)
    return math.nan if finite is None else finite


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
        measured = finals[-1].get("metrics") or {}
        return next((_finite(measured[name]) for name in KL_NAMES if name in measured), None)

    @property
    def steps(self) -> int:
        """The last step that was recorded."""
        return int(max((series.steps[-1] for series in self.series.values() if series.steps), default=0))

    def option(self, dotted: str) -> Any:
        """A value of the configuration, None where it is not known."""
        return option_of(self.config, dotted)


def series_of(lines: Iterable[Record], step: str = "step") -> dict[str, Series]:
    """Lines of metrics, each with its step, as one series a name; a null is a value that was not finite."""
    pairs: dict[str, list[tuple[float, Any]]] = {}
    for index, line in enumerate(lines, start=1):
        at = _finite(line.get(step))
        at = float(index) if math.isnan(at) else at
        for name, value in line.items():
            if name != step and (value is None or (isinstance(value, int | float) and not isinstance(value, bool))):
                pairs.setdefault(name, []).append((at, value))
    return {name: Series.of(sorted(points, key=lambda pair: pair[0])) for name, points in pairs.items()}
