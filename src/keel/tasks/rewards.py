"""Rewards by name: what a completion can be paid for, and how several of them make one number."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, pstdev
from typing import Any

from keel.errors import KeelError, unknown
from keel.tasks.answers import last_number, last_tag
from keel.tasks.base import Task
from keel.tasks.registry import check_params, import_own, is_users_own
from keel.types import Problem, Reward

# `f(problem, text) -> float | dict | Reward`, where text is the model's last turn; a parameter called `turns` is given
# all of them.
RewardFunction = Callable[..., Any]
AGGREGATES = ("sum", "normalised_sum")
_SAME = 1e-8  # a spread below this is rounding: dividing by it would make rewards out of noise


@dataclass(frozen=True)
class RewardPart:
    """One named reward `function(problem, turns)` with its weight.

    `trusted` ones are our own and need no worker thread around them.
    """

    name: str
    function: Callable[[Problem, Sequence[str]], Any]
    weight: float = 1.0
    trusted: bool = False


def exact(problem: Problem, text: str) -> float:
    """1 if the text is the answer, spaces around it aside."""
    return float(text.strip() == str(problem.answer).strip())


def numeric(problem: Problem, text: str, tag: str | None = None) -> Reward:
    """1 if the last number of the text (or of its last `<tag>`) is the answer's."""
    within = last_tag(text, tag) if tag else text
    given = None if within is None else last_number(within)
    correct = float(given is not None and given == last_number(str(problem.answer)))
    return Reward(correct, {}, parsed=given is not None)


def format(problem: Problem, text: str, pattern: str | None = None, tags: Sequence[str] = ("answer",)) -> float:
    """1 if the whole text matches the regular expression; without one, the share of `tags` that occur once, closed."""
    if pattern is not None:
        return float(re.fullmatch(pattern, text, re.DOTALL) is not None)
    once = [text.count(f"<{tag}>") == 1 == text.count(f"</{tag}>") and last_tag(text, tag) is not None for tag in tags]
    return fmean(once) if once else 0.0


def length(problem: Problem, text: str, target: int = 0, scale: float = 100.0) -> float:
    """0 up to `target` characters, then minus one for every `scale` more, at most -1: a price on talk."""
    return -min(1.0, max(0, len(text) - target) / scale)


REWARDS: dict[str, RewardFunction] = {"exact": exact, "numeric": numeric, "format": format, "length": length}
TASK = "task"  # the task's own reward, which is no free function


def check_reward(name: str, params: Mapping[str, Any]) -> None:
    """Refuse an unknown reward, parameter or regular expression, with the nearest valid name."""
    if name == TASK:
        if params:
            raise KeelError(f"the reward 'task' takes no parameters, but was given {', '.join(params)}")
        return
    check_params(f"reward {name}", _function(name), params, given=("problem", "text", "turns"))
    if name == "format" and params.get("pattern") is not None:
        try:
            re.compile(params["pattern"])
        except (re.error, TypeError) as error:
            raise KeelError(
                f"reward format: pattern {params['pattern']!r} is no regular expression: {error}"
            ) from error


def build_reward(name: str, task: Task, *, weight: float = 1.0, label: str | None = None, **params: Any) -> RewardPart:
    """One entry of `rewards:`: a name of `REWARDS`, `task`, or the user's `module:attr`, with its own parameters."""
    check_reward(name, params)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise KeelError(f"reward {name}: weight is {weight!r}, it must be a number")
    if name == TASK:
        return RewardPart(label or TASK, task.reward, weight, trusted=_is_ours(task))
    function = _function(name)
    return wrap(partial(function, **params) if params else function, label or name, weight, trusted=name in REWARDS)


def wrap(
    function: RewardFunction, name: str | None = None, weight: float = 1.0, *, trusted: bool = False
) -> RewardPart:
    """A reward out of any function `f(problem, text)`; one with a parameter `turns` is given all turns as well."""
    called = name or str(getattr(function, "__name__", type(function).__name__))
    try:
        wants_turns = "turns" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-in callables have no signature
        wants_turns = False

    def judged(problem: Problem, turns: Sequence[str]) -> Any:
        text = turns[-1] if turns else ""
        return function(problem, text, turns=turns) if wants_turns else function(problem, text)

    return RewardPart(called, judged, weight, trusted)


def build_rewards(entries: Sequence[Mapping[str, Any]], task: Task) -> tuple[RewardPart, ...]:
    """All of `rewards:`; two of one name are told apart by a number, since each is logged by its name."""
    parts: list[RewardPart] = []
    for entry in entries or [{"name": TASK}]:
        part = build_reward(task=task, **entry)
        taken = sum(p.name.partition("#")[0] == part.name for p in parts)
        parts.append(replace(part, name=f"{part.name}#{taken + 1}") if taken else part)
    return tuple(parts)


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
    return Reward(_number(value.total, "total"), parts, bool(value.parsed))


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


def _is_ours(task: Task) -> bool:
    """Whether a task, and every task in a mixture, is Keel's own."""
    return type(task).__module__.startswith("keel.tasks.") and all(map(_is_ours, getattr(task, "tasks", ())))


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


def _function(name: str) -> RewardFunction:
    if name in REWARDS:
        return REWARDS[name]
    if isinstance(name, str) and is_users_own(name):
        return import_own(name, "reward")
    raise unknown("reward", name, [*REWARDS, TASK])
