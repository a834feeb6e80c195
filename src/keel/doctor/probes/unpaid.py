"""Right answers in another form than the data's: completions that say what their gold answer says, and earn nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from keel.base.errors import KeelError
from keel.base.types import Group
from keel.doctor.evidence import level, more_groups
from keel.doctor.findings import Finding, finding
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.judged_golds import JudgedGold
from keel.doctor.thresholds import Thresholds
from keel.envs.answers import last_tag, plain_number
from keel.eval.statistics import estimate

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
class _Count:
    """Completions with the value of their own gold answer: all, and those that are not paid, beside its text."""

    right: int
    written: int
    unpaid: Sequence[tuple[str, str]]
    by_chance: float  # with the value of another problem's
    chance: float  # that so many more have their own's


def unpaid_findings(setup: KeelSubject, judged: Sequence[JudgedGold], thresholds: Thresholds) -> Iterator[Finding]:
    """Completions with the value of their own gold answer, far more than have another problem's, that are not paid."""
    if setup.run.task.multi_turn or not judged or setup.config.reward.aggregate != "sum":
        return
    half = fmean((row.gold + row.bottom) / 2 for row in judged)
    if half <= fmean(row.bottom for row in judged):
        return

    def undecided(groups: Sequence[Group]) -> bool:
        if len(groups) < FEWEST_PROBLEMS:
            return any(total < half for _, _, total in _right(_parsed(setup, groups)))
        count = _count(setup, groups, half, thresholds)
        return count is not None and level(thresholds) < count.chance < _DOUBT

    count = _count(setup, more_groups(setup, "reward/gold", undecided), half, thresholds)
    if count is None or count.chance > level(thresholds):
        return
    gold, text = count.unpaid[0]
    yield finding(
        "reward/gold",
        f"{count.right} of {count.written} completions have the value of their gold answer (of another's "
        f"{100 * count.by_chance:.0f} %; chance {count.chance:.1g}), and {len(count.unpaid)} of them are not paid: "
        f"{text.strip()[-40:]!r} beside {gold.strip()[-40:]!r}",
        "the reward compares texts, and the data's answers have a form that completions do not have",
        "write the answers of the data as completions write them, compare values (task.answer, or a reward of your "
        "own), or ask for that form in the prompt (data.system_prompt)",
    )


def _count(setup: KeelSubject, groups: Sequence[Group], half: float, thresholds: Thresholds) -> _Count | None:
    """What the groups show; None where few right answers lack their pay, or most are paid."""
    values = [value(gold) for gold in _golds(setup, groups)]
    rows = _parsed(setup, groups)
    right = _right(rows)
    unpaid = [(gold, text) for gold, text, total in right if total < half]
    few = len(unpaid) < max(FEWEST, thresholds["unpaid_right"] * len(right))
    if few or len(set(values)) < 2 or len(groups) < FEWEST_PROBLEMS:
        return None
    own, others = zip(*(_shares(group, v, values) for group, v in zip(groups, values, strict=True)), strict=True)
    more = estimate([a - b for a, b in zip(own, others, strict=True)])  # problems are what is independent
    chance = 0.0 if more is None or more.p is None else more.p / 2
    return _Count(len(right), len(rows), unpaid, fmean(others), chance if fmean(own) > fmean(others) else 1.0)


def _golds(setup: KeelSubject, groups: Sequence[Group]) -> list[str]:
    try:
        return [setup.run.task.gold_turns(group.problem)[-1] for group in groups]
    except (KeelError, NotImplementedError):
        return []


def _parsed(setup: KeelSubject, groups: Sequence[Group]) -> list[tuple[str, str, float]]:
    """Gold answer, text and reward of every completion that could be parsed."""
    return [
        (gold, completion.text, reward.total)
        for group, gold in zip(groups, _golds(setup, groups), strict=False)  # none where the task has no gold answers
        for completion, reward in zip(group.completions, group.rewards, strict=True)
        if reward.parsed
    ]


def _right(rows: Sequence[tuple[str, str, float]]) -> list[tuple[str, str, float]]:
    return [row for row in rows if value(row[1]) == value(row[0]) != ""]


def _shares(group: Group, gold: str, values: Sequence[str]) -> tuple[float, float]:
    """Of a group's completions, those with the value of its gold answer, and on average with another problem's."""
    written = [value(completion.text) for completion in group.completions]
    others = [other for other in values if other != gold]
    return (
        fmean(text == gold for text in written),
        fmean(text == other for text in written for other in others) if others else 1.0,
    )
