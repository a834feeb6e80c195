"""Mergeable metrics: over microbatches with `+`, over processes with `World.reduce`.

Fields may be one-element tensors on a device; `to_host` moves all of them in one transfer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

Number = float | Tensor


class Metric(Protocol):
    """A partial result: add another of its type, then read `value`."""

    def __add__(self: M, other: M) -> M: ...

    @property
    def value(self) -> float: ...


M = TypeVar("M", bound="Metric")


@dataclass(frozen=True)
class Sum:
    """A total, such as a loss that is already divided by the global denominator."""

    total: Number

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.total + other.total)

    @property
    def value(self) -> float:
        return float(self.total)


@dataclass(frozen=True)
class Mean:
    """total / count, exact under any split of the data; 0 when nothing was counted."""

    total: Number
    count: Number

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float:
        return float(self.total / self.count) if self.count else 0.0


@dataclass(frozen=True)
class Max:
    """The largest value, 0 without values; NaN propagates."""

    largest: Number

    def __add__(self, other: Max) -> Max:
        if isinstance(self.largest, Tensor) and isinstance(other.largest, Tensor):  # math.isnan would synchronise
            return Max(torch.maximum(self.largest, other.largest))
        if math.isnan(self.largest) or math.isnan(other.largest):
            return Max(math.nan)
        return Max(max(self.largest, other.largest))

    @property
    def value(self) -> float:
        return 0.0 if self.largest == -math.inf else float(self.largest)


@dataclass(frozen=True)
class Share:
    """|part| / (|part| + |rest|) of two totals, such as the KL term's share of the loss; 0 when both are 0."""

    part: Number
    rest: Number

    def __add__(self, other: Share) -> Share:
        return Share(self.part + other.part, self.rest + other.rest)

    @property
    def value(self) -> float:
        part, rest = abs(float(self.part)), abs(float(self.rest))
        return part / (part + rest) if part + rest else 0.0


@dataclass(frozen=True)
class EffectiveSampleSize:
    """(Σw)² / (N Σw²) of importance weights: 1 if all are equal, 1/N if one dominates."""

    total: Number
    squares: Number
    count: Number

    def __add__(self, other: EffectiveSampleSize) -> EffectiveSampleSize:
        return EffectiveSampleSize(self.total + other.total, self.squares + other.squares, self.count + other.count)

    @property
    def value(self) -> float:
        return float(self.total**2 / (self.count * self.squares)) if self.count and self.squares else 1.0


@dataclass(frozen=True)
class Quantile:
    """An exact quantile. It keeps all values, so use it for thousands of values, not millions."""

    q: float
    values: tuple[float, ...]

    def __add__(self, other: Quantile) -> Quantile:
        if self.q != other.q:
            raise ValueError(f"cannot merge the {self.q} quantile with the {other.q} quantile")
        return Quantile(self.q, self.values + other.values)

    @property
    def value(self) -> float:
        if not self.values:
            return 0.0
        return torch.quantile(torch.tensor(self.values, dtype=torch.float64), self.q).item()


@dataclass(frozen=True)
class Last:
    """The newest value, such as a measurement of the whole batch; it replaces the previous one."""

    newest: Number

    def __add__(self, other: Last) -> Last:
        return other

    @property
    def value(self) -> float:
        return float(self.newest)


Metrics = Mapping[str, Metric]


def merge(first: Metrics, second: Metrics) -> dict[str, Metric]:
    """Merge two sets of metrics; metrics with the same name are added."""
    merged = dict(first)
    for name, metric in second.items():
        merged[name] = metric if name not in merged or isinstance(metric, Last) else merged[name] + metric
    return merged


def to_host(metrics: Metrics) -> dict[str, Metric]:
    """The same metrics as Python numbers, by one device transfer."""
    numbers = iter(python_numbers(x for metric in metrics.values() for x in vars(metric).values()))
    fields: Mapping[str, Any] = {name: {key: next(numbers) for key in vars(m)} for name, m in metrics.items()}
    return {name: replace(metric, **fields[name]) for name, metric in metrics.items()}  # type: ignore[type-var]


def python_numbers(numbers: Iterable[Any]) -> list[Any]:
    """One-element tensors as Python numbers, by one device transfer; other values are unchanged."""
    given = list(numbers)
    tensors = [x.detach().double() for x in given if isinstance(x, Tensor)]
    moved = iter(torch.stack(tensors).tolist() if tensors else ())
    return [next(moved) if isinstance(x, Tensor) else x for x in given]


def values(metrics: Metrics) -> dict[str, float]:
    """Plain numbers, for the loggers."""
    return {name: metric.value for name, metric in to_host(metrics).items()}
