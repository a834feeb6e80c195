"""The base of all checks: a log with its thresholds, trends of its reward and policy metrics, and `Missing`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from keel.doctor import advice
from keel.doctor.findings import Advice, Finding, Options, Severity, finding
from keel.doctor.history import History, Series, divides_by_std
from keel.doctor.names import option_name
from keel.doctor.shapes import LEAST, Change, course, frozen_since, median, noise
from keel.doctor.thresholds import Thresholds, load_thresholds

KL = "KL(policy‖reference)"
RECENT = 10  # number of last steps that a current value is averaged over
SMALL_VOCABULARY, LARGE_VOCABULARY = 32_000, 400_000  # vocabulary sizes of current models
MOVED = ("reward/mean", "entropy/mean", "length/mean")  # metrics that may change when the policy does
SHAPES = 20  # tests against noise per log; they share `log_chance`


@dataclass(frozen=True)
class Unchecked:
    """A code that could not be decided, and the reason."""

    code: str
    why: str


class Missing(Exception):
    """Raised with the reason why the codes of a check cannot be decided."""


def not_shown(what: str) -> Missing:
    """The exception for a metric that the log lacks."""
    return Missing(f"the log does not show {what}")


@dataclass(frozen=True)
class Trend:
    """The mean reward over the first and last third of the run, the gain as a z-score, and its standard error."""

    before: float
    after: float
    z_score: float
    error: float = 0.0

    @property
    def text(self) -> str:
        """The trend as text for a finding's evidence."""
        return f"reward {self.before:.3g} → {self.after:.3g} ({self.z_score:+.1f} standard errors)"


