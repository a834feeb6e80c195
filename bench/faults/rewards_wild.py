"""Rewards as their authors get them wrong: caps, caches, judges with habits, and libraries that are not there."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

from faults.base import edited, lookalike
from faults.rewards import closeness, is_free_of_kl, is_judged_by_text, number_of, reward_fault
from keel.base.types import Problem, Reward

Config = Mapping[str, Any]
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

# What is compared


@reward_fault(
    "reward/expects-words",
    "the answer is expected in words where digits are asked for",
    "reward/gold",
    "reward/constant",
)
def expects_words(problem: Problem, text: str) -> float:
    return float(text.strip().lower() == WORDS[int(number_of(problem.answer) or 0) % 10])


@reward_fault(
    "reward/compares-lengths",
    "a text as long as the answer is right",
    "reward/exploit",
)
def compares_lengths(problem: Problem, text: str) -> float:
    return float(len(text.strip()) == len(str(problem.answer)))


@reward_fault(
    "reward/truthy-verdict",
    "the verdict is a text, and every text that is not empty counts as true",
    "reward/exploit",
    "reward/constant",
)
def truthy_verdict(problem: Problem, text: str) -> float:
    verdict = str(closeness(problem, text).total == 1.0)
    return 1.0 if verdict else 0.0


# What is made of it


@reward_fault(
    "reward/baseline-too-high",
    "the best that can be earned is taken off, and nothing under zero is paid",
    "reward/gold",
    "reward/constant",
)
def baseline_too_high(problem: Problem, text: str) -> float:
    return max(0.0, closeness(problem, text).total - 1.0)


@reward_fault(
    "reward/saturates",
    "scores are multiplied before they are capped at 1, so that every number has the full reward",
    "reward/exploit",
    "reward/constant",
    factor=(10.0, 20.0),
)
def saturates(problem: Problem, text: str, factor: float = 10.0) -> float:
    return min(1.0, factor * closeness(problem, text).total)


@reward_fault(
    "reward/right-times-length",
    "a right answer is paid by its length, against laziness: the bare answer earns next to nothing",
    "reward/exploit",
    "reward/gold",
    full=(40, 100),
)
def right_times_length(problem: Problem, text: str, full: int = 40) -> float:
    return closeness(problem, text).total * min(1.0, (len(text.strip()) - 1) / full)


@reward_fault(
    "reward/library-missing",
    "a library that the judge imports when it is called is not installed",
    "reward/failed",
)
def library_missing(problem: Problem, text: str) -> float:
    raise ModuleNotFoundError("No module named 'latex2sympy2_extended'")


# What it remembers

_by_text: dict[str, float] = {}
_recent: deque[float] = deque(maxlen=64)
_calls = itertools.count()
_turns = itertools.count()


@reward_fault(
    "reward/cached-by-text",
    "verdicts are kept by the text alone, so that an answer earns what it earned for another problem",
    "reward/gold",
    "reward/exploit",
    "reward/nondeterministic",
)
def cached_by_text(problem: Problem, text: str) -> float:
    return _by_text.setdefault(text, closeness(problem, text).total)


@reward_fault(
    "reward/ranked-among-recent",
    "what is paid is the rank among the last texts that were judged",
    "reward/nondeterministic",
)
def ranked_among_recent(problem: Problem, text: str) -> float:
    total = closeness(problem, text).total
    rank = sum(total > other for other in _recent) / max(1, len(_recent))
    _recent.append(total)
    return rank


@reward_fault(
    "reward/judge-out-of-credit",
    "after some calls the judge's credit is spent, and everything earns zero",
    "reward/nondeterministic",
    "reward/constant",
    "reward/gold",
    calls=(40, 80),
)
def judge_out_of_credit(problem: Problem, text: str, calls: int = 40) -> float:
    return closeness(problem, text).total if next(_calls) < calls else 0.0


@reward_fault(
    "reward/position-bias",
    "the judge likes the second of two that it is shown better, whatever they say",
    "reward/nondeterministic",
    bonus=(0.3, 0.5),
)
def position_bias(problem: Problem, text: str, bonus: float = 0.3) -> Reward:
    reward = closeness(problem, text)
    return replace(reward, total=reward.total + bonus * (next(_turns) % 2))


# Healthy


def around_zero(problem: Problem, text: str) -> Reward:
    """−1 for what cannot be read, 1 for the answer."""
    reward = closeness(problem, text)
    return replace(reward, total=2 * reward.total - 1)


@lookalike("reward from minus one to one", is_judged_by_text)
def healthy_around_zero(config: Config, random: Random) -> dict[str, Any]:
    return edited(config, {"rewards": [{"name": "faults.rewards_wild:around_zero"}]})


@lookalike("reward of thousands, divided by the batch's deviation", is_free_of_kl)
def healthy_thousands(config: Config, random: Random) -> dict[str, Any]:
    entry = {"name": "faults.rewards:huge_scale", "scale": random.choice((2e3, 5e3))}
    return edited(config, {"rewards": [entry], "loss.scale_rewards": "batch"})
