"""Build rewards from the entries of `rewards:`. Parameters are checked before a model is loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from keel.base.errors import KeelError, unknown
from keel.base.parts import import_object, is_import_path, part_arguments
from keel.envs.answers import require_math_verify
from keel.envs.base import Task
from keel.envs.calls import is_async
from keel.envs.options import RewardPartOptions
from keel.envs.programs import need_sandbox
from keel.envs.rewards import http, text
from keel.envs.rewards.part import RewardFunction, RewardPart, wrap
from keel.envs.sandbox import SandboxLimits

REWARDS: dict[str, RewardFunction] = {
    "none": text.none,
    "exact": text.exact,
    "numeric": text.numeric,
    "math": text.math_reward,
    "format": text.format,
    "tag_count": text.tag_count,
    "regex": text.regex,
    "ladder": text.ladder,
    "length": text.length,
    "cosine": text.cosine,
    "code": text.code,
    "http": http.http,
    "chat_judge": http.chat_judge,
}
# Checks of parameters beyond the types in the signature.
CHECKS: Mapping[str, Callable[[Mapping[str, Any]], object]] = {
    "math": lambda params: require_math_verify("reward math"),
    "regex": text.check_regex,
    "ladder": text.check_ladder,
    "code": SandboxLimits.of,
    "chat_judge": http.check_chat_judge,
}
TASK = "task"  # the task's own reward
REMOTE = ("http", "chat_judge")
_ANSWERED = (TASK, "exact", "numeric", "math")  # compare with the problem's answer


def check_reward(name: str, params: Mapping[str, Any]) -> None:
    """Check a reward's name and parameters; errors suggest the nearest name."""
    if name == TASK:
        if params:
            raise KeelError(f"the reward 'task' takes no parameters, but was given {', '.join(params)}")
        return
    arguments = {"of": TASK, **params} if name == "cosine" else params
    _arguments(name, arguments)
    if name in CHECKS:
        CHECKS[name](arguments)
    for spec in _inner(name, arguments):
        _check_inner(name, spec)


def check_rewards(parts: Sequence[RewardPartOptions]) -> None:
    """Check all entries of `rewards`; errors name the index."""
    for index, part in enumerate(parts):
        try:
            check_reward(part.name, {key: value for key, value in part.params.items() if key != "label"})
        except KeelError as error:
            raise KeelError(f"rewards[{index}]: {error}") from None


def build_reward(name: str, task: Task, *, weight: float = 1.0, label: str | None = None, **params: Any) -> RewardPart:
    """Build one entry of `rewards:`: a name of `REWARDS`, `task`, or `module:attr`, with its parameters."""
    check_reward(name, params)
    if task.prompts_only and _compares(name, params):
        raise KeelError(
            f"the reward {name!r} needs answers, and {task.name!r} has none: use a reward without answers, such as "
            "rewards='[{name: length}]', or name the answer column with data.columns.answer"
        )
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise KeelError(f"reward {name}: weight is {weight!r}, it must be a number")
    if name == TASK:
        at_once = task.reward_concurrency
        return RewardPart(label or TASK, task.reward, weight, task.trusted, at_once, is_async(task.reward))
    function = _function(name)
    inner = [_build_inner(spec, task) for spec in _inner(name, params)]
    arguments = _arguments(name, _filled(name, params, task))
    at_once = int(params.get("concurrency", http.CONCURRENCY)) if name in REMOTE else 1
    at_once = SandboxLimits.of(params).at_once if name == "code" else at_once
    part = wrap(
        partial(function, **arguments) if arguments else function,
        label or name,
        weight,
        trusted=name in REWARDS and all(part.trusted for part in inner),
        at_once=at_once,
    )
    return replace(part, remote=name in REMOTE or any(part.remote for part in inner))


def build_rewards(entries: Sequence[Mapping[str, Any]], task: Task) -> tuple[RewardPart, ...]:
    """Build all of `rewards:`. Repeated names get a number, because each part is logged by name."""
    parts: list[RewardPart] = []
    for entry in entries or [{"name": TASK}]:
        part = build_reward(task=task, **entry)
        copies = sum(p.name.partition("#")[0] == part.name for p in parts)
        parts.append(replace(part, name=f"{part.name}#{copies + 1}") if copies else part)
    return tuple(parts)


def probe_rewards(entries: Sequence[Mapping[str, Any]]) -> None:
    """Check before the run that remote judges can be reached and that the code sandbox works."""
    for entry in entries:
        if entry["name"] == "code":
            need_sandbox(SandboxLimits.of(entry))
        if entry["name"] in REMOTE:
            http.probe(**{key: entry[key] for key in ("url", "headers", "timeout_s") if key in entry})


def _compares(name: str, params: Mapping[str, Any]) -> bool:
    """Whether a built-in reward reads the problem's answer."""
    if name == "chat_judge":
        return "{answer}" in params.get("template", http.TEMPLATE)
    return name in _ANSWERED or (name == "regex" and params.get("group") is not None)


def _inner(name: str, params: Mapping[str, Any]) -> list[Any]:
    """The rewards inside a composite reward."""
    if name == "cosine":
        return [params.get("of", TASK)]
    return [rung["reward"] for rung in params["rungs"] if "reward" in rung] if name == "ladder" else []


def _spec(spec: Any) -> dict[str, Any]:
    return {"name": spec} if isinstance(spec, str) else dict(spec)


def _check_inner(outer: str, spec: Any) -> None:
    if not isinstance(spec, str) and not (isinstance(spec, Mapping) and isinstance(spec.get("name"), str)):
        raise KeelError(f"reward {outer}: {spec!r} is not a reward: give a name, or {{name, …}} with its parameters")
    params = _spec(spec)
    name = params.pop("name")
    try:
        check_reward(name, params)
    except KeelError as error:
        raise KeelError(f"reward {outer}: {error}") from None
    if name in REMOTE or (is_import_path(name) and is_async(_function(name))):
        raise KeelError(
            f"reward {outer}: {name} is remote or async and cannot be nested: give it its own entry in rewards"
        )


def _build_inner(spec: Any, task: Task) -> RewardPart:
    return build_reward(task=task, **_spec(spec))


def _filled(name: str, params: Mapping[str, Any], task: Task) -> dict[str, Any]:
    """The parameters with reward names replaced by functions."""
    filled = dict(params)
    if name == "cosine":
        filled["of"] = _build_inner(params.get("of", TASK), task).function
    elif name == "ladder":
        filled["rungs"] = [
            {**rung, "reward": _build_inner(rung["reward"], task).function} if "reward" in rung else rung
            for rung in params["rungs"]
        ]
    return filled


def _arguments(name: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of a reward from its parameters; problem, text and turns are passed per completion."""
    return part_arguments(f"reward {name}", _function(name), params, positional=2, reserved=("turns",))


def _function(name: str) -> RewardFunction:
    if name in REWARDS:
        return REWARDS[name]
    if isinstance(name, str) and is_import_path(name):
        return import_object(name, "reward")
    raise unknown("reward", name, [*REWARDS, TASK])
