"""Decide a measure: exactly, by errors above rounding, or statistically, by differences beyond chance.

*Exact*: the cause of an error is the hypothesis that closes the gap. There is no p-value and no data split.
*Statistical*: some problems select a hypothesis, others test it, and the rewards of its completions confirm it. More
completions are sampled while that is undecided. Problems are the units. All tests share one significance level
(`evidence.TESTS`).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from difflib import SequenceMatcher
from statistics import fmean, stdev
from typing import Any, Literal

import torch
from torch import Tensor

from keel.base.types import Group, Problem
from keel.doctor.evidence import by_signs, level, more_groups
from keel.doctor.findings import Advice, Severity, finding
from keel.doctor.gap import average, largest
from keel.doctor.measure import Verdict
from keel.doctor.subject import Subject, row_logits


@dataclass(frozen=True)
class Hypothesis:
    """One possible explanation of a measurement, tested as an experiment.

    `name` completes a sentence such as "the gap closes at NAME" or "answers are likelier NAME". `apply` yields the
    subject with one part replaced by a trusted one or with one input edited, and restores it afterwards.
    """

    name: str
    code: str
    cause: str
    advice: Advice | str
    apply: Callable[[Subject], AbstractContextManager[Subject]]
    severity: Severity | None = None


def swap(**parts: Any) -> Callable[[Subject], AbstractContextManager[Subject]]:
    """An experiment that replaces methods of the subject."""
    return lambda subject: nullcontext(subject.swapped(**parts))


def within(context: Callable[[Subject], AbstractContextManager[Any]]) -> Callable[[Subject], Any]:
    """An experiment inside a context that changes the subject's own model."""

    @contextmanager
    def applied(subject: Subject) -> Iterator[Subject]:
        with context(subject):
            yield subject.swapped()

    return applied


# ------------------------------------------------------------------------ exact


@dataclass(frozen=True)
class Gap:
    """Functions of a subject: errors `[N]` in nats, whether they are rounding, and how many nats a fix may leave."""

    errors: Callable[[Any], Tensor]
    is_rounding: Callable[[Any, Tensor], bool]
    closed: Callable[[Any, float], float]


@dataclass(frozen=True)
class OpenGap:
    """A gap above rounding: its largest and mean error, and the hypothesis that closes it, if any."""

    largest: float
    mean: float
    by: Hypothesis | None = None
    left: float = math.inf


def open_gap(gap: Gap, subject: Any, hypotheses: Iterable[Hypothesis]) -> OpenGap | None:
    """None if the errors are rounding; otherwise the gap, with the first hypothesis that closes it."""
    errors = gap.errors(subject)
    if gap.is_rounding(subject, errors):
        return None
    found = OpenGap(largest(errors), average(errors))
    for hypothesis in hypotheses:
        with hypothesis.apply(subject) as changed:
            left = average(gap.errors(changed))
        if left <= gap.closed(subject, found.mean):
            return OpenGap(found.largest, found.mean, hypothesis, left)
    return found


# ------------------------------------------------------------------------ statistical

CHOOSING, TESTING = 8, 128  # number of problems that select a hypothesis, and that test it
TIE = 0.05  # nats per token; hypotheses closer than this are tied at selection
FOLD = 1.0  # nats of gain per answer, a factor of e in likelihood
SIMPLER = 0.7  # share of a gain that a simpler hypothesis must reach to be preferred
SECONDS = 20.0  # seconds after which no further hypothesis is tried
LIKELY = 0.05  # p-value of the rewards above which they are no evidence


@dataclass(frozen=True)
class Table:
    """Hypotheses of one kind, and the evidence that is required to report one.

    `problems`: which sampled problems are used. `foreign`: the removed tokens must have a high NLL under the model,
    which tokens of the training format do not have. `knows`: the model must beat the marginal frequency of each answer.
    `least`: the share of the NLL that must disappear. `share`: the share that is sufficient evidence. `earns`: the
    required gain in reward if `share` is not reached.
    """

    rows: Callable[[Any], Iterable[Hypothesis]]
    problems: Callable[[Any, Problem], bool] = lambda subject, problem: True
    foreign: bool = False
    knows: bool = False
    least: float = 0.0
    share: float = math.inf
    earns: Literal["", "not less", "more", "surely more"] = ""


@dataclass(frozen=True)
class Likelier:
    """A hypothesis on its test problems: log-probabilities of the answers before and after, in nats per token."""

    by: Hypothesis
    problems: Sequence[Problem]
    before: Sequence[float]
    after: Sequence[float]

    @property
    def gain(self) -> float:
        return fmean(self.after) - fmean(self.before)

    @property
    def chance(self) -> float:
        return of_gains([after - before for before, after in zip(self.before, self.after, strict=True)])


