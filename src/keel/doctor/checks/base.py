"""What every check works with: its two kinds of answer, and the trend of the reward."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from keel.doctor.findings import Finding
from keel.doctor.history import History, Series
from keel.doctor.names import option_name
from keel.doctor.shapes import LEAST, Change, course, frozen_since, median, noise, trend
from keel.doctor.thresholds import Thresholds

KL = "KL(policy‖reference)"
RECENT = 10  # steps that "now" is the mean of
SMALL_VOCABULARY, LARGE_VOCABULARY = 32_000, 400_000  # of today's models
MOVED = ("reward/mean", "entropy/mean", "length/mean")  # what a policy that moves may show
SHAPES = 20  # tests against noise that one log goes through: they share `log_chance`


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
    error: float = 0.0  # of the gain

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
    _, memory = noise(rewards)
    error = math.sqrt(memory * (statistics.variance(first) + statistics.variance(last)) / third)
    z_score = gain / error if error > 0 else math.copysign(math.inf, gain) if gain else 0.0
    return Trend(statistics.fmean(first), statistics.fmean(last), z_score, error)


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


def reward_flat(history: History, thresholds: Thresholds) -> bool | None:
    """Whether a gain can be ruled out: its interval lies within `flat_gain` of the rewards' size; None: undecided."""
    trend, scale = reward_trend(history), reward_size(history)
    if trend is None or abs(trend.z_score) > thresholds["flat_reward"]:
        return False
    most = abs(trend.after - trend.before) + thresholds["flat_reward"] * trend.error
    return True if most <= thresholds["flat_gain"] * scale else None


def undecided(code: str, history: History, thresholds: Thresholds) -> Unchecked:
    """A reward whose noise hides what may be a gain."""
    trend = reward_trend(history)
    most = 0.0 if trend is None else trend.after - trend.before + thresholds["flat_reward"] * trend.error
    return Unchecked(code, f"the reward's noise hides any gain up to {most:.2g}: more steps, or larger batches, tell")


def reward_size(history: History) -> float:
    """How much rewards differ between completions; their size where that was not recorded."""
    for name in ("reward/std", "reward/within_group_std"):
        spread = history.get(name)
        if spread is not None and (size := median(spread)) > 0:
            return size
    rewards = history.get("reward/mean")
    return 0.0 if rewards is None else max(abs(value) for value in rewards.finite.values)


def equal_groups(history: History) -> Series | None:
    """The share of groups whose rewards are equal; from their spread, or from rewards that are all the same.

    Of steps whose rewards differ only between groups nothing is known, so that the last ones must be equal.
    """
    share = history.get("reward/zero_variance_fraction")
    if share is not None:
        return share
    spread = history.get("reward/within_group_std") or history.get("reward/std") or same_rewards(history)
    if spread is None:
        ranges = reward_ranges(history)
        spread = ranges if ranges is not None and not any(ranges.tail(RECENT).values) else None
    if spread is None:
        return None
    return Series.of((s, 1.0 if v == 0 else 0.0) for s, v in zip(spread.steps, spread.values, strict=True))


def reward_ranges(history: History) -> Series | None:
    """The highest reward of a step less the lowest, where both are recorded."""
    highest, lowest = history.get("reward/max"), history.get("reward/min")
    if highest is None or lowest is None or highest.steps != lowest.steps:
        return None
    return Series.of((s, a - b) for s, a, b in zip(highest.steps, highest.values, lowest.values, strict=True))


def same_rewards(history: History) -> Series | None:
    """A spread of 0 where the mean reward is the same to the last digit at every step, or since it is at its top."""
    rewards = history.get("reward/mean")
    since, count = frozen_since(rewards) if rewards is not None else (0, 0)
    if rewards is None or count < LEAST:
        return None
    if count < len(rewards) and rewards.finite.values[-1] < max(rewards.finite.values):
        return None
    return Series.of((step, 0.0 if step >= since else 1.0) for step in rewards.steps)


def level(thresholds: Thresholds) -> float:
    """The chance of a false alarm that each test of a shape may have."""
    return thresholds["log_chance"] / SHAPES


