"""What every check works with: a log with its thresholds, what its reward and policy do, and reasons to leave off."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, wraps
from itertools import pairwise

from keel.doctor import advice
from keel.doctor.findings import Advice, Finding, Options, Severity, finding
from keel.doctor.history import History, Series
from keel.doctor.names import option_name
from keel.doctor.shapes import LEAST, Change, course, frozen_since, median, noise
from keel.doctor.thresholds import Thresholds, load_thresholds

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


class Missing(Exception):
    """Why the codes of a check cannot be decided."""


def not_shown(what: str) -> Missing:
    """The commonest reason."""
    return Missing(f"the log does not show {what}")


@dataclass(frozen=True)
class Trend:
    """The reward's last third against its first: means, the gain in standard errors, and one of these."""

    before: float
    after: float
    z_score: float
    error: float = 0.0

    @property
    def text(self) -> str:
        """For evidence."""
        return f"reward {self.before:.3g} → {self.after:.3g} ({self.z_score:+.1f} standard errors)"


@dataclass(frozen=True)
class Log(History):
    """A history with the thresholds that it is judged by."""

    limits: Thresholds = field(default_factory=load_thresholds)

    @classmethod
    def of(cls, history: History, limits: Thresholds) -> Log:
        """The same history with thresholds."""
        return cls(**{**vars(history), "limits": limits})

    def need(self, name: str, what: str) -> Series:
        """A metric that a check cannot do without."""
        series = self.get(name)
        if series is None:
            raise not_shown(what)
        return series

    @property
    def need_kl(self) -> tuple[str, Series]:
        """The same of the KL."""
        if self.kl is None:
            raise not_shown(KL)
        return self.kl

    def now(self, name: str, otherwise: float = math.nan) -> float:
        """The mean of a metric's last steps."""
        series = self.get(name)
        return otherwise if series is None else series.finite.tail(RECENT).mean

    def shape(self, name: str, what: str, shape: Callable[[Series], Change | None]) -> tuple[Series, Change]:
        """A metric and its shape."""
        series = self.need(name, what)
        change = shape(series)
        if change is None:
            raise Missing(f"{len(series.finite)} logged steps are too few to tell the course of {what} from noise")
        return series, change

    @property
    def level(self) -> float:
        """The chance of a false alarm that each test of a shape may have."""
        return self.limits["log_chance"] / SHAPES

    def clear(self, change: Change | None, tests: int = 1) -> bool:
        """Whether a change is there, and not noise; where the clearest of several `tests` decides, each has a part."""
        return change is not None and tests * change.chance <= self.level

    def course(self, name: str) -> Change | None:
        """How a metric changes over the run, beyond noise."""
        series = self.get(name)
        change = course(series) if series is not None else None
        return change if self.clear(change) else None

    # ------------------------------------------------------------------------ the reward

    @cached_property
    def trend(self) -> Trend | None:
        """None where fewer than six steps have a reward."""
        rewards = self.get("reward/mean")
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

    @property
    def need_trend(self) -> Trend:
        """The trend, or why there is none."""
        self.need("reward/mean", "the reward")
        if self.trend is None:
            raise Missing("fewer than six steps have a reward")
        return self.trend

    @property
    def gain(self) -> str:
        """The trend as text; "" where there is none."""
        return self.trend.text if self.trend is not None else ""

    @property
    def rose(self) -> bool:
        """Whether the reward has grown by more than noise."""
        return self.trend is not None and self.trend.z_score > self.limits["flat_reward"]

    @property
    def flat(self) -> bool:
        """Whether a gain can be ruled out: its interval lies within `flat_gain` of the rewards' size."""
        sigmas = self.limits["flat_reward"]
        if self.trend is None or abs(self.trend.z_score) > sigmas:
            return False
        most = abs(self.trend.after - self.trend.before) + sigmas * self.trend.error
        if most > self.limits["flat_gain"] * self.size:
            raise Missing(f"the reward's noise hides any gain up to {most:.2g}: more steps, or larger batches, tell")
        return True

    @property
    def size(self) -> float:
        """How much rewards differ between completions; their size where that was not recorded."""
        for name in ("reward/std", "reward/within_group_std"):
            if (spread := self.get(name)) is not None and (size := median(spread)) > 0:
                return size
        rewards = self.get("reward/mean")
        return 0.0 if rewards is None else max(abs(value) for value in rewards.finite.values)

    @property
    def equal_groups(self) -> Series | None:
        """The share of groups whose rewards are equal; from their spread, or from rewards that are all the same.

        Of steps whose rewards differ only between groups nothing is known, so that the last ones must be equal.
        """
        share = self.get("reward/zero_variance_fraction")
        if share is not None:
            return share
        spread = self.get("reward/within_group_std") or self.get("reward/std") or self.same_rewards
        if spread is None and self.ranges is not None and not any(self.ranges.tail(RECENT).values):
            spread = self.ranges
        return None if spread is None else spread.mapped(lambda value: float(value == 0))

    @property
    def ranges(self) -> Series | None:
        """The highest reward of a step less the lowest, where both are recorded."""
        highest, lowest = self.get("reward/max"), self.get("reward/min")
        if highest is None or lowest is None or highest.steps != lowest.steps:
            return None
        return Series.of((s, a - b) for s, a, b in zip(highest.steps, highest.values, lowest.values, strict=True))

    @property
    def same_rewards(self) -> Series | None:
        """A spread of 0 where the mean reward is the same to the last digit at all steps, or since it is at its top."""
        rewards = self.get("reward/mean")
        since, count = frozen_since(rewards) if rewards is not None else (0, 0)
        if rewards is None or count < LEAST:
            return None
        if count < len(rewards) and rewards.finite.values[-1] < max(rewards.finite.values):
            return None
        return Series.of((step, 0.0 if step >= since else 1.0) for step in rewards.steps)

    @property
    def solved(self) -> bool:
        """Whether nothing is left to learn: held-out accuracy of the trained task, or the reward, is near the most.

        That is the most that was ever paid, or 1.
        """
        return self.solved_held_out or self.saturated

    @property
    def solved_held_out(self) -> bool:
        """By the held-out accuracy of the trained task."""
        trained = [record for record in self.evaluations if record.get("split") == "trained"]
        last = trained[-1].get("pass@1") if trained else None
        return isinstance(last, int | float) and last >= self.limits["solved_accuracy"]

    @property
    def saturated(self) -> bool:
        """By the reward in training."""
        highest = self.get("reward/max")
        best = 1.0 if highest is None else max(highest.finite.values)
        return best >= self.now("reward/mean") >= self.limits["solved_accuracy"] * best > 0

    # ------------------------------------------------------------------------ the policy

    @property
    def movement(self) -> str | None:
        """What shows that the policy moves, other than its KL; None where nothing does."""
        for name in MOVED:
            series = self.get(name)
            if series is not None and (change := course(series)) is not None and self.clear(change, len(MOVED)):
                return f"{name} goes from {change.before:.3g} to {change.after:.3g}"
        clipped = self.get("ratio/clip_fraction")
        if clipped is not None and clipped.mean > 0 and len(set(clipped.finite.values)) > 1:
            return f"{100 * clipped.mean:.2g} % of the ratios are clipped"
        return None

    @property
    def has_teacher(self) -> bool:
        """Whether the reference is another model, which the policy is to come nearer to."""
        return self.option("reference.model") is not None

    def omitted(self, name: str, *companions: str) -> list[int]:
        """Steps that have what is logged beside a metric and not the metric: trainers leave out what is not finite.

        None where it is logged more rarely, or on a schedule of its own.
        """
        series = self.get(name)
        beside = next((other for n in companions if (other := self.get(n)) is not None), None)
        if series is None or beside is None or self.source == "keel":  # which writes a null
            return []
        missing = sorted(set(beside.steps) - set(series.steps))
        within = [step for step in missing if series.steps[0] < step < series.steps[-1]]
        scheduled = len(within) > 2 and len({after - before for before, after in pairwise(within)}) == 1
        rarely = 3 * len(within) > len(beside) or series.steps[0] != beside.steps[0]
        return [] if scheduled or rarely or len(missing) < 3 else [int(step) for step in missing]

    # ------------------------------------------------------------------------ what to change

    def opt(self, dotted: str) -> str:
        """An option under the name that the run's own trainer has for it."""
        return option_name(dotted, self.source)

    def times(self, dotted: str, factor: float, how: str) -> Advice:
        """An option at a multiple of what it is."""
        return advice.times(self.config, dotted, factor, how, self.source)

    def rate(self, factor: float, how: str) -> Advice:
        """The learning rate at a multiple of what it is."""
        return self.times("optim.learning_rate", factor, how)

    @property
    def stronger(self) -> Advice:
        """A larger β."""
        return advice.stronger(self.config, self.source)

    @property
    def weaker(self) -> Advice:
        """A smaller β."""
        return advice.weaker(self.config, self.source)

    def keel(self, options: Options) -> Advice:
        """Options that only a configuration of Keel's has, and this one has not already."""
        return advice.setting("{}", advice.changes(self.config, options) if self.source == "keel" else {})

    @property
    def unfiltered(self) -> Advice:
        """Sampling from the whole distribution."""
        return advice.setting("set {}", advice.unfiltered(self.config, self.source))


