"""How a measure is decided: by an error that is more than rounding, or by what chance does not explain.

*Exact*: the cause of an error is the hypothesis that closes the gap; no p-value, no halves. *Statistical*: some
problems choose a hypothesis, others test it, and what completions earn confirms it; more are drawn while that is
undecided. Problems are the units, and all tests share one level (`evidence.TESTS`).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from statistics import fmean, stdev
from typing import Any, Literal

import torch
from torch import Tensor

from keel.base.types import Group, Problem
from keel.doctor.evidence import by_signs, level, more_groups
from keel.doctor.findings import finding
from keel.doctor.gap import average, largest
from keel.doctor.hypothesis import Hypothesis
from keel.doctor.verdict import Verdict
from keel.doctor.weights import row_logits

# ------------------------------------------------------------------------ exact


@dataclass(frozen=True)
class Gap:
    """Errors `[N]` in nats, which of them are rounding, and what may be left where the cause is taken away."""

    errors: Callable[[Any], Tensor]
    is_rounding: Callable[[Any, Tensor], bool]
    closed: Callable[[Any, float], float]


@dataclass(frozen=True)
class OpenGap:
    """A gap that rounding does not explain: its largest and mean error, and the hypothesis that closes it, if any."""

    largest: float
    mean: float
    by: Hypothesis | None = None
    left: float = math.inf


def open_gap(gap: Gap, subject: Any, hypotheses: Iterable[Hypothesis]) -> OpenGap | None:
    """None where the errors are rounding; else the first hypothesis under which no more is left than counts."""
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

CHOOSING, TESTING = 8, 128  # problems that choose a hypothesis, and those that are drawn to test it
TIE = 0.05  # nats a token within which the problems that choose take hypotheses for equally good
FOLD = 1.0  # nats: e times as likely
SIMPLER = 0.7  # of a gain that a simpler explanation has to make to be the likelier one
SECONDS = 20.0  # after which no further hypothesis is tried
LIKELY = 0.05  # the chance of what completions earn over which it says nothing


@dataclass(frozen=True)
class Table:
    """Hypotheses of one kind, and what it takes to name one under which gold answers are likelier.

    `problems`: which of those drawn are asked. `foreign`: what it leaves out surprises the model itself, as nothing
    does that it was taught behind. `knows`: answers are likelier than by how often each is right. `least`: of their
    surprise that has to be gone; `share`: that is proof enough. `earns`: what completions have to do without that.
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
    """A hypothesis on the problems that test it: log-probabilities of their answers before and after, nats a token."""

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
    """The verdict, and the hypothesis that was chosen, whatever became of it; `simpler` ones must explain less."""
    asked = [p for p in subject.problems(TESTING) if subject.answer(p) and table.problems(subject, p)]
    asked = [*{(subject.prompt(p), subject.answer(p)): p for p in asked if _has_room(subject, p)}.values()]
    first, rest = asked[:CHOOSING], asked[CHOOSING:]
    if len(rest) < CHOOSING or len({subject.answer(p) for p in asked}) < 2:
        return Verdict.sound("too few problems with different gold answers of one turn"), None
    own = _rates(subject, subject, first)
    if not matters(subject, first, own, [0.0] * len(own)):
        return Verdict.sound("gold answers are so likely that nothing is left to explain"), None
    best = _chosen(subject, first, table.rows(subject))
    if best is None:
        return Verdict.sound("nothing makes gold answers likelier"), None
    before = _rates(subject, subject, rest)
    with best.apply(subject) as changed:  # which may be the subject's own model for a while
        if not matters(subject, first, own, _rates(subject, changed, first)):
            return Verdict.sound("nothing makes gold answers likelier by enough"), best
        tested = Likelier(best, rest, before, _rates(subject, changed, rest))
    blind, enough = subject.blind, matters(subject, rest, tested.before, tested.after)
    if -fmean(tested.after) >= blind or tested.chance > alpha or not enough:
        return Verdict.sound("what is likelier on some problems is not on others"), best
    if tested.gain <= table.least * -fmean(tested.before) or (table.knows and not _tells_apart(subject, tested)):
        return Verdict.sound("most of the surprise stays"), best
    for other in simpler:
        with other.apply(subject) as changed:
            if fmean(_rates(subject, changed, rest)) - fmean(tested.before) > SIMPLER * tested.gain:
                return Verdict.sound(f"{other.name} explains as much"), best
    return _confirmed(table, subject, tested, blind), best


