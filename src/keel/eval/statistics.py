"""Statistics of evaluations and studies: intervals of fractions and means, paired differences, correlations, pass@k."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev, variance

Interval = tuple[float, float]
LEVEL = 0.95
Z95 = 1.959963984540054
MIN_SEEDS = 3  # fewer have too few degrees of freedom for a test
_NOISE = 1e-9  # relative standard deviation below which values count as equal


@dataclass(frozen=True)
class Estimate:
    """A mean over `n` seeds with its t-interval and the p-value of "the mean is 0"; None without variance."""

    mean: float
    low: float | None
    high: float | None
    n: int
    p: float | None = None

    @property
    def margin(self) -> float | None:
        return None if self.high is None else self.high - self.mean

    @property
    def excludes_zero(self) -> bool:
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


@dataclass(frozen=True)
class Correlation:
    """A correlation with its 95 % interval by Fisher's z; None for too few points or |r| = 1.

    For |r| = 1, `p` is the p-value of a permutation test.
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
    """The point with the best mean; `name` is None unless it is significantly better than every other.

    `rivals` are the points that it does not beat significantly, `p` the adjusted p-values of the paired differences.
    """

    name: str | None
    best: str
    rivals: tuple[str, ...]
    p: Mapping[str, float | None]


# ------------------------------------------------------------------------------------------ fractions of problems


def pass_at_k(samples: int, right: int, k: int) -> float:
    """The probability that one of k draws without replacement from `samples` is correct: 1 - C(n-c, k) / C(n, k).

    Unbiased for the probability with k fresh samples (Chen et al. 2021, arXiv 2107.03374).
    """
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def wilson(shares: Sequence[float], samples: int = 1) -> Interval:
    """Wilson's 95 % interval of a mean of fractions, one per problem, each of `samples` samples.

    Samples of one problem are correlated, so the number of trials is the effective sample size (Franco et al. 2019):
    p(1−p)/SE², with the standard error SE between problems, clamped to the range from the number of problems to that of
    all samples. With one sample per problem it is the ordinary interval. It has a width even if all values are equal.
    """
    mean, count = fmean(shares), len(shares)
    between = variance(shares) / count if count > 1 else 0.0
    trials = mean * (1 - mean) / between if between > 0 else float(count)
    trials = min(max(trials, float(count)), float(count * samples))
    centre = (mean + Z95**2 / (2 * trials)) / (1 + Z95**2 / trials)
    margin = Z95 / (1 + Z95**2 / trials) * math.sqrt(mean * (1 - mean) / trials + Z95**2 / (4 * trials**2))
    return max(0.0, centre - margin), min(1.0, centre + margin)


def normal_interval(means: Sequence[float]) -> Interval:
    """Mean ± 1.96 standard errors between problems; unbounded with a single problem."""
    mean = fmean(means)
    margin = Z95 * math.sqrt(variance(means) / len(means)) if len(means) > 1 else math.inf
    return mean - margin, mean + margin


def paired_interval(differences: Sequence[float], samples: int = 1) -> Interval:
    """The adjusted Wald interval of a mean of paired differences in [−1, 1], 95 %.

    m ± 1.96·√((s − m²)/(n+2)) with m = Σdᵢ/(n+2) and s = (Σdᵢ² + 2a²)/(n+2): two problems are added, one that gains a
    and one that loses a, so that the interval has a width even if no problem changed. With one sample per problem,
    a = 1 (Bonett and Price 2012, doi 10.3102/1076998611411915). With k samples, a² is 1/k, the variance of a mean of k
    answers. If the mean square of the nonzero differences is larger, a² is that, because samples of one problem are
    correlated.
    """
    changed = [d * d for d in differences if d]
    added = max(1 / samples, fmean(changed)) if changed else 1 / samples
    count = len(differences) + 2
    middle = sum(differences) / count
    margin = Z95 * math.sqrt(((sum(changed) + 2 * added) / count - middle**2) / count)
    return max(-1.0, middle - margin), min(1.0, middle + margin)


# --------------------------------------------------------------------------------------------------- estimates


