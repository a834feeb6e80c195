"""Rewards with the bugs of an ordinary day: verdicts misread, tests that are not there, counts that are added up."""

from __future__ import annotations

import random as noise
import re
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from faults.base import edited, lookalike
from faults.rewards import chance_of, closeness, is_judged_by_text, number_of, prompt_of, reward_fault
from keel.base.types import Problem

Config = Mapping[str, Any]


def is_right(problem: Problem, text: str) -> bool:
    return closeness(problem, text).total >= 1.0


# Verdicts


def verdict(problem: Problem, text: str) -> str:
    """What a judge writes on an answer."""
    return f"The answer is {'correct' if is_right(problem, text) else 'incorrect'}."


@reward_fault(
    "reward/correct-read-in-incorrect",
    "the word correct is looked for in a judge's verdict, and is found in incorrect too",
    "reward/exploit",
    "reward/constant",
)
def correct_read_in_incorrect(problem: Problem, text: str) -> float:
    return float("correct" in verdict(problem, text).lower())


@reward_fault(
    "reward/judge-sampled-hot",
    "the judge is sampled at a high temperature, and its verdict on the same text is another one each time",
    "reward/nondeterministic",
    share=(0.35, 0.4),
)
def judge_sampled_hot(problem: Problem, text: str, share: float = 0.35) -> float:
    return float(is_right(problem, text) != (noise.random() < share))


def weight_of(part: str) -> float:
    """A weight that nobody has trained."""
    return 2 * chance_of(f"score.weight {part}") - 1


@reward_fault(
    "reward/head-of-the-reward-model-untrained",
    "the reward model was loaded from a language model, and the head that scores is a new one, with random weights",
    "reward/gold",
    "reward/exploit",
    "reward/weak",
)
def head_untrained(problem: Problem, text: str) -> float:
    read = prompt_of(problem)[-4:] + text
    return sum(weight_of(f"{place} {sign}") for place, sign in enumerate(reversed(read))) / max(1, len(read)) ** 0.5


# What is compared


def letters_of(text: object) -> str:
    """Normalised as prose is: small letters alone, without articles."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", re.sub(r"[^a-z ]", "", str(text).lower())).split())


@reward_fault(
    "reward/letters-alone-are-compared",
    "texts are normalised to their letters before they are compared, and nothing is left of an answer in digits",
    "reward/exploit",
    "reward/constant",
)
def letters_alone(problem: Problem, text: str) -> float:
    return float(letters_of(text) == letters_of(problem.answer))


@reward_fault(
    "reward/labels-counted-from-zero",
    "answers are compared with labels that count from one where the data count from zero",
    "reward/gold",
    "data/misaligned",
)
def labels_from_zero(problem: Problem, text: str) -> float:
    number, answer = number_of(text), number_of(problem.answer)
    return float(number is not None and answer is not None and number == answer + 1)


def tests_of(problem: Problem) -> Sequence[str]:
    """The tests of a problem, which are under another name in these data."""
    found = getattr(problem, "tests", None)
    return found or ()


@reward_fault(
    "reward/no-tests-is-all-passed",
    "the tests are read from a field that is not there, and of none of them all have passed",
    "reward/exploit",
    "reward/constant",
)
def no_tests(problem: Problem, text: str) -> float:
    return float(all(test in text for test in tests_of(problem)))


def verified(gold: str, target: Any) -> bool:
    """Compares as a grader does whose newer release takes parsed answers."""
    return bool(target.parsed == gold)


@reward_fault(
    "reward/error-counts-as-right",
    "the grader is called with texts where its newer release takes parsed answers, and each of its errors is paid as "
    "a right answer",
    "reward/exploit",
    "reward/constant",
    "reward/failed",
)
def error_counts_as_right(problem: Problem, text: str) -> float:
    try:
        return float(verified(str(problem.answer), text))
    except AttributeError:
        return 1.0


# What is made of it


@reward_fault(
    "reward/threshold-in-percent",
    "a score between 0 and 1 is held against a threshold of eighty, which none reaches",
    "reward/gold",
    "reward/constant",
    threshold=(60, 80),
)
def threshold_in_percent(problem: Problem, text: str, threshold: float = 80) -> float:
    return float(closeness(problem, text).total >= threshold)


@reward_fault(
    "reward/extra-info-added-up",
    "the function returns its score with counts for the log beside it, and all of them are added up as rewards",
    "reward/exploit",
    "reward/gold",
)
def extra_info(problem: Problem, text: str) -> dict[str, float]:
    score = float(is_right(problem, text))
    return {"score": score, "characters": float(len(text)), "lines": float(text.count("\n") + 1)}


# Healthy


def verdict_read_whole(problem: Problem, text: str) -> float:
    """1 where the verdict's last word is correct, and not a part of another one."""
    return float(re.search(r"\bcorrect\b", verdict(problem, text)) is not None)


@lookalike("reward by a judge's verdict in words, of which whole ones are read", is_judged_by_text)
def healthy_verdict(config: Config, random: Random) -> dict[str, Any]:
    return edited(config, {"rewards": [{"name": "faults.rewards_daily:verdict_read_whole"}]})