def decide(
    table: Table, subject: Any, *, alpha: float, simpler: Sequence[Hypothesis] = ()
) -> tuple[Verdict, Hypothesis | None]:
    """The verdict, and the selected hypothesis if any. It is not reported if one of `simpler` has most of its gain."""
    asked = [p for p in subject.problems(TESTING) if subject.answer(p) and table.problems(subject, p)]
    asked = [*{(subject.prompt(p), subject.answer(p)): p for p in asked if _has_room(subject, p)}.values()]
    first, rest = asked[:CHOOSING], asked[CHOOSING:]
    if len(rest) < CHOOSING or len({subject.answer(p) for p in asked}) < 2:
        return Verdict.sound("too few problems with different single-turn gold answers"), None
    own = _rates(subject, subject, first)
    if not matters(subject, first, own, [0.0] * len(own)):
        return Verdict.sound("gold answers are so likely that nothing is left to explain"), None
    best = _chosen(subject, first, table.rows(subject))
    if best is None:
        return Verdict.sound("no alternative makes gold answers more likely"), None
    before = _rates(subject, subject, rest)
    with best.apply(subject) as changed:  # may change the subject's own model, so `before` comes first
        if not matters(subject, first, own, _rates(subject, changed, first)):
            return Verdict.sound("no alternative makes gold answers sufficiently more likely"), best
        tested = Likelier(best, rest, before, _rates(subject, changed, rest))
    blind, enough = subject.blind, matters(subject, rest, tested.before, tested.after)
    if -fmean(tested.after) >= blind or tested.chance > alpha or not enough:
        return Verdict.sound("the gain on the first problems is not confirmed on further ones"), best
    if tested.gain <= table.least * -fmean(tested.before) or (table.knows and not _tells_apart(subject, tested)):
        return Verdict.sound("most of the NLL remains"), best
    for other in simpler:
        with other.apply(subject) as changed:
            if fmean(_rates(subject, changed, rest)) - fmean(tested.before) > SIMPLER * tested.gain:
                return Verdict.sound(f"a simpler change explains the gain: {other.name}"), best
    return _confirmed(table, subject, tested, blind), best


def _confirmed(table: Table, subject: Any, tested: Likelier, blind: float) -> Verdict:
    """The finding. Its severity depends on the NLL of the removed tokens, the NLL reduction and the rewards."""
    guessed, by = -fmean(tested.before) >= blind, tested.by
    evidence = (
        f"gold answers are {tested.gain:.2g} nats per token more likely {by.name} ({len(tested.before)} problems, "
    )
    evidence += f"p-value {tested.chance:.1g})"
    if table.foreign:
        nll = _nll_of_left_out(subject, tested)
        if nll <= blind:
            return Verdict.sound(f"{by.name}: the removed text has a low NLL")
        evidence += f", and the removed text has an NLL of {nll:.2g} nats per token"
    proven = tested.gain >= table.share * -fmean(tested.before)
    if table.earns and not proven:
        earned = earned_under(by, subject)
        sure, less = (False, False) if earned is None else (earned.sure, earned.other < earned.own)
        seems = earned is not None and not less and earned.other > earned.own and earned.chance <= LIKELY
        enough = {"not less": not less, "more": sure or (guessed and seems), "surely more": sure}[table.earns]
        if not enough:
            return Verdict.sound(f"{by.name}: completions earn no higher rewards")
        proven = sure and (guessed or table.foreign or table.knows)
        evidence += f"; completions earn {earned}" if earned is not None else ""
    severity = by.severity or (None if proven or not table.earns else "warning")
    return Verdict.found(finding(by.code, evidence, by.cause, by.advice, severity))


def _has_room(subject: Any, problem: Problem) -> bool:
    room = subject.policy.context_length or 1 << 30
    return 2 * len(subject.prompt(problem)) + len(subject.answer(problem)) < room


def _rates(subject: Any, changed: Any, problems: Sequence[Problem]) -> list[float]:
    """Log-probability of each gold answer, divided by its number of tokens in `subject`."""
    sums = [float(logp.sum()) for logp in changed.answer_logp(problems)]
    return [total / len(subject.answer(problem)) for total, problem in zip(sums, problems, strict=True)]


