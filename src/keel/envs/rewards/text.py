"""Rewards computed from the text: answers, mathematics, tags, patterns, ladders, lengths."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from keel.base.types import Problem, Reward
from keel.envs.answers import last_number, last_tag, math_equal, plain_number
from keel.envs.rewards.part import as_reward

Judged = Callable[[Problem, Sequence[str]], Any]  # an inner reward of `ladder` or `cosine`
FULL = 1.0 - 1e-9  # an inner reward of at least this counts as correct
_TAG = re.compile(r"</?[A-Za-z_]\w*>")


def none(problem: Problem, text: str) -> float:
    """0 for every completion, for training on the KL alone (distillation)."""
    return 0.0


def exact(problem: Problem, text: str) -> float:
    """1 if the text equals the answer, ignoring surrounding whitespace."""
    return float(text.strip() == str(problem.answer).strip())


def numeric(problem: Problem, text: str, tag: str | None = None) -> Reward:
    """1 if the last number of the text (or of its last `<tag>`) is the answer's."""
    within = last_tag(text, tag) if tag else text
    number = None if within is None else last_number(within)
    correct = float(number is not None and number == last_number(str(problem.answer)))
    return Reward(correct, {}, parsed=number is not None)


def format(problem: Problem, text: str, pattern: str | None = None, tags: Sequence[str] = ("answer",)) -> float:
    """1 if the whole text matches `pattern`; without a pattern, the fraction of `tags` that occur once and closed."""
    if pattern is not None:
        return float(re.fullmatch(pattern, text, re.DOTALL) is not None)
    once = [text.count(f"<{tag}>") == 1 == text.count(f"</{tag}>") and last_tag(text, tag) is not None for tag in tags]
    return fmean(once) if once else 0.0


def tag_count(problem: Problem, text: str, tags: Sequence[str] = ("think", "answer")) -> float:
    """The fraction of opening and closing tags that occur exactly once (open-r1): 4 × 0.25 for think and answer."""
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    return fmean(text.count(mark) == 1 for mark in marks)


def regex(
    problem: Problem, text: str, pattern: str, full: bool = False, group: int | str | None = None
) -> float | Reward:
    """1 if the pattern occurs (with `full`: matches the whole text); with `group`, if that group equals the answer.

    The last match counts. Group and answer are compared as text without surrounding whitespace, or as numbers.
    """
    matches = [re.fullmatch(pattern, text, re.DOTALL)] if full else list(re.finditer(pattern, text, re.DOTALL))
    match = matches[-1] if matches else None
    if group is None:
        return float(match is not None)
    value = match.group(group) if match else None
    return Reward(float(value is not None and _agree(value, str(problem.answer))), {}, parsed=value is not None)


def ladder(problem: Problem, text: str, turns: Sequence[str], rungs: Sequence[Mapping[str, Any]]) -> Reward:
    """The sum of the values of the rungs in order, up to the first that is not reached.

    A rung is `{pattern}` (occurs in the text), `{tag}` (occurs once and closed) or `{reward}` (an inner reward of at
    least `at_least`, default 1), each with its `value`.
    """
    total, reached = 0.0, 0
    for rung in rungs:
        if not _reached(rung, problem, text, turns):
            break
        total, reached = total + float(rung["value"]), reached + 1
    return Reward(total, {"rungs": float(reached)})


def length(problem: Problem, text: str, target: int = 0, scale: float = 100.0) -> float:
    """A length penalty: 0 up to `target` characters, then −1 per `scale` further characters, but at least −1."""
    return -min(1.0, max(0, len(text) - target) / scale)


def cosine(
    problem: Problem,
    text: str,
    turns: Sequence[str],
    of: Judged,
    max_length: int = 1000,
    correct_short: float = 1.0,
    correct_long: float = 0.5,
    wrong_short: float = -1.0,
    wrong_long: float = -0.5,
    exceeded: float | None = None,
) -> Reward:
    """The cosine length reward, arXiv 2502.03373.

    `long + ½(short − long)(1 + cos(π·n / max_length))`, where n is the number of characters of the last turn, at most
    `max_length`, and short and long are the values for a correct or a wrong text. A text of `max_length` or more earns
    `exceeded` if that is set. A text is correct if the inner reward `of` is 1.
    """
    correct = as_reward(of(problem, turns)).total >= FULL
    if exceeded is not None and len(text) >= max_length:
        return Reward(exceeded, {"correct": float(correct)})
    short, long = (correct_short, correct_long) if correct else (wrong_short, wrong_long)
    share = min(len(text), max_length) / max_length
    return Reward(long + 0.5 * (short - long) * (1.0 + math.cos(math.pi * share)), {"correct": float(correct)})


def _agree(text: str, answer: str) -> bool:
    number = plain_number(text)
    return text.strip() == answer.strip() or (number is not None and number == plain_number(answer))


def _reached(rung: Mapping[str, Any], problem: Problem, text: str, turns: Sequence[str]) -> bool:
    if "pattern" in rung:
        return re.search(rung["pattern"], text, re.DOTALL) is not None
    if "tag" in rung:
        return format(problem, text, tags=(rung["tag"],)) == 1.0
    return as_reward(rung["reward"](problem, turns)).total >= float(rung.get("at_least", FULL))


def math_reward(problem: Problem, text: str, tag: str | None = None) -> Reward:
    """1 if the last expression of the text (or of its last `<tag>`) equals the answer: ½, 0.5 and \\frac{1}{2} do."""
    within = last_tag(text, tag) if tag else _TAG.sub("\n", text)
    equal = None if within is None else math_equal(str(problem.answer), within)
    return Reward(float(bool(equal)), {}, parsed=equal is not None)