def _confirmed(table: Table, subject: Any, tested: Likelier, blind: float) -> Verdict:
    """The finding, as severe as its proof: surprise at what was left out, most of the answers' surprise, rewards."""
    guessed, by = -fmean(tested.before) >= blind, tested.by
    evidence = f"gold answers are {tested.gain:.2g} nats a token likelier {by.name} ({len(tested.before)} problems, "
    evidence += f"chance {tested.chance:.1g})"
    if table.foreign:
        surprise = _surprise_of_left_out(subject, tested)
        if surprise <= blind:
            return Verdict.sound(f"{by.name}: what is left out is no surprise to the model")
        evidence += f", and what is left out has a surprise of {surprise:.2g} nats a token"
    proven = tested.gain >= table.share * -fmean(tested.before)
    if table.earns and not proven:
        earned = earned_under(by, subject)
        sure, less = (False, False) if earned is None else (earned.sure, earned.other < earned.own)
        seems = earned is not None and not less and earned.other > earned.own and earned.chance <= LIKELY
        enough = {"not less": not less, "more": sure or (guessed and seems), "surely more": sure}[table.earns]
        if not enough:
            return Verdict.sound(f"{by.name}: completions earn no more")
        proven = sure and (guessed or table.foreign or table.knows)
        evidence += f"; completions earn {earned}" if earned is not None else ""
    severity = by.severity or (None if proven or not table.earns else "warning")
    return Verdict.found(finding(by.code, evidence, by.cause, by.advice, severity))


def _has_room(subject: Any, problem: Problem) -> bool:
    room = subject.policy.context_length or 1 << 30
    return 2 * len(subject.prompt(problem)) + len(subject.answer(problem)) < room


def _rates(subject: Any, changed: Any, problems: Sequence[Problem]) -> list[float]:
    """Log-probability of each gold answer over the tokens that it has in `subject`."""
    sums = [float(logp.sum()) for logp in changed.answer_logp(problems)]
    return [total / len(subject.answer(problem)) for total, problem in zip(sums, problems, strict=True)]


def matters(subject: Any, problems: Sequence[Problem], before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether answers gain enough a token, or over half of their surprise and e times their likelihood.

    Most tokens of a long answer are its form, which is sure under any prompt: a mean over all of them dilutes the rest.
    """
    gain, surprise = fmean(after) - fmean(before), -fmean(before)
    whole = fmean(len(subject.answer(problem)) * (b - a) for problem, a, b in zip(problems, before, after, strict=True))
    return gain > subject.thresholds["template_gain"] or (gain > surprise / 2 and whole > FOLD)


def _chosen(subject: Any, problems: Sequence[Problem], hypotheses: Iterable[Hypothesis]) -> Hypothesis | None:
    """The hypothesis under which answers are likeliest; of those that tie, the one that changes prompts least."""
    began, tried = time.monotonic(), list[tuple[float, float, Hypothesis]]()
    for hypothesis in hypotheses:
        if time.monotonic() - began > SECONDS:
            break
        try:
            with hypothesis.apply(subject) as changed:
                kept = fmean(_likeness(subject.prompt(p), changed.prompt(p)) for p in problems)
                tried.append((fmean(_rates(subject, changed, problems)), kept, hypothesis))
        except (RuntimeError, TypeError, ValueError):  # a family of models may not take a change
            continue
    top = max((score for score, _, _ in tried), default=0.0)
    near = [row for row in tried if row[0] >= top - TIE]
    return max(near, key=lambda row: row[1])[2] if near else None


def _likeness(own: Sequence[int], other: Sequence[int]) -> float:
    return SequenceMatcher(None, own, other, autojunk=False).quick_ratio()


def _tells_apart(subject: Any, tested: Likelier) -> bool:
    """Whether answers are likelier than by how often each is right: else it is no question that is answered."""
    answers = [subject.answer(problem) for problem in tested.problems]
    counts, count = Counter(answers), len(answers)
    often = fmean(math.log(counts[answer] / count) for answer in answers)
    likely = fmean(len(answer) * rate for answer, rate in zip(answers, tested.after, strict=True))
    return len(counts) > count / 2 or likely > often


def _surprise_of_left_out(subject: Any, tested: Likelier) -> float:
    """The mean −log p of the tokens that an edit leaves out, where they stand; of a prompt's first nothing is known."""
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
    """The chance of such gains where nothing is gained: the clearest of three tests, of their mean and of their signs.

    A few answers that gain all of it spread a mean, however sure it is that none to which it matters loses by it.
    """
    return min(1.0, 3 * min(by_mean(gains), by_signs(gains), by_signs(gains, FOLD)))


def by_mean(gains: Sequence[float]) -> float:
    """The chance of so high a mean where the true one is 0 (Student's t); 1 where a gain is no number."""
    from scipy.special import stdtr  # the cdf of scipy.stats.t, at a fifth of the import

    if not all(map(math.isfinite, gains)):
        return 1.0
    error = stdev(gains) / len(gains) ** 0.5
    return float(stdtr(len(gains) - 1, -fmean(gains) / max(error, 1e-12)))


# ------------------------------------------------------------------------ what completions earn


@dataclass(frozen=True)
class Earned:
    """Mean rewards as the run is and as it might be, and the chance of so many problems that earn more (sign test)."""

    own: float
    other: float
    problems: int
    chance: float
    sure: bool  # that the other way earns more

    def __str__(self) -> str:
        return f"{self.other:.3g} instead of {self.own:.3g} ({self.problems} problems, chance {self.chance:.1g})"


def earned_under(hypothesis: Hypothesis, subject: Any) -> Earned | None:
    """The same problems under a hypothesis; more of them while it seems to earn more. None without rewards to ask."""
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
    """Runs of groups of one size in which no problem stands twice: the same key would be given the same noise."""
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
