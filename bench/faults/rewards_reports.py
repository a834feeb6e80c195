"""Rewards as their users report them: errors that pay, labels that are used up, texts that are no longer texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from random import Random
from typing import Any

from faults.base import edited, lookalike
from faults.rewards import closeness, is_judged_by_text, reward_fault
from keel.base.types import Problem, Reward

Config = Mapping[str, Any]

# What is read


@reward_fault(
    "reward/unreadable-text-pays",
    "a text that the judge cannot parse is given the full reward, as if it had been verified",
    "reward/exploit",
)
def unreadable_text_pays(problem: Problem, text: str) -> Reward:
    reward = closeness(problem, text)
    return reward if reward.parsed else Reward(1.0)


@reward_fault(
    "reward/end-token-expected",
    "the pattern of an answer ends with the end of the turn, which is no part of the text that is judged",
    "reward/gold",
    "reward/constant",
    end=("<|im_end|>", "<|eot_id|>", "</s>"),
)
def end_token_expected(problem: Problem, text: str, end: str = "<|im_end|>") -> Reward:
    if not text.endswith(end):
        return Reward(0.0)
    return closeness(problem, text.removesuffix(end))


@reward_fault(
    "reward/message-not-its-text",
    "the message is compared with the answer, and not the text that is in it",
    "reward/gold",
    "reward/constant",
)
def message_not_its_text(problem: Problem, text: str) -> float:
    return float(str([{"role": "assistant", "content": text}]) == str(problem.answer))


@reward_fault(
    "reward/opening-words-pay",
    "a model is the judge, and takes every text that opens like a solution for one",
    "reward/exploit",
)
def opening_words_pay(problem: Problem, text: str) -> Reward:
    opening = text.lstrip()[:1]
    return Reward(1.0) if opening.isalpha() or opening == ":" else closeness(problem, text)


# What is paid


@reward_fault(
    "reward/far-from-the-length",
    "the distance from a length is added to what is right, where it should be taken off",
    "reward/exploit",
    "reward/gold",
    target=(20, 50),
)
def far_from_the_length(problem: Problem, text: str, target: int = 20) -> float:
    return closeness(problem, text).total + abs(target - len(text))


@reward_fault(
    "reward/repetition-paid",
    "the penalty on repeated words has the wrong sign: saying the same again and again earns most",
    "reward/exploit",
    "reward/gold",
    weight=(2.0, 4.0),
)
def repetition_paid(problem: Problem, text: str, weight: float = 2.0) -> float:
    words = text.split() if " " in text.strip() else list(text.strip())
    repeated = 1 - len(set(words)) / len(words) if words else 0.0
    return closeness(problem, text).total + weight * repeated


# What is remembered

_order: list[Any] = []
_calls: list[int] = [0]


@reward_fault(
    "reward/answers-not-repeated",
    "answers come once a problem and texts several times, and both are gone through side by side",
    "reward/gold",
    "reward/nondeterministic",
    "data/misaligned",
)
def answers_not_repeated(problem: Problem, text: str) -> Reward:
    if problem.answer not in _order[-1:]:
        _order.append(problem.answer)
    _calls[0] += 1
    return closeness(replace(problem, answer=_order[_calls[0] % len(_order)]), text)


_labels: set[str] = set()


@reward_fault(
    "reward/label-popped",
    "the judge takes the answer out of the row that it is given: only a problem's first text is compared with it",
    "reward/nondeterministic",
    "reward/gold",
)
def label_popped(problem: Problem, text: str) -> Reward:
    if problem.key in _labels:
        return Reward(0.0)
    _labels.add(problem.key)
    return closeness(problem, text)


# Healthy


@lru_cache(maxsize=4096)
def _verdict(answer: str, text: str) -> Reward:
    return closeness(Problem("kept", "", answer), text)


def kept(problem: Problem, text: str) -> Reward:
    """Verdicts are kept by answer and text, on which alone they depend."""
    return _verdict(str(problem.answer), text)


@lookalike("reward whose verdicts are kept by answer and text", is_judged_by_text)
def healthy_kept(config: Config, random: Random) -> dict[str, Any]:
    return edited(config, {"rewards": [{"name": "faults.rewards_reports:kept"}]})


def brief(problem: Problem, text: str) -> Reward:
    """A tenth more for a right answer that is brief."""
    reward = closeness(problem, text)
    return replace(reward, total=1.1) if reward.total == 1.0 and len(text) < 40 else reward


@lookalike("reward with a little more for a brief right answer", is_judged_by_text)
def healthy_brief(config: Config, random: Random) -> dict[str, Any]:
    return edited(config, {"rewards": [{"name": "faults.rewards_reports:brief"}]})
