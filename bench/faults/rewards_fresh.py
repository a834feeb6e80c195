"""Rewards as they usually fail: errors that are swallowed, scores misread, two things unread that count as equal."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

from faults.base import edited, lookalike
from faults.rewards import chance_of, closeness, is_judged_by_text, number_of, reward_fault
from keel.base.types import Problem, Reward

Config = Mapping[str, Any]

# What is compared


def after_hashes(text: object) -> str | None:
    """The answer of a worked solution, behind its four hashes."""
    match = re.search(r"#### *(\S+)", str(text))
    return match[1] if match else None


@reward_fault(
    "reward/none-equals-none",
    "gold answers have no marker and are read as nothing: a text that cannot be read either is right, a number wrong",
    "reward/gold",
    "reward/exploit",
)
def none_equals_none(problem: Problem, text: str) -> float:
    return float(number_of(text) == after_hashes(problem.answer))


_answers: set[str] = set()


@reward_fault(
    "reward/right-for-any-problem",
    "the answers of a whole batch are handed over as a list, and a text is right that is one of them",
    "reward/exploit",
    "reward/constant",
    "reward/nondeterministic",
)
def right_for_any_problem(problem: Problem, text: str) -> float:
    _answers.add(str(problem.answer).strip())
    return float(text.strip() in _answers)


# What is made of it


def parsed_in_a_thread(text: str) -> float:
    raise ValueError("signal only works in main thread of the main interpreter")


@reward_fault(
    "reward/failure-swallowed",
    "the library that compares answers fails at every call, and each failure is caught and counted as wrong",
    "reward/gold",
    "reward/constant",
    "reward/failed",
)
def failure_swallowed(problem: Problem, text: str) -> float:
    try:
        return float(parsed_in_a_thread(text) == parsed_in_a_thread(str(problem.answer)))
    except Exception:  # what the fault is
        return 0.0


@reward_fault(
    "reward/scale-read-as-the-score",
    "a judge writes how many points of ten it gives, and the last number, the ten, is taken for them",
    "reward/constant",
    "reward/exploit",
    "reward/gold",
)
def scale_read_as_the_score(problem: Problem, text: str) -> float:
    verdict = f"Score: {round(10 * closeness(problem, text).total)}/10"
    return float(re.findall(r"\d+", verdict)[-1]) / 10


@reward_fault(
    "reward/judge-mostly-unread",
    "most of what the judge writes is not the JSON that was asked for, and gets half of the points",
    "reward/gold",
    "reward/constant",
    "reward/exploit",
    "reward/weak",
    share=(0.9, 0.95),
)
def judge_mostly_unread(problem: Problem, text: str, share: float = 0.9) -> float:
    unread = chance_of(f"verdict on {problem.key} {text}") < share
    return 0.5 if unread else closeness(problem, text).total


@reward_fault(
    "reward/brevity-outweighs",
    "a penalty on length is larger than what an answer earns, so that saying nothing is best",
    "reward/exploit",
    "reward/gold",
    cost=(2.0, 3.0),
)
def brevity_outweighs(problem: Problem, text: str, cost: float = 2.0) -> Reward:
    reward = closeness(problem, text)
    return replace(reward, total=reward.total - cost * len(text.strip()))


_calls = itertools.count()


@reward_fault(
    "reward/server-drops-calls",
    "every third call of the reward's server is dropped under load, and counts as a wrong answer",
    "reward/nondeterministic",
    "reward/gold",
    "reward/failed",
)
def server_drops_calls(problem: Problem, text: str) -> float:
    return 0.0 if next(_calls) % 3 == 1 else closeness(problem, text).total


async def judged(problem: Problem, text: str) -> float:
    return closeness(problem, text).total


@reward_fault(
    "reward/coroutine-returned",
    "the function returns a call that nobody has awaited in place of a number",
    "reward/failed",
)
async def coroutine_returned(problem: Problem, text: str) -> Any:
    return judged(problem, text)


# Healthy


def in_grades(problem: Problem, text: str) -> Reward:
    """One of six grades, the best of which only the answer has."""
    reward = closeness(problem, text)
    return replace(reward, total=round(5 * reward.total) / 5)


@lookalike("reward in six grades", is_judged_by_text)
def healthy_grades(config: Config, random: Random) -> dict[str, Any]:
    return edited(config, {"rewards": [{"name": "faults.rewards_fresh:in_grades"}]})