@dataclass(frozen=True)
class Log(History):
    """A history with the thresholds that apply to it."""

    limits: Thresholds = field(default_factory=load_thresholds)

    @classmethod
    def of(cls, history: History, limits: Thresholds) -> Log:
        return cls(**{**vars(history), "limits": limits})

    def need(self, name: str, what: str) -> Series:
        """A metric, or Missing if the log lacks it."""
        series = self.get(name)
        if series is None:
            raise not_shown(what)
        return series

    @property
    def need_kl(self) -> tuple[str, Series]:
        """The KL to the reference, or Missing if the log lacks it."""
        if self.kl is None:
            raise not_shown(KL)
        return self.kl

    def now(self, name: str, otherwise: float = math.nan) -> float:
        """The mean of a metric over the last steps."""
        series = self.get(name)
        return otherwise if series is None else series.finite.tail(RECENT).mean

    def shape(self, name: str, what: str, shape: Callable[[Series], Change | None]) -> tuple[Series, Change]:
        """A metric and its change of shape, or Missing if it has too few values."""
        series = self.need(name, what)
        change = shape(series)
        if change is None:
            raise Missing(f"{len(series.finite)} logged steps are too few to distinguish a change of {what} from noise")
        return series, change

    @property
    def level(self) -> float:
        """The false-alarm probability that each shape test may have."""
        return self.limits["log_chance"] / SHAPES

    def clear(self, change: Change | None, tests: int = 1) -> bool:
        """Whether a change is significant. `tests` is the number of tests from which it was chosen."""
        return change is not None and tests * change.chance <= self.level

    def course(self, name: str) -> Change | None:
        """The change of a metric over the run, or None if noise can explain it."""
        series = self.get(name)
        change = course(series) if series is not None else None
        return change if self.clear(change) else None

    # ------------------------------------------------------------------------ the reward

    @cached_property
    def trend(self) -> Trend | None:
        """The trend of the reward, or None if fewer than six steps have one."""
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
        """The trend of the reward, or Missing."""
        self.need("reward/mean", "the reward")
        if self.trend is None:
            raise Missing("fewer than six steps have a reward")
        return self.trend

    @property
    def gain(self) -> str:
        """The trend as text, or ""."""
        return self.trend.text if self.trend is not None else ""

    @property
    def rose(self) -> bool:
        """Whether the reward has risen significantly."""
        return self.trend is not None and self.trend.z_score > self.limits["flat_reward"]

    @property
    def flat(self) -> bool:
        """Whether a gain can be ruled out: the confidence interval lies within `flat_gain` of the rewards' spread."""
        sigmas = self.limits["flat_reward"]
        if self.trend is None or abs(self.trend.z_score) > sigmas:
            return False
        most = abs(self.trend.after - self.trend.before) + sigmas * self.trend.error
        if most > self.limits["flat_gain"] * self.size:
            raise Missing(
                f"noise of the reward may hide a gain of up to {most:.2g}: log more steps, or use larger batches"
            )
        return True

    @property
    def size(self) -> float:
        """The spread of rewards between completions, or their absolute size if the spread was not recorded."""
        for name in ("reward/std", "reward/within_group_std"):
            if (spread := self.get(name)) is not None and (size := median(spread)) > 0:
                return size
        rewards = self.get("reward/mean")
        return 0.0 if rewards is None else max(abs(value) for value in rewards.finite.values)

    @property
    def equal_groups(self) -> Series | None:
        """The share of groups with equal rewards, from their spread or from constant mean rewards.

        If only the range of all rewards in a step is known, groups with equal rewards cannot be counted. The range is
        then used only if the last steps have a range of 0.
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
        """The highest reward of each step minus the lowest, if both are recorded."""
        highest, lowest = self.get("reward/max"), self.get("reward/min")
        if highest is None or lowest is None or highest.steps != lowest.steps:
            return None
        return Series.of((s, a - b) for s, a, b in zip(highest.steps, highest.values, lowest.values, strict=True))

    @property
    def same_rewards(self) -> Series | None:
        """An inferred spread: 0 since the mean reward is exactly constant, 1 before.

        None if the constant part is too short, or below an earlier maximum.
        """
        rewards = self.get("reward/mean")
        since, count = frozen_since(rewards) if rewards is not None else (0, 0)
        if rewards is None or count < LEAST:
            return None
        if count < len(rewards) and rewards.finite.values[-1] < max(rewards.finite.values):
            return None
        return Series.of((step, 0.0 if step >= since else 1.0) for step in rewards.steps)

    @property
    def solved(self) -> bool:
        """Whether the held-out accuracy of the trained task, or the reward, is near its maximum.

        The maximum of the reward is the highest recorded reward, or 1.
        """
        return self.solved_held_out or self.saturated

    @property
    def solved_held_out(self) -> bool:
        """Whether the held-out accuracy of the trained task is near its maximum."""
        trained = [record for record in self.evaluations if record.get("split") == "trained"]
        last = trained[-1].get("pass@1") if trained else None
        return isinstance(last, int | float) and last >= self.limits["solved_accuracy"]

    @property
    def saturated(self) -> bool:
        """Whether the training reward is near its maximum."""
        highest = self.get("reward/max")
        best = 1.0 if highest is None else max(highest.finite.values)
        return best >= self.now("reward/mean") >= self.limits["solved_accuracy"] * best > 0

    # ------------------------------------------------------------------------ the policy

    @property
    def movement(self) -> str | None:
        """Evidence other than the KL that the policy changes, as text; None if there is none."""
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
        """Whether the reference is a teacher, a different model that the policy approaches."""
        return self.option("reference.model") is not None

    def omitted(self, name: str, *companions: str) -> list[int]:
        """Steps at which a companion metric was logged and this one was not, because trainers omit non-finite values.

        Empty if the metric is logged rarely or on its own schedule.
        """
        series = self.get(name)
        beside = next((other for n in companions if (other := self.get(n)) is not None), None)
        if series is None or beside is None or self.source == "keel":  # Keel logs null instead
            return []
        missing = sorted(set(beside.steps) - set(series.steps))
        within = [step for step in missing if series.steps[0] < step < series.steps[-1]]
        scheduled = len(within) > 2 and len({after - before for before, after in pairwise(within)}) == 1
        rarely = 3 * len(within) > len(beside) or series.steps[0] != beside.steps[0]
        return [] if scheduled or rarely or len(missing) < 3 else [int(step) for step in missing]

    # ------------------------------------------------------------------------ advice

    def opt(self, dotted: str) -> str:
        """An option's name in the trainer that wrote the log."""
        return option_name(dotted, self.source)

    def times(self, dotted: str, factor: float, how: str) -> Advice:
        """A proposal: an option at a multiple of its value."""
        return advice.times(self.config, dotted, factor, how, self.source)

    def rate(self, factor: float, how: str) -> Advice:
        """A proposal: the learning rate at a multiple of its value."""
        return self.times("optim.learning_rate", factor, how)

    @property
    def stronger(self) -> Advice:
        """A proposal: a larger β."""
        return advice.stronger(self.config, self.source)

    @property
    def weaker(self) -> Advice:
        """A proposal: a smaller β."""
        return advice.weaker(self.config, self.source)

    def keel(self, options: Options) -> Advice:
        """The given options that differ from the current ones, for runs of Keel only."""
        return advice.setting("{}", advice.changes(self.config, options) if self.source == "keel" else {})

    @property
    def unfiltered(self) -> Advice:
        """A proposal: sample without filters."""
        return advice.setting("set {}", advice.unfiltered(self.config, self.source))


