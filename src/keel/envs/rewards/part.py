"""One reward: a function with a name and a weight, what it may return, and how several make one number."""

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

# `f(problem, text) -> float | dict | Reward`, where text is the model's last turn; a parameter called `turns` is given
# all of them.
RewardFunction = Callable[..., Any]
AGGREGATES = ("sum", "normalised_sum")
_SAME = 1e-8  # a spread below this is rounding: dividing by it would make rewards out of noise


@dataclass(frozen=True)
class RewardPart:
    """One named reward `function(problem, turns)` with its weight.

    `trusted` ones are our own and need no worker thread around them. The completions of a group are judged one after
    the other, `at_once` at a time where that is above 1, and all together where the function is a coroutine function.
    `remote` ones ask a judge elsewhere.
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
    """A reward out of any function `f(problem, text)`, sync or async.

    One with a parameter `turns` is given all turns as well.
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
    """What a reward function returned, as a Reward; raises ValueError with the reason if that makes no sense.

    A dict is named parts: `total` if it has one, else their sum. A bool counts as 0 or 1.
    """
    if isinstance(value, Mapping):
        parts = {str(k): _number(v, str(k)) for k, v in value.items() if k != "total"}
        value = Reward(_number(value["total"], "total") if "total" in value else sum(parts.values()), parts)
    if not isinstance(value, Reward):
        return Reward(_number(value, None))
    parts = {str(k): _number(v, str(k)) for k, v in value.parts.items()}
    return Reward(_number(value.total, "total"), parts, bool(value.parsed), str(value.details))


def combine(parts: Mapping[str, Sequence[float]], weights: Mapping[str, float], aggregate: str = "sum") -> list[float]:
    """The total of each completion of one group, from the values of each part over that group.

    `sum` adds weight × value. `normalised_sum` first brings each part to mean 0 and standard deviation 1 within the
    group, so that a weight says how much a part counts whatever its scale (as GDPO does, arXiv 2601.05242); a part
    that is equal over the group adds nothing. Such totals compare completions of one group and nothing else: read the
    parts, or an evaluation, to see how good a policy is.
    """
    if aggregate not in AGGREGATES:
        raise unknown("reward.aggregate", aggregate, AGGREGATES)
    columns = [
        [weights[name] * v for v in (values if aggregate == "sum" else _standardised(values))]
        for name, values in parts.items()
    ]
    return [sum(row) for row in zip(*columns, strict=True)]


def _standardised(values: Sequence[float]) -> list[float]:
    mean, spread = fmean(values), pstdev(values)
    return [(v - mean) / spread if spread > _SAME else 0.0 for v in values]


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
