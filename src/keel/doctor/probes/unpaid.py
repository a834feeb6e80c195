"""Right answers in another form than the data's: completions that say what their gold answer says, and earn nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from keel.base.types import Group
from keel.doctor.decide import by_mean
from keel.doctor.evidence import level, more_groups
from keel.doctor.findings import Finding, finding
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.gold_likelihood import gold_or_none
from keel.doctor.probes.judged_golds import JudgedGold
from keel.doctor.thresholds import Thresholds
from keel.envs.answers import last_tag, plain_number

FEWEST, FEWEST_PROBLEMS = 8, 16  # right answers that are not paid; problems
_DOUBT = 0.05  # chance below which more is sampled
_BOX = re.compile(r"\\boxed\{([^{}]*)\}")
_NUMBER = re.compile(r"[^\w\\]*?([-+−]?\d[\d,]*(?:\.\d+)?)(?:\s*%|\s+[A-Za-z]+)?[^\w\\]*")  # one, with its unit
_IN_WORDS = re.compile(
    r"(?:[a-z]{2,}[ :,]+){0,5}([-+−]?\d[\d,]*(?:\.\d+)?)(?:[ ,.]+[a-z]{2,}){0,5}"
)  # a number, and words
_OTHERWISE = re.compile(  # words that make another number of it
    r"\b(?:minus|negative|not|no|than|least|most|half|double|twice|dozens?|hundreds?|thousands?|[mb]illions?)\b"
)
_SPELLED = "zero one two three four five six seven eight nine ten eleven twelve".split()  # noqa: SIM905
_MARK = re.compile(r"####|answer(?: is|:)", re.IGNORECASE)


def value(text: str) -> str:
    """What a text comes down to: what is boxed or tagged, or follows a mark, as a number where it is one."""
    boxed = _BOX.findall(text)
    core = (boxed[-1] if boxed else last_tag(text) or _MARK.split(text)[-1]).strip(" .\n*`$\"'").casefold()
    core = str(_SPELLED.index(core)) if core in _SPELLED else core
    number = None if _OTHERWISE.search(core) else _NUMBER.fullmatch(core) or _IN_WORDS.fullmatch(core)
    return (number and plain_number(number.group(1))) or core


@dataclass(frozen=True)
class Right:
    """Completions with the value of their gold answer: (gold, text, reward), and the chance of so many."""

    rows: Sequence[tuple[str, str, float]]
    written: int
    chance: float

    def unpaid(self, half: float) -> list[tuple[str, str, float]]:
        return [row for row in self.rows if row[2] < half]


def unpaid_findings(setup: KeelSubject, judged: Sequence[JudgedGold], thresholds: Thresholds) -> Iterator[Finding]:
    """Completions with the value of their own gold answer, far more than have another problem's, that are not paid."""
    if setup.run.task.multi_turn or not judged or setup.config.reward.aggregate != "sum":
        return
    half = fmean((row.gold + row.bottom) / 2 for row in judged)
    if half <= fmean(row.bottom for row in judged):
        return

    def few(right: Right) -> bool:
        return len(right.unpaid(half)) < max(FEWEST, thresholds["unpaid_right"] * len(right.rows))

    def undecided(groups: Sequence[Group]) -> bool:
        right = _right(setup, groups)
        if len(groups) < FEWEST_PROBLEMS:
            return bool(right.unpaid(half))
        return not few(right) and level(thresholds) < right.chance < _DOUBT

    groups = more_groups(setup, "reward/gold", undecided)
    right = _right(setup, groups)
    if len(groups) < FEWEST_PROBLEMS or few(right) or right.chance > level(thresholds):
        return
    unpaid = right.unpaid(half)
    gold, text, _ = unpaid[0]
    yield finding(
        "reward/gold",
        f"{len(right.rows)} of {right.written} completions have the value of their gold answer, far more than have "
        f"another's (chance {right.chance:.1g}), and {len(unpaid)} of them are not paid: {text.strip()[-40:]!r} beside "
        f"{gold.strip()[-40:]!r}",
        "the reward compares texts, and the data's answers have a form that completions do not have",
        "write the answers of the data as completions write them, compare values (task.answer, or a reward of your "
        "own), or ask for that form in the prompt (data.system_prompt)",
    )


def _right(setup: KeelSubject, groups: Sequence[Group]) -> Right:
    """Problems are what is independent: of each, how much oftener its own value is written than those of others."""
    asked = [(group, turns[-1]) for group in groups if (turns := gold_or_none(setup.run.task, group.problem))]
    values = [value(gold) for _, gold in asked]
    rows, gains, written = list[tuple[str, str, float]](), list[float](), 0
    for (group, gold), own in zip(asked, values, strict=True):
        said = [value(completion.text) for completion in group.completions]
        others = [other for other in values if other != own]
        if others:
            gains.append(fmean(text == own for text in said) - fmean(t == o for t in said for o in others))
        judged = zip(group.completions, said, group.rewards, strict=True)
        parsed = [(c.text, text, reward.total) for c, text, reward in judged if reward.parsed]
        rows += [(gold, text, total) for text, plain, total in parsed if plain == own != ""]
        written += len(parsed)
    return Right(rows, written, by_mean(gains) if len(gains) > 1 else 1.0)