def clear(change: Change | None, thresholds: Thresholds, tests: int = 1) -> bool:
    """Whether a change is there, and not noise; where the clearest of several `tests` decides, each has its part."""
    return change is not None and tests * change.chance <= level(thresholds)


def shape_of(
    history: History, code: str, name: str, what: str, shape: Callable[[Series], Change | None] = trend
) -> tuple[Series, Change] | Unchecked:
    """A metric and its shape, or why it has none: what every check of a shape begins with."""
    series = history.get(name)
    if series is None:
        return not_recorded(code, what)
    change = shape(series)
    if change is None:
        return Unchecked(code, f"{len(series.finite)} logged steps are too few to tell the course of {what} from noise")
    return series, change


def movement(history: History, thresholds: Thresholds) -> str | None:
    """What shows that the policy moves, other than its KL; None where nothing does."""
    for name in MOVED:
        series = history.get(name)
        if series is not None and clear(change := course(series), thresholds, len(MOVED)) and change is not None:
            return f"{name} goes from {change.before:.3g} to {change.after:.3g}"
    clipped = history.get("ratio/clip_fraction")
    if clipped is not None and clipped.mean > 0 and len(set(clipped.finite.values)) > 1:
        return f"{100 * clipped.mean:.2g} % of the ratios are clipped"
    return None


def standard_error(series: Series) -> float:
    """Of the mean; 0 where there is one value."""
    values = series.finite.values
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def solved(history: History, thresholds: Thresholds) -> bool:
    """Whether the held-out accuracy of the trained task leaves nothing to learn."""
    trained = [record for record in history.evaluations if record.get("split") == "trained"]
    last = trained[-1].get("pass@1") if trained else None
    return isinstance(last, int | float) and last >= thresholds["solved_accuracy"]


def saturated(history: History, thresholds: Thresholds) -> bool:
    """Whether the training reward itself leaves nothing to learn: it lies near the most that was ever paid, as 1."""
    rewards = history.get("reward/mean")
    if rewards is None:
        return False
    now, highest = rewards.tail(RECENT).mean, history.get("reward/max")
    best = 1.0 if highest is None else max(highest.finite.values)
    return best >= now >= thresholds["solved_accuracy"] * best > 0


def running_median(series: Series, index: int, window: int = 20, least: int = 5) -> float | None:
    """Of the finite values before `index`; None where there are too few."""
    before = [value for value in series.values[max(0, index - window) : index] if math.isfinite(value)]
    return statistics.median(before) if len(before) >= least else None


def omitted_steps(history: History, name: str, *companions: str) -> list[int]:
    """Steps that have what is logged beside a metric and not the metric: some trainers leave out what is not finite.

    None where it is logged more rarely, or on a schedule of its own.
    """
    series = history.get(name)
    beside = next((other for n in companions if (other := history.get(n)) is not None), None)
    if series is None or beside is None or history.source == "keel":  # which writes a null
        return []
    missing = sorted(set(beside.steps) - set(series.steps))
    within = [step for step in missing if series.steps[0] < step < series.steps[-1]]
    scheduled = len(within) > 2 and len({after - before for before, after in pairwise(within)}) == 1
    rarely = 3 * len(within) > len(beside) or series.steps[0] != beside.steps[0]
    return [] if scheduled or rarely or len(missing) < 3 else [int(step) for step in missing]


def begins_late(series: Series) -> str | None:
    """Why a log says nothing of a run's first steps, as after a resume; None where it does."""
    steps = series.finite.steps
    if len(steps) < 2 or steps[0] <= max(RECENT * (steps[1] - steps[0]), 0.1 * steps[-1]):
        return None
    return f"the log begins at step {steps[0]:.0f}: what was learned before is not in it"


def has_teacher(history: History) -> bool:
    """Whether the reference is another model, which the policy is to come nearer to."""
    return history.option("reference.model") is not None


def opt(history: History, dotted: str) -> str:
    """An option under the name that the run's own trainer has for it."""
    return option_name(dotted, history.source)


def not_recorded(code: str, what: str) -> Unchecked:
    """The commonest reason."""
    return Unchecked(code, f"the log does not show {what}")
