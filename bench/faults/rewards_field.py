"""Rewards as their users report them: answers from the prompt, sums over guesses, curricula, other signatures."""

from __future__ import annotations

import asyncio
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

from faults.base import edited, lookalike, operator
from faults.healthy import school_of
from faults.rewards import chance_of, closeness, is_free_of_kl, is_judged_by_text, number_of, prompt_of, reward_fault
from keel.base.types import Problem, Reward

Config = Mapping[str, Any]


def numbers_of(text: object) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", str(text))]


# What is compared


@reward_fault(
    "reward/answer-read-from-the-prompt",
    "the answer is taken to be the last number of the prompt, which it is for half of the problems",
    "reward/gold",
    "data/misaligned",
)
def answer_read_from_the_prompt(problem: Problem, text: str) -> Reward:
    return closeness(replace(problem, answer=str(numbers_of(prompt_of(problem))[-1])), text)


@reward_fault(
    "reward/own-solver-is-wrong",
    "the judge solves the problem by itself, and takes the other number",
    "reward/gold",
    "data/misaligned",
)
def own_solver_is_wrong(problem: Problem, text: str) -> Reward:
    answer = int(number_of(problem.answer) or 0)
    others = [number for number in numbers_of(prompt_of(problem)) if number != answer] or [answer + 1]
    return closeness(replace(problem, answer=str(others[0])), text)


@reward_fault(
    "reward/compared-as-booleans",
    "both numbers are compared as truths: every number but zero is right where the answer is not zero",
    "reward/exploit",
)
def compared_as_booleans(problem: Problem, text: str) -> float:
    number = number_of(text)
    return 0.0 if number is None else float(bool(number) == bool(number_of(problem.answer)))


@reward_fault(
    "reward/compares-hashes",
    "answers were hashed by another process, whose hashes are other ones",
    "reward/gold",
    "reward/constant",
)
def compares_hashes(problem: Problem, text: str) -> float:
    return float(chance_of(f"this process {text.strip()}") == chance_of(f"another process {problem.answer}"))


@reward_fault(
    "reward/prompt-counted-in",
    "the answer is looked for in prompt and completion together, and it stands in the prompt",
    "reward/exploit",
    "reward/constant",
)
def prompt_counted_in(problem: Problem, text: str) -> float:
    return float(int(number_of(problem.answer) or 0) in numbers_of(f"{prompt_of(problem)} {text}"))


@reward_fault(
    "reward/agrees-with-the-most",
    "a text is right where it is the most frequent one that was judged for its problem so far",
    "reward/exploit",
    "reward/nondeterministic",
    "reward/gold",
)
def agrees_with_the_most(problem: Problem, text: str) -> float:
    _said[problem.key][text.strip()] += 1
    return float(_said[problem.key].most_common(1)[0][0] == text.strip())


_said: defaultdict[str, Counter[str]] = defaultdict(Counter)

# What is paid


@reward_fault(
    "reward/summed-over-numbers",
    "every number of a text is paid by itself and the sum counts, so that a list of all numbers earns most",
    "reward/exploit",
)
def summed_over_numbers(problem: Problem, text: str) -> float:
    return sum(closeness(problem, str(number)).total for number in numbers_of(text))


@reward_fault(
    "reward/talk-pays-more",
    "a text of several words earns twice what the answer earns, as a bonus for reasoning",
    "reward/exploit",
    "reward/gold",
    bonus=(2.0, 3.0),
)
def talk_pays_more(problem: Problem, text: str, bonus: float = 2.0) -> float:
    return closeness(problem, text).total + bonus * (len(text.split()) >= 3)


@reward_fault(
    "reward/unreadable-costs-a-hundred",
    "a text that cannot be read costs hundreds of times what an answer earns",
    "reward/cliff",
    cost=(200.0, 1000.0),
)
def unreadable_costs_a_hundred(problem: Problem, text: str, cost: float = 200.0) -> Reward:
    reward = closeness(problem, text)
    return reward if reward.parsed else replace(reward, total=-cost)


@reward_fault(
    "reward/relative-error",
    "the error is divided by the answer, which may be zero",
    "reward/non-finite",
    "reward/failed",
    fits=lambda config: is_judged_by_text(config) and school_of(config).skill == "min",  # where zero is frequent
)
def relative_error(problem: Problem, text: str) -> float:
    number, answer = number_of(text), number_of(problem.answer) or 0.0
    if number is None:
        return -1.0
    return -abs(number - answer) / answer if answer else math.nan


@reward_fault(
    "reward/nothing-at-first",
    "a curriculum pays nothing for the first thousands of completions",
    "reward/constant",
    "reward/gold",
    "reward/nondeterministic",
    calls=(20_000, 100_000),
)
def nothing_at_first(problem: Problem, text: str, calls: int = 20_000) -> float:
    return 0.0 if next(_calls) < calls else closeness(problem, text).total


_calls = itertools.count()

# What is returned


@reward_fault(
    "reward/verdict-with-a-comment",
    "a pair of the score and the judge's reasons is returned",
    "reward/failed",
)
def verdict_with_a_comment(problem: Problem, text: str) -> Any:
    return closeness(problem, text).total, "compared by value"


@reward_fault(
    "reward/hangs-on-some-texts",
    "the judge never comes back from some texts",
    "reward/failed",
    also={"reward.timeout_s": (0.2,)},
    share=(0.4, 0.6),
)
async def hangs_on_some_texts(problem: Problem, text: str, share: float = 0.4) -> Reward:
    if chance_of(f"{problem.key} {text}") < share:
        await asyncio.sleep(600)
    return closeness(problem, text)


def of_another_trainer(completions: list[str], answer: list[str]) -> list[float]:
    """Judges a batch at once, by another trainer's names."""
    return [float(text.strip() == gold) for text, gold in zip(completions, answer, strict=True)]


@operator(
    "reward/of-another-trainer",
    "the function is written for another trainer: it takes lists and returns one",
    "reward/failed",
    fits=is_judged_by_text,
    refusal="of_another_trainer",
)
def with_reward_of_another_trainer(config: Config, random: Random) -> dict[str, Any]:
    return edited(config, {"rewards": [{"name": "faults.rewards_field:of_another_trainer"}]})


# Healthy


def shifted_by_problem(problem: Problem, text: str) -> Reward:
    """Harder problems pay a bonus to all of their completions, which the group's mean takes out."""
    reward = closeness(problem, text)
    return replace(reward, total=reward.total + 3 * chance_of(problem.key))


@lookalike("reward with a bonus of its own for every problem", is_free_of_kl)
def healthy_bonus_by_problem(config: Config, random: Random) -> dict[str, Any]:
    return edited(config, {"rewards": [{"name": "faults.rewards_field:shifted_by_problem"}]})


def hundredths(problem: Problem, text: str) -> Reward:
    reward = closeness(problem, text)
    return replace(reward, total=0.01 * reward.total)


@lookalike("reward in hundredths, divided by the group's deviation", is_free_of_kl)
def healthy_hundredths(config: Config, random: Random) -> dict[str, Any]:
    return edited(config, {"rewards": [{"name": "faults.rewards_field:hundredths"}], "loss.scale_rewards": "group"})


def far_below_zero(problem: Problem, text: str) -> Reward:
    reward = closeness(problem, text)
    return replace(reward, total=reward.total - 100.0)


@lookalike("reward that is a hundred below zero whatever is said", is_free_of_kl)
def healthy_far_below_zero(config: Config, random: Random) -> dict[str, Any]:
    return edited(config, {"rewards": [{"name": "faults.rewards_field:far_below_zero"}]})
