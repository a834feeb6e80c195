"""Right answers in another form than the data's: completions that say what their gold answer says, and earn nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from statistics import fmean

from keel.base.thresholds import Thresholds
from keel.base.types import Group
from keel.envs.answers import last_number, last_tag
from keel.lab.doctor.findings import Finding, finding
from keel.lab.doctor.probes.evidence import level
from keel.lab.doctor.probes.gold_rewards import JudgedGold
from keel.lab.doctor.setup import ProbeSetup

FEWEST = 8  # right answers that are not paid
_BOX = re.compile(r"\\boxed\{([^{}]*)\}")
_MARK = re.compile(r"####|answer(?: is|:)", re.IGNORECASE)


def value(text: str) -> str:
    """What a text comes down to: what is boxed or tagged, or follows a mark, as a number where it holds one."""
    boxed = _BOX.findall(text)
    core = boxed[-1] if boxed else last_tag(text) or _MARK.split(text)[-1]
    return last_number(core) or core.strip(" .\n*`$\"'").casefold()


def unpaid_findings(setup: ProbeSetup, judged: Sequence[JudgedGold], thresholds: Thresholds) -> Iterator[Finding]:
    """Completions with the value of their own gold answer, far more than have another problem's, that are not paid."""
    task = setup.run.task
    golds = {row.problem.key: row for row in judged if row.gold > row.bottom and value(row.turns[-1])}
    if task.several_turns or len({value(row.turns[-1]) for row in golds.values()}) < 2:
        return
    groups: list[Group] = [*setup.groups, *setup.shared.get("further groups", [])]
    if len(golds) == len(judged):  # all of them earn, and so will those that were not judged
        least, most = min(row.gold for row in judged), max(row.bottom for row in judged)
        for problem in (group.problem for group in groups if group.problem.key not in golds):
            golds[problem.key] = JudgedGold(problem, tuple(task.gold_turns(problem)), least, most, ())
    rows = [
        (golds[group.problem.key], completion.text, reward.total)
        for group in groups
        if group.problem.key in golds
        for completion, reward in zip(group.completions, group.rewards, strict=True)
        if reward.parsed
    ]
    right = [(row, text, total) for row, text, total in rows if value(text) == value(row.turns[-1])]
    unpaid = [(row, text) for row, text, total in right if total < (row.gold + row.bottom) / 2]
    if len(unpaid) < FEWEST or len(unpaid) < thresholds["unpaid_right"] * len(right):
        return
    values = [value(row.turns[-1]) for row in golds.values()]
    by_chance = fmean(
        sum(value(text) == other for other in values if other != value(row.turns[-1])) / max(1, len(values) - 1)
        for row, text, _ in rows
    )
    chance = _at_least(len(right), len(rows), min(1.0, by_chance + 1 / len(rows)))
    if chance > level(thresholds):
        return
    row, text = unpaid[0]
    yield finding(
        "reward/gold",
        f"{len(right)} of {len(rows)} completions have the value of their gold answer (of another's "
        f"{100 * by_chance:.0f} %; chance {chance:.1g}), and {len(unpaid)} of them are not paid: "
        f"{text.strip()[-40:]!r} beside {row.turns[-1].strip()[-40:]!r}",
        "the reward compares texts, and the data's answers have a form that completions do not have",
        "write the answers of the data as completions write them, compare values (task.answer, or a reward of your "
        "own), or ask for that form in the prompt (data.system_prompt)",
    )


def _at_least(count: int, total: int, rate: float) -> float:
    """The chance of `count` or more of `total` at this rate."""
    from scipy.stats import binom

    return float(binom.sf(count - 1, total, rate))
