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
    if task.several_turns or not judged:
        return
    half = fmean((row.gold + row.bottom) / 2 for row in judged)
    if half <= fmean(row.bottom for row in judged):
        return
    groups: list[Group] = [*setup.groups, *setup.shared.get("further groups", [])]
    golds = {group.problem.key: task.gold_turns(group.problem)[-1] for group in groups}
    if len({value(gold) for gold in golds.values()} - {""}) < 2:
        return
    rows = [
        (golds[group.problem.key], completion.text, reward.total)
        for group in groups
        if value(golds[group.problem.key])
        for completion, reward in zip(group.completions, group.rewards, strict=True)
        if reward.parsed
    ]
    right = [(gold, text, total) for gold, text, total in rows if value(text) == value(gold)]
    unpaid = [(gold, text) for gold, text, total in right if total < half]
    if len(unpaid) < FEWEST or len(unpaid) < thresholds["unpaid_right"] * len(right):
        return
    values = [value(gold) for gold in golds.values()]
    by_chance = fmean(
        sum(value(text) == other for other in values if other != value(gold)) / max(1, len(values) - 1)
        for gold, text, _ in rows
    )
    chance = _at_least(len(right), len(rows), min(1.0, by_chance + 1 / len(rows)))
    if chance > level(thresholds):
        return
    gold, text = unpaid[0]
    yield finding(
        "reward/gold",
        f"{len(right)} of {len(rows)} completions have the value of their gold answer (of another's "
        f"{100 * by_chance:.0f} %; chance {chance:.1g}), and {len(unpaid)} of them are not paid: "
        f"{text.strip()[-40:]!r} beside {gold.strip()[-40:]!r}",
        "the reward compares texts, and the data's answers have a form that completions do not have",
        "write the answers of the data as completions write them, compare values (task.answer, or a reward of your "
        "own), or ask for that form in the prompt (data.system_prompt)",
    )


def _at_least(count: int, total: int, rate: float) -> float:
    """The chance of `count` or more of `total` at this rate."""
    from scipy.stats import binom

    return float(binom.sf(count - 1, total, rate))
