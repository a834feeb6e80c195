"""Shapes of a logged metric, each tested against its own noise: trends, jumps, falls from a peak, flat lines.

Everything is robust (medians, ranks) and takes autocorrelation into account, so that a chance means what it says on the
noise of a training run: https://doi.org/10.2307/1907187 (Mann), https://doi.org/10.1016/S0022-1694(97)00125-X (Hamed
and Rao).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from keel.doctor.history import Series

LEAST = 20  # values below which a shape is not told from noise
BLOCKS = 12  # medians that a trend is ranked by
MEDIAN_ERROR = 1.2533  # standard error of a median over that of a mean, for normal noise
MAD = 1.4826  # a normal deviation over its median absolute deviation


@dataclass(frozen=True)
class Change:
    """A level before and after, the step between them, and the chance of as much under noise alone."""

    before: float
    after: float
    step: int
    chance: float

    @property
    def size(self) -> float:
        """After minus before."""
        return self.after - self.before


def median(series: Series) -> float:
    """Of the finite values; NaN where there is none."""
    values = series.finite.values
    return float(np.median(values)) if values else math.nan


@lru_cache(maxsize=256)
def noise(series: Series) -> tuple[float, float]:
    """(deviation of a value around the series' own course, autocorrelation time in values)."""
    values = np.asarray(series.finite.values)
    if len(values) < 3:
        return math.nan, 1.0
    rest = values - _course(values, max(11, len(values) // 8))  # a shorter one would take slow noise for the course
    spread = float(np.std(rest))
    deviation = max(MAD * float(np.median(np.abs(rest - np.median(rest)))), 0.2 * spread)
    if spread == 0:
        return 0.0, 1.0
    centred = rest - rest.mean()
    lag = float(np.sum(centred[1:] * centred[:-1]) / np.sum(centred * centred))
    lag = min(0.9, max(0.0, lag + 1.5 / len(values) + 0.1))  # taking out the course takes out correlation, too
    return deviation, (1 + lag) / (1 - lag)


def _course(values: np.ndarray, window: int) -> np.ndarray:
    """Running medians; beyond the ends the series goes on as it came, mirrored at its last value."""
    half = min(window // 2, len(values) - 1)
    padded = np.pad(values, half, mode="reflect", reflect_type="odd")
    return np.asarray(np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1), axis=-1))


@lru_cache(maxsize=256)
def trend(series: Series) -> Change | None:
    """First block against last, with the chance of Kendall's rank test over blocks; None where values are too few.

    Blocks are as long as the noise remembers, so that their medians are next to independent.
    """
    from scipy import stats

    values = np.asarray(series.finite.values)
    if len(values) < LEAST:
        return None
    _, time = noise(series)
    count = min(BLOCKS, int(len(values) / max(1.0, 1.5 * time)))
    if count < 7:  # seven ranks in order have a chance of 1 in 2520
        return None
    levels = np.array([np.median(block) for block in np.array_split(values, count)])
    if np.ptp(levels) == 0:
        return Change(float(levels[0]), float(levels[-1]), int(series.steps[-1]), 1.0)
    chance = float(stats.kendalltau(np.arange(count), levels).pvalue)
    return Change(float(levels[0]), float(levels[-1]), int(series.steps[-1]), chance)


@lru_cache(maxsize=256)
def ends(series: Series) -> Change | None:
    """First tenth against last, medians: a change that is over within a few values ranks as no trend.

    Two windows at the ends show how far slow noise wanders, which its estimates leave out: in noise that remembers, a
    chance of 1 in 2000 comes ten times as often, so that it is named twenty times as large.
    """
    values = np.asarray(series.finite.values)
    if len(values) < LEAST:
        return None
    window = max(5, len(values) // 10)
    before, after = float(np.median(values[:window])), float(np.median(values[-window:]))
    chance = 20 * _chance(after - before, *noise(series), window, window)
    return Change(before, after, int(series.finite.steps[-1]), min(1.0, chance))


def course(series: Series) -> Change | None:
    """A steady change, or one that was over early: the less likely of the two under noise, counted twice."""
    change = min(filter(None, (trend(series), ends(series))), key=lambda change: change.chance, default=None)
    return None if change is None else replace(change, chance=min(1.0, 2 * change.chance))


def few_trend(series: Series) -> Change | None:
    """As `trend` for the few values of an evaluation, whose noise is fresh each time; five at least.

    By ranks, which seven can decide, or by a line, from which fewer must not stray: the less likely, counted twice.
    """
    from scipy import stats

    values = series.finite.values
    if len(values) < 5:
        return None
    third = len(values) // 3
    before, after = float(np.median(values[:third])), float(np.median(values[-third:]))
    if np.ptp(values) == 0:
        return Change(before, after, int(series.steps[-1]), 1.0)
    ranks = float(stats.kendalltau(range(len(values)), values).pvalue)
    line = float(stats.linregress(range(len(values)), values).pvalue)
    return Change(before, after, int(series.steps[-1]), min(1.0, 2 * min(ranks, line)))


def fall(series: Series) -> Change | None:
    """From the highest level to the last one, each a median over a tenth of the series; None where it is too short."""
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
    chance = 3 * _chance(change, deviation, time, window, window) * len(values) / window  # the best of many windows
    return Change(float(levels[peak]), float(levels[-1]), int(finite.steps[since]), min(1.0, chance))


def rise(series: Series) -> Change | None:
    """From the first level to the highest one, measured as the way down from it."""
    finite = series.finite
    back = fall(Series(tuple(-step for step in reversed(finite.steps)), tuple(reversed(finite.values))))
    return None if back is None else Change(back.after, back.before, -back.step, back.chance)


def jumps(series: Series, chance: float) -> list[Change]:
    """Steps at which the level changes at once and stays, each with at most that chance over all steps of the series.

    The change from one value to the next has to stand out from all others, and to be most of the change of level.
    """
    finite, window = series.finite, 10
    _, frozen = frozen_since(series)
    if frozen >= LEAST:  # what stops changing has no noise of its own: that before it tells whether it jumped there
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
    """Whether the windows' middle halves touch: a change within the reach of the noise around it is no jump."""
    low, high = (before, after) if np.median(before) < np.median(after) else (after, before)
    return bool(np.quantile(low, 0.9) >= np.quantile(high, 0.1))


def _chance(change: float, deviation: float, time: float, first: int, last: int) -> float:
    """Two-sided, of a difference of two medians."""
    from scipy import stats

    if change == 0 or math.isnan(deviation):
        return 1.0
    error = MEDIAN_ERROR * deviation * math.sqrt(time * (1 / first + 1 / last))
    return 2 * float(stats.t.sf(abs(change) / error, first + last - 2)) if error > 0 else 0.0


def jitter(series: Series) -> float:
    """The deviation of a value from the line between its neighbours: jumps, slopes and slow swings hardly count."""
    bends = np.diff(np.asarray(series.finite.values), 2) / math.sqrt(6)  # of 1, −2 and 1 values
    if not len(bends):
        return math.nan
    return MAD * float(np.median(np.abs(bends))) or 0.2 * float(np.std(bends))  # where most values are the same


def around(series: Series, step: float, window: int) -> Change | None:
    """The levels before a step and from it on, with the chance by the changes from value to value; None at the ends."""
    values, at = series.finite.values, bisect_left(series.finite.steps, step)
    before, after = values[max(0, at - window) : at], values[at : at + window]
    if min(len(before), len(after)) < window // 3:
        return None
    first, last = float(np.median(before)), float(np.median(after))
    return Change(first, last, int(step), _chance(last - first, jitter(series), 1.0, len(before), len(after)))


def zigzag(values: Sequence[float], size: float) -> int:
    """How often values go up or down by more than `size`, one after the other."""
    count, direction, low, high = 0, 0, math.inf, -math.inf
    for value in values:
        low, high = min(low, value), max(high, value)
        if direction <= 0 and value > low + size:
            count, direction, high = count + 1, 1, value
        elif direction >= 0 and value < high - size:
            count, direction, low = count + 1, -1, value
    return count


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
    """The chance that a mean of 0 or more gives values as often, and as far, below 0."""
    from scipy import stats

    finite = series.finite.values
    values = np.asarray([value for value in finite if abs(value) > rounding])
    if not len(values) or np.mean(finite) >= 0:
        return 1.0
    _, time = noise(series)
    count = max(1, round(len(values) / time))
    below = round(count * float(np.mean(values < 0)))
    sign = float(stats.binomtest(below, count, 0.5, alternative="greater").pvalue)
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    if spread == 0:
        return sign
    return max(sign, float(stats.t.cdf(np.mean(values) / (spread * math.sqrt(1 / count)), max(1, count - 1))))
