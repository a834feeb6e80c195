"""Reward parts: functions with a name and a weight, their return values, and their combination."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

from keel.base.errors import unknown
from keel.base.types import Problem, Reward
from keel.envs.calls import is_async

# `f(problem, text) -> float | dict | Reward`; text is the last model turn, an optional parameter `turns` gets all.
RewardFunction = Callable[..., Any]
AGGREGATES = ("sum", "normalised_sum")
_MIN_STD = 1e-8  # a smaller standard deviation is rounding error


@dataclass(frozen=True)
class RewardPart:
    """One named reward `function(problem, turns)` with its weight.

    `trusted` functions are Keel's own, and `reward.timeout_s` does not apply to them. `at_once` is the maximum number
    of concurrent calls per group; coroutine functions all run concurrently. `remote` functions send requests to a
    server.
    """

    name: str
    function: Callable[[Problem, Sequence[str]], Any]
    weight: float = 1.0
    trusted: bool = False
    at_once: int = 1
    asynchronous: bool = False
    remote: bool = False


def wrap(
    function: RewardFunction, name: str | None = None, weight: float = 1.0, *, trusted: bool = False, at_once: int = 1
) -> RewardPart:
    """Make a reward part of a function `f(problem, text)`, sync or async.

    A parameter `turns` of the function gets all turns.
    """
    label = name or str(getattr(function, "__name__", type(function).__name__))
    try:
        wants_turns = "turns" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-in callables have no signature
        wants_turns = False

    def judged(problem: Problem, turns: Sequence[str]) -> Any:
        text = turns[-1] if turns else ""
        return function(problem, text, turns=turns) if wants_turns else function(problem, text)

    async def awaited(problem: Problem, turns: Sequence[str]) -> Any:
        return await judged(problem, turns)

    asynchronous = is_async(function)
    return RewardPart(label, awaited if asynchronous else judged, weight, trusted, at_once, asynchronous)


def as_reward(value: Any) -> Reward:
    """Convert the return value of a reward function to a Reward; raises ValueError if it is invalid.

    A dict has named parts; the reward is its entry `total`, else the sum of the parts. A bool is 0 or 1.
    """
    if isinstance(value, Mapping):
        parts = {str(k): _number(v, str(k)) for k, v in value.items() if k != "total"}
        value = Reward(_number(value["total"], "total") if "total" in value else sum(parts.values()), parts)
    if not isinstance(value, Reward):
        return Reward(_number(value, None))
    parts = {str(k): _number(v, str(k)) for k, v in value.parts.items()}
    return Reward(_number(value.total, "total"), parts, bool(value.parsed), str(value.details))


def combine(parts: Mapping[str, Sequence[float]], weights: Mapping[str, float], aggregate: str = "sum") -> list[float]:
    """The total reward of each completion of a group.

    `sum` adds weight × value. `normalised_sum` first standardises each part within the group to mean 0 and standard
    deviation 1, so that weights do not depend on scales (GDPO, arXiv 2601.05242); constant parts add 0. Normalised
    totals only compare completions within a group: use the parts or an evaluation to judge a policy.
    """
    if aggregate not in AGGREGATES:
        raise unknown("reward.aggregate", aggregate, AGGREGATES)
    columns = [
        [weights[name] * v for v in (values if aggregate == "sum" else _standardised(values))]
        for name, values in parts.items()
    ]
    return [sum(row) for row in zip(*columns, strict=True)]


def _standardised(values: Sequence[float]) -> list[float]:
    mean, std = fmean(values), pstdev(values)
    return [(v - mean) / std if std > _MIN_STD else 0.0 for v in values]


def _number(value: Any, part: str | None) -> float:
    where = f"{part!r} is " if part else ""
    if value is None:
        raise ValueError(f"{where}None, not a number" if part else "returned None: is a return missing?")
    try:
        number = float(value) if not isinstance(value, str | bytes) else None
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = None
    if number is None:
        raise ValueError(f"{where or 'returned '}a {type(value).__name__}, not a number, a dict or a Reward")
    if not math.isfinite(number):
        raise ValueError(f"{where or 'returned '}{number}")
    return number