def matters(subject: Any, problems: Sequence[Problem], before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether the answers improve enough per token, or lose half of their NLL and become e times as likely.

    Most tokens of a long answer are formatting, which is certain under any prompt. A mean over all tokens would hide
    the gain of the others.
    """
    gain, nll = fmean(after) - fmean(before), -fmean(before)
    whole = fmean(len(subject.answer(problem)) * (b - a) for problem, a, b in zip(problems, before, after, strict=True))
    return gain > subject.thresholds["template_gain"] or (gain > nll / 2 and whole > FOLD)


def _chosen(subject: Any, problems: Sequence[Problem], hypotheses: Iterable[Hypothesis]) -> Hypothesis | None:
    """The hypothesis with the highest answer log-probability. Among ties: the one that changes the prompts least."""
    began, tried = time.monotonic(), list[tuple[float, float, Hypothesis]]()
    for hypothesis in hypotheses:
        if time.monotonic() - began > SECONDS:
            break
        try:
            with hypothesis.apply(subject) as changed:
                kept = fmean(_likeness(subject.prompt(p), changed.prompt(p)) for p in problems)
                tried.append((fmean(_rates(subject, changed, problems)), kept, hypothesis))
        except (RuntimeError, TypeError, ValueError):  # some model families do not support a change
            continue
    top = max((score for score, _, _ in tried), default=0.0)
    near = [row for row in tried if row[0] >= top - TIE]
    return max(near, key=lambda row: row[1])[2] if near else None


def _likeness(own: Sequence[int], other: Sequence[int]) -> float:
    return SequenceMatcher(None, own, other, autojunk=False).quick_ratio()


def _tells_apart(subject: Any, tested: Likelier) -> bool:
    """Whether answers beat their marginal frequency; otherwise the model does not answer the question."""
    answers = [subject.answer(problem) for problem in tested.problems]
    counts, count = Counter(answers), len(answers)
    often = fmean(math.log(counts[answer] / count) for answer in answers)
    likely = fmean(len(answer) * rate for answer, rate in zip(answers, tested.after, strict=True))
    return len(counts) > count / 2 or likely > often


def _nll_of_left_out(subject: Any, tested: Likelier) -> float:
    """The mean NLL of the tokens that an edit removes, in their context. The first token of a prompt has none."""
    problems, values = tested.problems[: 4 * CHOOSING], list[float]()
    rows = [subject.prompt(problem) for problem in problems]
    with tested.by.apply(subject) as changed:
        edited = [changed.prompt(problem) for problem in problems]
    for own, other, logits in zip(rows, edited, row_logits(subject.policy, rows), strict=True):
        matcher = SequenceMatcher(None, own, other, autojunk=False)
        for _, start, end in [(tag, max(i, 1), j) for tag, i, j, _, _ in matcher.get_opcodes() if tag != "equal"]:
            tokens = torch.tensor(own[start:end], dtype=torch.long, device=logits.device)[:, None]
            values += (-logits[start - 1 : end - 1].log_softmax(-1).gather(-1, tokens)).flatten().tolist()
    return fmean(values) if values else 0.0


def of_gains(gains: Sequence[float]) -> float:
    """The p-value of the gains under no effect: the smallest of a mean test and two sign tests, Bonferroni-corrected.

    The mean test alone is weak if a few answers make the whole gain, even if none gets worse.
    """
    return min(1.0, 3 * min(by_mean(gains), by_signs(gains), by_signs(gains, FOLD)))


def by_mean(gains: Sequence[float]) -> float:
    """The p-value of the mean gain under a true mean of 0 (Student's t); 1 if a gain is not finite."""
    from scipy.special import stdtr  # the cdf of scipy.stats.t, which takes five times as long to import

    if not all(map(math.isfinite, gains)):
        return 1.0
    error = stdev(gains) / len(gains) ** 0.5
    return float(stdtr(len(gains) - 1, -fmean(gains) / max(error, 1e-12)))


# ------------------------------------------------------------------------ rewards


@dataclass(frozen=True)
class Earned:
    """Mean rewards without and with the hypothesis, and the p-value of a sign test over problems."""

    own: float
    other: float
    problems: int
    chance: float
    sure: bool  # whether the hypothesis earns significantly more

    def __str__(self) -> str:
        return f"{self.other:.3g} instead of {self.own:.3g} ({self.problems} problems, p-value {self.chance:.1g})"


def earned_under(hypothesis: Hypothesis, subject: Any) -> Earned | None:
    """Rewards of the same problems with and without a hypothesis; None if the subject has no rewards.

    More problems are sampled while rewards are higher with it, but not significantly.
    """
    if subject.lacks("rewards"):
        return None
    others: list[Group] = []

    def compared(groups: Sequence[Group]) -> Earned:
        with subject.budget.spending(), hypothesis.apply(subject) as changed:
            for rows in list(batches(groups[len(others) :])):
                asked, size = [group.problem for group in rows], len(rows[0].completions)
                others.extend(changed.judged(asked, generations=size, step=len(others)))
                if subject.budget.is_spent:
                    break
        both = min(len(groups), len(others))
        before, after = ([fmean(r.total for r in g.rewards) for g in side[:both]] for side in (groups, others))
        chance = by_signs([b - a for a, b in zip(before, after, strict=True)])
        own, other = fmean(before), fmean(after)
        return Earned(own, other, both, chance, other > own and chance <= level(subject.thresholds))

    def undecided(groups: Sequence[Group]) -> bool:
        found = compared(groups)
        return found.other > found.own and not found.sure

    return compared(more_groups(subject, hypothesis.code, undecided))


def batches(groups: Sequence[Group]) -> Iterator[list[Group]]:
    """Split groups into batches of one group size without duplicate problems: equal keys would get the same noise."""
    batch: list[Group] = []
    for group in groups:
        sizes = {len(other.completions) for other in batch} - {len(group.completions)}
        if sizes or group.problem.key in {other.problem.key for other in batch}:
            yield batch
            batch = []
        batch.append(group)
    if batch:
        yield batch


__all__ = ["Earned", "Gap", "Likelier", "OpenGap", "Table", "decide", "earned_under", "matters", "of_gains", "open_gap"]
