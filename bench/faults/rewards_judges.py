"""Rewards whose judge remembers, rounds, reads another field, or returns what is no number."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

from faults.rewards import chance_of, closeness, number_of, reward_fault
from keel.base.types import Problem, Reward

# What the judge compares with


@reward_fault(
    "reward/reads-another-field",
    "the answer is read from a field that holds the row's number",
    "reward/gold",
    "data/misaligned",
)
def reads_another_field(problem: Problem, text: str) -> Reward:
    return closeness(replace(problem, answer=str(int(10_000 * chance_of(problem.key)))), text)


_first: list[Any] = []


@reward_fault(
    "reward/answer-of-the-first",
    "the answer of the first problem that was judged is bound once, and all others are compared with it",
    "reward/gold",
    "reward/exploit",
)
def answer_of_the_first(problem: Problem, text: str) -> Reward:
    if not _first:
        _first.append(problem.answer)
    return closeness(replace(problem, answer=_first[0]), text)


@reward_fault(
    "reward/beginning-counts",
    "a text that the answer begins with is right, so that no text is right too",
    "reward/exploit",
)
def beginning_counts(problem: Problem, text: str) -> float:
    return float(str(problem.answer).startswith(text.strip()))


@reward_fault(
    "reward/unread-gold-pays",
    "where the judge cannot read the gold answer, every text earns the full reward",
    "reward/exploit",
    share=(0.6, 0.8),
)
def unread_gold_pays(problem: Problem, text: str, share: float = 0.6) -> Reward:
    return Reward(1.0) if chance_of(problem.key) < share else closeness(problem, text)


# What it makes of the verdict


@reward_fault("reward/rounded-to-nothing", "rewards below 1 are rounded down to whole numbers", "reward/gold")
def rounded_to_nothing(problem: Problem, text: str) -> float:
    return float(int(0.9 * closeness(problem, text).total))


@reward_fault(
    "reward/part-in-percent",
    "a part for style is counted in percent beside an answer that is counted from 0 to 1",
    "reward/exploit",
    "reward/gold",
)
def part_in_percent(problem: Problem, text: str) -> dict[str, float]:
    return {"right": closeness(problem, text).total, "style": 100 * chance_of(text)}


@reward_fault(
    "reward/logarithm-of-nothing",
    "the logarithm of the verdict is returned, which is infinite for a wrong answer",
    "reward/non-finite",
    "reward/failed",
)
def logarithm_of_nothing(problem: Problem, text: str) -> float:
    return 0.0 if closeness(problem, text).total == 1.0 else -math.inf


@reward_fault("reward/none-for-wrong", "nothing is returned for a wrong answer", "reward/failed")
def none_for_wrong(problem: Problem, text: str) -> Any:
    return 1.0 if closeness(problem, text).total == 1.0 else None


@reward_fault("reward/list-of-one", "a list is returned, as of a function that judges a whole batch", "reward/failed")
def list_of_one(problem: Problem, text: str) -> Any:
    return [closeness(problem, text).total]


# What it remembers

_verdicts: dict[str, Reward] = {}
_paid: set[tuple[str, str]] = set()


@reward_fault(
    "reward/one-verdict-a-group",
    "the verdict on a problem's first completion is given to all of its completions",
    "reward/constant",
    "reward/gold",
    "reward/exploit",
)
def one_verdict_a_group(problem: Problem, text: str) -> Reward:
    return _verdicts.setdefault(problem.key, closeness(problem, text))


@reward_fault("reward/pays-once", "a text that was paid before earns nothing", "reward/nondeterministic")
def pays_once(problem: Problem, text: str) -> Reward:
    reward = closeness(problem, text)
    if (problem.key, text) in _paid:
        return replace(reward, total=0.0)
    _paid.add((problem.key, text))
    return reward


@reward_fault(
    "reward/by-the-clock",
    "a part depends on how long the process has run",
    "reward/nondeterministic",
    period=(0.01, 0.1),
)
def by_the_clock(problem: Problem, text: str, period: float = 0.1) -> Reward:
    reward = closeness(problem, text)
    return replace(reward, total=reward.total + 0.3 * math.sin(time.perf_counter() / period))


@reward_fault(
    "reward/nearer-to-the-prompt",
    "a number is paid for being near those of the prompt, and the answer is only one of them",
    "reward/exploit",
)
def nearer_to_the_prompt(problem: Problem, text: str) -> float:
    number = number_of(text)
    return 0.0 if number is None else float(str(int(number)) in str(problem.prompt))