def estimate(values: Sequence[float], *, scale: float = 0.0) -> Estimate | None:
    """Mean, t-interval and two-sided p of "the mean is 0"; None without values.

    Values that are equal up to rounding, relative to `scale` or to their size, have no interval. A few seeds agree
    because the measurement is coarse, which does not predict the next seed.
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
    from scipy.special import stdtr, stdtrit  # as scipy.stats.t, with a fifth of its import time

    se = deviation / math.sqrt(n)
    margin = float(stdtrit(n - 1, 0.5 + LEVEL / 2)) * se
    return Estimate(mean, mean - margin, mean + margin, n, float(2 * stdtr(n - 1, -abs(mean) / se)))


def paired(first: Mapping[int, float], second: Mapping[int, float]) -> Estimate | None:
    """The difference second − first over the seeds that both have."""
    both = sorted(first.keys() & second.keys())
    scale = max((abs(values[seed]) for values in (first, second) for seed in both), default=0.0)
    return estimate([second[seed] - first[seed] for seed in both], scale=scale)


def p_value_of(estimated: Estimate | None) -> float | None:
    """The p-value of an estimate over at least MIN_SEEDS seeds."""
    return None if estimated is None or estimated.n < MIN_SEEDS else estimated.p


def holm(p: Mapping[str, float | None]) -> dict[str, float | None]:
    """Holm's step-down adjusted p-values: for m tests, max over the smaller ones of (m − rank)·p, at most 1."""
    ranked = sorted((value, name) for name, value in p.items() if value is not None)
    adjusted: dict[str, float | None] = dict.fromkeys(p)
    highest = 0.0
    for rank, (value, name) in enumerate(ranked):
        highest = max(highest, min(1.0, (len(ranked) - rank) * value))
        adjusted[name] = highest
    return adjusted


def winner(points: Mapping[str, Mapping[int, float]]) -> Winner | None:
    """The point with the highest mean, named the winner only if it beats every other one significantly.

    Required: paired differences over at least three seeds whose p-values, adjusted by Holm for the number of
    rivals, are below 0.05, and non-overlapping t-intervals.
    """
    means = {name: mean for name, values in points.items() if (mean := estimate(list(values.values()))) is not None}
    if not means:
        return None
    best = max(means, key=lambda name: means[name].mean)
    others = [name for name in means if name != best]
    adjusted = holm({name: p_value_of(paired(points[name], points[best])) for name in others})
    rivals = tuple(
        name
        for name in others
        if (p := adjusted[name]) is None or p >= 1 - LEVEL or intervals_overlap(means[best], means[name])
    )
    return Winner(best if others and not rivals else None, best, rivals, adjusted)


def intervals_overlap(first: Estimate, second: Estimate) -> bool:
    """Whether two intervals overlap; True if one is missing."""
    if first.low is None or first.high is None or second.low is None or second.high is None:
        return True
    return first.low <= second.high and second.low <= first.high


# ------------------------------------------------------------------------------------------------ correlations


def pearson(xs: Sequence[float], ys: Sequence[float]) -> Correlation | None:
    """Linear correlation; None if one of the two is constant."""
    return _correlation(xs, ys, lambda value: 1.0)


def spearman(xs: Sequence[float], ys: Sequence[float]) -> Correlation | None:
    """Correlation of ranks; its z has the variance (1 + r²/2)/(n − 3) (Bonett and Wright 2000)."""
    return _correlation(ranks(xs), ranks(ys), lambda value: 1 + value * value / 2)


def _correlation(xs: Sequence[float], ys: Sequence[float], z_variance: Callable[[float], float]) -> Correlation | None:
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
    margin = NormalDist().inv_cdf(0.5 + LEVEL / 2) * math.sqrt(z_variance(r) / (n - 3))
    return Correlation(r, math.tanh(math.atanh(r) - margin), math.tanh(math.atanh(r) + margin), n)


def _perfect(xs: Sequence[float]) -> float:
    """Two-sided permutation p-value of |r| = 1: 2·Πmᵢ!/n!, with mᵢ the counts of equal values. At most 1."""
    same = math.prod(math.factorial(list(xs).count(value)) for value in set(xs))
    return min(1.0, 2 * same / math.factorial(len(xs)))


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; ties have their mean rank."""
    order = sorted(values)
    first = {value: order.index(value) for value in set(values)}
    return [first[value] + (order.count(value) + 1) / 2 for value in values]


def pareto_frontier(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """The Pareto-optimal (cost, gain) points by rising cost."""
    undominated: list[str] = []
    highest = -math.inf
    for name in sorted(points, key=lambda key: (points[key][0], -points[key][1])):
        if points[name][1] > highest:
            undominated.append(name)
            highest = points[name][1]
    return undominated
