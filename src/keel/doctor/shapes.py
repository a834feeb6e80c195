"""Tests of the shape of a logged metric against its own noise: trends, jumps, falls from a peak, flat lines.

All tests are robust (medians, ranks) and correct for autocorrelation, so that their p-values hold for the noise of
training runs: https://doi.org/10.2307/1907187 (Mann), https://doi.org/10.1016/S0022-1694(97)00125-X (Hamed and Rao).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from keel.doctor.history import Series

LEAST = 20  # fewer values cannot be tested
BLOCKS = 12  # number of blocks whose medians are ranked for a trend
MEDIAN_ERROR = 1.2533  # standard error of a median relative to that of a mean, for normal noise
MAD = 1.4826  # standard deviation of normal noise relative to its median absolute deviation


@dataclass(frozen=True)
class Change:
    """A level before and after, the step of the change, and its p-value under noise."""

    before: float
    after: float
    step: int
    chance: float

    @property
    def size(self) -> float:
        """The level after minus the level before."""
        return self.after - self.before


def median(series: Series) -> float:
    """The median of the finite values; NaN if there are none."""
    values = series.finite.values
    return float(np.median(values)) if values else math.nan


@lru_cache(maxsize=256)
def noise(series: Series) -> tuple[float, float]:
    """(standard deviation around the running median, autocorrelation time in values)."""
    values = np.asarray(series.finite.values)
    if len(values) < 3:
        return math.nan, 1.0
    rest = values - _course(values, max(11, len(values) // 8))  # a shorter window would remove slow noise
    spread = float(np.std(rest))
    deviation = max(MAD * float(np.median(np.abs(rest - np.median(rest)))), 0.2 * spread)
    if spread == 0:
        return 0.0, 1.0
    centred = rest - rest.mean()
    lag = float(np.sum(centred[1:] * centred[:-1]) / np.sum(centred * centred))
    lag = min(0.9, max(0.0, lag + 1.5 / len(values) + 0.1))  # removing the running median also removes some correlation
    return deviation, (1 + lag) / (1 - lag)


def _course(values: np.ndarray, window: int) -> np.ndarray:
    """Running medians. Beyond the ends, the series is continued by odd reflection."""
    half = min(window // 2, len(values) - 1)
    padded = np.pad(values, half, mode="reflect", reflect_type="odd")
    return np.asarray(np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1), axis=-1))


@lru_cache(maxsize=256)
def trend(series: Series) -> Change | None:
    """The change from the first block to the last, with the p-value of Kendall's rank test; None for short series.

    A block has at least 1.5 autocorrelation times, so that block medians are nearly independent.
    """
    values = np.asarray(series.finite.values)
    if len(values) < LEAST:
        return None
    from scipy import stats  # the import takes a second, which short runs avoid

    _, time = noise(series)
    count = min(BLOCKS, int(len(values) / max(1.0, 1.5 * time)))
    if count < 7:  # the p-value of seven ranks in order is 1 in 2520
        return None
    levels = np.array([np.median(block) for block in np.array_split(values, count)])
    if np.ptp(levels) == 0:
        return Change(float(levels[0]), float(levels[-1]), int(series.steps[-1]), 1.0)
    chance = float(stats.kendalltau(np.arange(count), levels).pvalue)
    return Change(float(levels[0]), float(levels[-1]), int(series.steps[-1]), chance)


@lru_cache(maxsize=256)
def ends(series: Series) -> Change | None:
    """The change of the median from the first to the last tenth; detects an early change that ranks do not show.

    Slow noise is underestimated: with autocorrelation, a p-value of 1 in 2000 occurs ten times as often. The p-value is
    therefore multiplied by 20.
    """
    values = np.asarray(series.finite.values)
    if len(values) < LEAST:
        return None
    window = max(5, len(values) // 10)
    before, after = float(np.median(values[:window])), float(np.median(values[-window:]))
    chance = 20 * _chance(after - before, *noise(series), window, window)
    return Change(before, after, int(series.finite.steps[-1]), min(1.0, chance))


def course(series: Series) -> Change | None:
    """A steady or an early change: the more significant of `trend` and `ends`, with a doubled p-value."""
    change = min(filter(None, (trend(series), ends(series))), key=lambda change: change.chance, default=None)
    return None if change is None else replace(change, chance=min(1.0, 2 * change.chance))


def few_trend(series: Series) -> Change | None:
    """A trend of the few independent values of an evaluation; needs at least five.

    Ranks need seven values to be significant; a linear fit needs fewer. The smaller p-value is doubled.
    """
    values = series.finite.values
    if len(values) < 5:
        return None
    from scipy import stats

    third = len(values) // 3
    before, after = float(np.median(values[:third])), float(np.median(values[-third:]))
    if np.ptp(values) == 0:
        return Change(before, after, int(series.steps[-1]), 1.0)
    ranks = float(stats.kendalltau(range(len(values)), values).pvalue)
    line = float(stats.linregress(range(len(values)), values).pvalue)
    return Change(before, after, int(series.steps[-1]), min(1.0, 2 * min(ranks, line)))


def fall(series: Series) -> Change | None:
    """The change from the highest level to the last, as medians over a tenth of the series; None for short series."""
    finite = series.finite
    values = np.asarray(finite.values)
    if len(values) < LEAST:
        return None
    window = max(5, len(values) // 10)
    levels = np.median(np.lib.stride_tricks.sliding_window_view(values, window), axis=-1)
    peak = int(np.argmax(levels))
    deviation, time = noise(series)
    change = float(levels[-1] - levels[peak])
    below = np.nonzero(values < (levels[-1] + levels[peak]) / 2)[0]
    since = next((int(i) for i in below if i >= peak + window // 2), len(values) - 1)
    # corrected for choosing the best window
    chance = 3 * _chance(change, deviation, time, window, window) * len(values) / window
    return Change(float(levels[peak]), float(levels[-1]), int(finite.steps[since]), min(1.0, chance))


def rise(series: Series) -> Change | None:
    """The change from the first level to the highest, computed as a `fall` of the reversed series."""
    finite = series.finite
    back = fall(Series(tuple(-step for step in reversed(finite.steps)), tuple(reversed(finite.values))))
    return None if back is None else Change(back.after, back.before, -back.step, back.chance)


def jumps(series: Series, chance: float) -> list[Change]:
    """Steps at which the level changes and stays, each with at most this p-value, corrected for the number of steps.

    The single change must stand out from all others and make up most of the change of level.
    """
    finite, window = series.finite, 10
    _, frozen = frozen_since(series)
    if frozen >= LEAST:  # a constant part has no noise; the part before it shows whether the metric jumped there
        series = finite.head(len(finite) - frozen)
        finite = finite.head(len(finite) - frozen + window)
    values = np.asarray(finite.values)
    if len(series.finite) < LEAST:
        return []
    differences = np.diff(values[: len(series.finite)])
    usual = np.median(differences)
    spread = max(
        MAD * float(np.median(np.abs(differences - usual))), 0.1 * float(np.std(differences)), 1e-12 * np.ptp(values)
    )
    if not spread > 0:
        return []
    deviation, time = noise(series)
    found = []
    for index in range(5, len(values) - 4):
        step = values[index] - values[index - 1]
        if abs(step - usual) < 5 * spread:
            continue
        before, after = values[max(0, index - window) : index], values[index : index + window]
        change = float(np.median(after) - np.median(before))
        if change * step <= 0 or not 0.5 < abs(change / step) < 2:
            continue
        if _overlap(before, after):
            continue
        odds = _chance(change, deviation, time, len(before), len(after)) * len(values)
        if odds <= chance:
            found.append(Change(float(np.median(before)), float(np.median(after)), int(finite.steps[index]), odds))
    return found


def _overlap(before: np.ndarray, after: np.ndarray) -> bool:
    """Whether the 10 % and 90 % quantiles of the windows overlap, so that noise may explain the change."""
    low, high = (before, after) if np.median(before) < np.median(after) else (after, before)
    return bool(np.quantile(low, 0.9) >= np.quantile(high, 0.1))


def _chance(change: float, deviation: float, time: float, first: int, last: int) -> float:
    """The two-sided p-value of a difference between two medians."""
    from scipy.special import stdtr  # as scipy.stats.t, with a fifth of its import time

    if change == 0 or math.isnan(deviation):
        return 1.0
    error = MEDIAN_ERROR * deviation * math.sqrt(time * (1 / first + 1 / last))
    return 2 * float(stdtr(first + last - 2, -abs(change) / error)) if error > 0 else 0.0


def jitter(series: Series) -> float:
    """The standard deviation of a value around the mean of its neighbours; hardly affected by jumps and slopes."""
    bends = np.diff(np.asarray(series.finite.values), 2) / math.sqrt(6)  # coefficients 1, −2 and 1
    if not len(bends):
        return math.nan
    # the fallback for mostly constant values
    return MAD * float(np.median(np.abs(bends))) or 0.2 * float(np.std(bends))


def around(series: Series, step: float, window: int) -> Change | None:
    """The levels before and after a step, with a p-value by `jitter`; None near the ends."""
    values, at = series.finite.values, bisect_left(series.finite.steps, step)
    before, after = values[max(0, at - window) : at], values[at : at + window]
    if min(len(before), len(after)) < window // 3:
        return None
    first, last = float(np.median(before)), float(np.median(after))
    return Change(first, last, int(step), _chance(last - first, jitter(series), 1.0, len(before), len(after)))


def zigzag(values: Sequence[float], size: float) -> int:
    """How often the values alternately rise and fall by more than `size`."""
    count, direction, low, high = 0, 0, math.inf, -math.inf
    for value in values:
        low, high = min(low, value), max(high, value)
        if direction <= 0 and value > low + size:
            count, direction, high = count + 1, 1, value
        elif direction >= 0 and value < high - size:
            count, direction, low = count + 1, -1, value
    return count


def swings(series: Series, factor: float) -> int:
    """How often a positive metric alternately rises and falls by more than a factor."""
    return zigzag([math.log(value) for value in series.finite.values if value > 0], math.log(factor))


def frozen_since(series: Series) -> tuple[int, int]:
    """(first step, number of values) of the last run of equal values."""
    finite = series.finite
    count = 0
    for value in reversed(finite.values):
        if value != finite.values[-1]:
            break
        count += 1
    return (int(finite.steps[-count]), count) if count else (0, 0)


def negative(series: Series, rounding: float) -> float:
    """The p-value of the number and size of negative values if the true mean is 0 or more."""
    finite = series.finite.values
    values = np.asarray([value for value in finite if abs(value) > rounding])
    if not len(values) or np.mean(finite) >= 0:
        return 1.0
    from scipy import stats

    _, time = noise(series)
    count = max(1, round(len(values) / time))
    below = round(count * float(np.mean(values < 0)))
    sign = float(stats.binomtest(below, count, 0.5, alternative="greater").pvalue)
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    if spread == 0:
        return sign
    return max(sign, float(stats.t.cdf(np.mean(values) / (spread * math.sqrt(1 / count)), max(1, count - 1))))
