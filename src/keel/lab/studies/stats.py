"""Small-sample statistics: t-intervals, paired differences, Holm's correction, correlations. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

LEVEL = 0.95
MIN_SEEDS = 3  # two values have one degree of freedom: nothing short of a miracle is told from chance
_NOISE = 1e-9  # a spread below this share of the values is rounding


@dataclass(frozen=True)
class Estimate:
    """A mean over `n` seeds with its t-interval and `p` of "the mean is 0"; None where there is no spread."""

    mean: float
    low: float | None
    high: float | None
    n: int
    p: float | None = None

    @property
    def half(self) -> float | None:
        return None if self.high is None else self.high - self.mean

    @property
    def excludes_zero(self) -> bool:
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


@dataclass(frozen=True)
class Correlation:
    """A correlation with its 95 % interval by Fisher's z; None where there are too few points, or where |r| = 1.

    A perfect one has no such interval but an exact p instead: the share of orders that agree or oppose as perfectly.
    """

    value: float
    low: float | None
    high: float | None
    n: int
    p: float | None = None

    @property
    def excludes_zero(self) -> bool:
        if self.p is not None:
            return self.p < 1 - LEVEL
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


@dataclass(frozen=True)
class Winner:
    """The point with the best mean; `name` is None unless it is better than every other beyond chance.

    `rivals` are those it is not shown to be better than, `p` the adjusted p-values of the paired differences.
    """

    name: str | None
    best: str
    rivals: tuple[str, ...]
    p: Mapping[str, float | None]


# --------------------------------------------------------------------------------------------------- estimates


def estimate(values: Sequence[float], *, scale: float = 0.0) -> Estimate | None:
    """Mean, t-interval and two-sided p of "the mean is 0"; None of no values.

    Equal values, up to rounding at `scale` or their own size, have neither: that few seeds agree to the last digit is
    coarse measurement, and no proof that the next one would.
    """
    if not values:
        return None
    n, mean = len(values), fmean(values)
    if n == 1:
        return Estimate(mean, None, None, 1)
    rounding = _NOISE * max(scale, *map(abs, values))
    deviation = stdev(values)
    if deviation <= rounding:
        return Estimate(mean, None, None, n, 1.0 if abs(mean) <= rounding else None)
    from scipy.special import stdtr, stdtrit  # the cdf and ppf of scipy.stats.t, at a fifth of the import

    se = deviation / math.sqrt(n)
    half = float(stdtrit(n - 1, 0.5 + LEVEL / 2)) * se
    return Estimate(mean, mean - half, mean + half, n, float(2 * stdtr(n - 1, -abs(mean) / se)))


def paired(first: Mapping[int, float], second: Mapping[int, float]) -> Estimate | None:
    """The difference second − first over the seeds that both have."""
    both = sorted(first.keys() & second.keys())
    scale = max((abs(values[seed]) for values in (first, second) for seed in both), default=0.0)
    return estimate([second[seed] - first[seed] for seed in both], scale=scale)


def tested(found: Estimate | None) -> float | None:
    """The p of an estimate over enough seeds to speak of one."""
    return None if found is None or found.n < MIN_SEEDS else found.p


def holm(p: Mapping[str, float | None]) -> dict[str, float | None]:
    """Holm's step-down adjusted p-values: for m tests, max over the smaller ones of (m − rank)·p, at most 1."""
    known = sorted((value, name) for name, value in p.items() if value is not None)
    adjusted: dict[str, float | None] = dict.fromkeys(p)
    highest = 0.0
    for rank, (value, name) in enumerate(known):
        highest = max(highest, min(1.0, (len(known) - rank) * value))
        adjusted[name] = highest
    return adjusted


def winner(points: Mapping[str, Mapping[int, float]]) -> Winner | None:
    """The point with the highest mean, named the winner only if it beats every other one.

    That takes both: paired differences over at least three seeds whose p-values, adjusted by Holm for the number of
    rivals, are below 0.05, and t-intervals that do not overlap.
    """
    means = {name: found for name, values in points.items() if (found := estimate(list(values.values()))) is not None}
    if not means:
        return None
    best = max(means, key=lambda name: means[name].mean)
    others = [name for name in means if name != best]
    adjusted = holm({name: tested(paired(points[name], points[best])) for name in others})
    rivals = tuple(
        name for name in others if (p := adjusted[name]) is None or p >= 1 - LEVEL or overlap(means[best], means[name])
    )
    return Winner(best if others and not rivals else None, best, rivals, adjusted)


def overlap(first: Estimate, second: Estimate) -> bool:
    """Whether two intervals share a value; without intervals nothing tells them apart."""
    if first.low is None or first.high is None or second.low is None or second.high is None:
        return True
    return first.low <= second.high and second.low <= first.high


# ------------------------------------------------------------------------------------------------ correlations


def pearson(xs: Sequence[float], ys: Sequence[float]) -> Correlation | None:
    """Linear correlation; None where one of the two does not vary."""
    return _correlation(xs, ys, lambda value: 1.0)


def spearman(xs: Sequence[float], ys: Sequence[float]) -> Correlation | None:
    """Correlation of ranks; its z has the variance (1 + r²/2)/(n − 3) (Bonett and Wright 2000)."""
    return _correlation(ranks(xs), ranks(ys), lambda value: 1 + value * value / 2)


def _correlation(xs: Sequence[float], ys: Sequence[float], spread: Callable[[float], float]) -> Correlation | None:
    n = len(xs)
    if n < 3:
        return None
    mx, my = fmean(xs), fmean(ys)
    sxx, syy = (sum((value - mean) ** 2 for value in values) for values, mean in ((xs, mx), (ys, my)))
    if sxx == 0 or syy == 0:
        return None
    r = sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True)) / math.sqrt(sxx * syy)
    if abs(r) > 1 - _NOISE:
        return Correlation(math.copysign(1.0, r), None, None, n, _perfect(xs))
    if n < 4:
        return Correlation(r, None, None, n)
    half = NormalDist().inv_cdf(0.5 + LEVEL / 2) * math.sqrt(spread(r) / (n - 3))
    return Correlation(r, math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half), n)


def _perfect(xs: Sequence[float]) -> float:
    """Two-sided p of |r| = 1: of all n! orders, those that change nothing (equal values may swap), for each sign."""
    same = math.prod(math.factorial(list(xs).count(value)) for value in set(xs))
    return min(1.0, 2 * same / math.factorial(len(xs)))


def ranks(values: Sequence[float]) -> list[float]:
    """From 1; equal values share the mean of their ranks."""
    order = sorted(values)
    first = {value: order.index(value) for value in set(values)}
    return [first[value] + (order.count(value) + 1) / 2 for value in values]


def frontier(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Of (cost, gain) the points that no other beats in both, by rising cost: the best gain at every KL spent."""
    kept: list[str] = []
    highest = -math.inf
    for name in sorted(points, key=lambda key: (points[key][0], -points[key][1])):
        if points[name][1] > highest:
            kept.append(name)
            highest = points[name][1]
    return kept