CheckResults = Iterator[Finding | Unchecked]
Check = Callable[[Log], CheckResults]
CHECKS: dict[Check, tuple[str, ...]] = {}  # and the codes that each decides


def check(*codes: str) -> Callable[[Check], Check]:
    """Registers a check; where it lacks something, its codes are unchecked. One without codes adds to another."""

    def register(rule: Check) -> Check:
        @wraps(rule)
        def results(log: Log) -> CheckResults:
            try:
                yield from rule(log)
            except Missing as why:
                yield from (Unchecked(code, str(why)) for code in codes)

        CHECKS[results] = codes
        return results

    return register


def percent(share: float, digits: str = ".0f") -> str:
    """`12 %`."""
    return f"{100 * share:{digits}} %"


def joined(*parts: str | None, by: str = "; ") -> str:
    """Those of the texts that are there."""
    return by.join(part for part in parts if part)


def of_steps(steps: Sequence[int]) -> str:
    """`steps 1, 2, 3, 4, 5 and 7 more`."""
    shown = ", ".join(map(str, steps[:5]))
    return f"step{'s' if len(steps) > 1 else ''} {shown}" + (f" and {len(steps) - 5} more" if len(steps) > 5 else "")


def over(
    log: Log,
    code: str,
    metric: str,
    limit: str,
    evidence: str,
    cause: str,
    advice: str | Advice,
    *,
    grave: str | None = None,
    whole: bool = False,
) -> CheckResults:
    """A share whose mean over the last steps, or the whole run, is over a limit; an error from `grave` on.

    `evidence` may name the `{share}` in percent, the `{mean}` and the `{span}`.
    """
    series = log.get(metric)
    now = Series((), ()) if series is None else series.finite if whole else series.finite.tail(RECENT)
    if now.mean > log.limits[limit]:
        text = evidence.format(share=percent(now.mean), mean=f"{now.mean:.2g}", span=now.span)
        severity: Severity | None = None
        if grave is not None:
            severity = "error" if now.mean > log.limits[grave] else "warning"
        yield finding(code, text, cause, advice, severity, share=min(1.0, now.mean))