CheckResults = Iterator[Finding | Unchecked]
Check = Callable[[Log], CheckResults]
CHECKS: dict[Check, tuple[str, tuple[str, ...]]] = {}  # area of each check, and the codes that it decides


def check(*codes: str, area: str = "") -> Callable[[Check], Check]:
    """Register a check and its codes, which `Missing` leaves unchecked. Without codes, it only adds findings."""

    def register(rule: Check) -> Check:
        def results(log: Log) -> CheckResults:
            try:
                yield from rule(log)
            except Missing as why:
                yield from (Unchecked(code, str(why)) for code in codes)

        CHECKS[results] = area or rule.__module__.rpartition(".")[2], codes
        return results

    return register


def percent(share: float, digits: str = ".0f") -> str:
    """A share in percent, such as `12 %`."""
    return f"{100 * share:{digits}} %"


def joined(*parts: str | None, by: str = "; ") -> str:
    """Join the texts that are not empty."""
    return by.join(part for part in parts if part)


def of_steps(steps: Sequence[int]) -> str:
    """Steps as text, such as `steps 1, 2, 3, 4, 5 and 7 more`."""
    shown = ", ".join(map(str, steps[:5]))
    return f"step{'s' if len(steps) > 1 else ''} {shown}" + (f" and {len(steps) - 5} more" if len(steps) > 5 else "")


@dataclass(frozen=True)
class Level:
    """A table row: a finding if the mean of a metric, over the last steps or the whole run, exceeds a limit.

    `limit` and `grave` are thresholds. Beyond `grave` the finding is an error, otherwise a warning. `evidence` may
    contain `{share}` (percent), `{mean}` and `{span}`. `needed` describes the metric that a log may lack.
    """

    code: str
    metric: str
    limit: str | float
    evidence: str
    cause: str
    advice: str | Callable[[Log], str | Advice]
    below: bool = False
    whole: bool = False
    grave: str = ""
    severity: Severity | None = None
    of: Callable[[float], float] = float
    unless: Callable[[Log], bool] = lambda log: False
    needed: str = ""

    def judged(self, log: Log) -> CheckResults:
        """The finding, if the metric is recorded and exceeds the limit."""
        if self.unless(log):
            return
        series = log.need(self.metric, self.needed) if self.needed else log.get(self.metric)
        if series is None:
            return
        now = series.finite if self.whole else series.finite.tail(RECENT)
        value, limit = self.of(now.mean), log.limits[self.limit] if isinstance(self.limit, str) else self.limit
        if not (value < limit if self.below else value > limit):
            return
        severity = self.severity
        if self.grave:
            severity = "error" if value > log.limits[self.grave] else "warning"
        text = self.evidence.format(share=percent(value, ".3g"), mean=f"{value:.3g}", span=now.span)
        advice, shares = self.advice if isinstance(self.advice, str) else self.advice(log), "{share}" in self.evidence
        yield finding(self.code, text, self.cause, advice, severity, share=min(1.0, value) if shares else None)


def levels(area: str, *rows: Level) -> None:
    """Register table rows as checks of an area."""
    for row in rows:
        rule = check(*([row.code] if row.needed else []), area=area)
        rule(row.judged)


def advantage_size(log: Log) -> tuple[float, str] | None:
    """The scale of the advantages and its description, or None if the log does not show it."""
    largest, spread = log.get("advantage/max"), log.get("reward/within_group_std") or log.get("reward/std")
    if largest is not None:
        return median(largest), "the largest advantage of a batch is"
    if spread is not None and not divides_by_std(log):
        return median(spread), "advantages are not divided by their deviation, and that of the rewards is"
    return None
