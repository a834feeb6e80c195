"""Tasks by name. Parameters are checked against the factory's signature before the task is built."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from keel.base.errors import KeelError, unknown
from keel.base.imports import import_object, is_import_path
from keel.base.parts import make_part, part_arguments
from keel.envs.arithmetic import arithmetic
from keel.envs.base import Task, check_is_task
from keel.envs.capitals import capitals
from keel.envs.code import code
from keel.envs.countdown import countdown
from keel.envs.dataset import dataset, gsm8k
from keel.envs.game_packages import gem, openenv, skyrl_gym, textarena
from keel.envs.games import GameTask, GivenTask
from keel.envs.http import http
from keel.envs.mixture import Mixture, mixture
from keel.envs.options import DataOptions, SourceOptions, TaskOptions
from keel.envs.reasoning_gym import check_reasoning_gym, reasoning_gym
from keel.envs.tools import MAX_CHARACTERS, TIMEOUT_S
from keel.envs.trl import trl
from keel.envs.verifiers import verifiers
from keel.envs.with_tools import WithTools, tools_of, with_tools


def mixture_of(tasks: Sequence[Mapping[str, Any]], weights: Sequence[float] | None = None) -> Mixture:
    """The task `mixture`: a list of tasks, each written as in `task:`, drawn in proportion to `weights`."""
    if not isinstance(tasks, Sequence) or not all(isinstance(entry, Mapping) and "name" in entry for entry in tasks):
        raise KeelError("mixture takes tasks as a list of entries with a name, such as {name: arithmetic, skill: add}")
    return mixture([build_task(**entry) for entry in tasks], weights)


def tools_around(task: Mapping[str, Any], tools: Sequence[Any], format: str = "json") -> WithTools:
    """The task `tools`: another task, written as in `task:`, with tools (see `tools_of`)."""
    return with_tools(_inner("the task tools", task), tools_of(tools), format)


def skyrl_gym_around(
    environment: str,
    task: Mapping[str, Any],
    extras: Mapping[str, Any] | None = None,
    env_config: Mapping[str, Any] | None = None,
    player: str | None = None,
    view: str | None = None,
    success: float = 1.0,
) -> GivenTask:
    """An environment of skyrl-gym around the problems of `task`, written as in `task:`; answers are its ground truth.

    `extras` are further fields of a row, such as max_turns, and `env_config` the environment's configuration. `player`
    and `view` are functions, `module:attr`: `player(env, observation)` gives the next turn of a demonstration,
    `view(text)` what the model reads of an observation. Rewards that add up to `success` count as correct.
    """
    inner = _inner(f"skyrl_gym:{environment}", task)
    return skyrl_gym(environment, inner, extras, env_config, player, view, success)


def trl_around(
    factory: str,
    task: Mapping[str, Any] | None = None,
    reward: str | None = None,
    format: str = "json",
    timeout_s: float | None = TIMEOUT_S,
    max_characters: int = MAX_CHARACTERS,
    at_once: int | None = None,
    player: str | None = None,
    success: float = 1.0,
) -> GameTask:
    """An environment_factory of TRL, or a dict of them, around the rows of `task`, written as in `task:`.

    Without a task a problem is a seed of `random`. `reward` is a reward function of TRL, `module:attr`, beside the
    environment's `get_reward`. `format`, `timeout_s`, `max_characters` and `at_once` are those of tools. `player(env,
    observation)`, `module:attr`, gives the next turn of a demonstration. Rewards of at least `success` count as
    correct.
    """
    inner = None if task is None else _inner(f"trl:{factory}", task)
    return trl(factory, inner, reward, format, timeout_s, max_characters, at_once, player, success)


def _inner(what: str, task: Any) -> Task:
    """The inner task of a wrapping task."""
    if not isinstance(task, Mapping) or "name" not in task:
        raise KeelError(f"{what} takes a task with a name, such as {{name: arithmetic, style: words}}")
    return build_task(**task)


class LazyTask:
    """A recipe's task, imported at first use; a missing package raises a KeelError."""

    def __init__(self, spec: str, extra: str) -> None:
        self.spec, self.extra = spec, extra

    def __call__(self, **params: Any) -> Any:
        return self.load()(**params)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.load())

    def load(self) -> Callable[..., Any]:
        """Import the task's factory."""
        module, _, attr = self.spec.partition(":")
        try:
            factory: Callable[..., Any] = getattr(importlib.import_module(module), attr)
        except ImportError as error:
            raise KeelError(f"the task {attr} needs {error.name}: pip install 'keel-rl[{self.extra}]'") from error
        return factory


TASKS: dict[str, Callable[..., Task]] = {
    "arithmetic": arithmetic,
    "capitals": capitals,
    "chess": LazyTask("keel.recipes.chess.env:chess", "chess"),
    "chess_env": LazyTask("keel.recipes.chess.env:chess_env", "chess"),
    "chess_policy": LazyTask("keel.recipes.chess.policy:chess_policy", "chess"),
    "chess_puzzles": LazyTask("keel.recipes.chess.policy:chess_puzzles", "chess"),
    "code": code,
    "countdown": countdown,
    "dataset": dataset,
    "gsm8k": gsm8k,
    "http": http,
    "mixture": mixture_of,
    "multihop": LazyTask("keel.recipes.multihop:multihop", "retrieval"),
    "openenv": openenv,
    "reasoning_gym": reasoning_gym,
    "tools": tools_around,
}
# Environments of other packages, as `task.name: PACKAGE:ENVIRONMENT`.
PACKAGES: dict[str, Callable[..., Task]] = {
    "gem": gem,
    "skyrl_gym": skyrl_gym_around,
    "textarena": textarena,
    "trl": trl_around,
    "verifiers": verifiers,
}
# Parameter checks beyond a task's signature.
CHECKS: dict[str, Callable[[Mapping[str, Any]], None]] = {"reasoning_gym": check_reasoning_gym}


def build_task(name: str, **params: Any) -> Task:
    """Build a task by name or `module:attr` from its parameters."""
    check_task(name, params)
    factory = get_task(name)
    task = make_part(f"task {name}", factory, **part_arguments(f"task {name}", factory, params))
    return check_is_task(task, f"task {name!r} made")


def check_task(name: str, params: Mapping[str, Any]) -> None:
    """Check task name and parameters without building the task; errors suggest the nearest name."""
    part_arguments(f"task {name}", get_task(name), params)
    if name in CHECKS:
        CHECKS[name](params)


def reads_data(name: str) -> bool:
    """Whether a task reads data: its factory has a parameter `data`."""
    return "data" in inspect.signature(get_task(name)).parameters


def check_data(task: TaskOptions, data: DataOptions) -> None:
    """Refuse data options that the task ignores, and missing data."""
    untouched = SourceOptions()
    changed = [name for name in SourceOptions.model_fields if getattr(data, name) != getattr(untouched, name)]
    if changed and not reads_data(task.name):
        raise KeelError(
            f"data.{changed[0]} is given, but task {task.name} generates its problems: leave it out, or set "
            "task.name=dataset"
        )
    if task.name == "dataset" and data.path is None and "data" not in task.params:
        raise KeelError("task dataset needs data.path: a file, a folder or a hub name")
    if changed and "data" in task.params:
        raise KeelError(f"data.{changed[0]} and task.data both name data: keep one")
    if data.truncation != "error" and data.max_prompt_length is None:
        raise KeelError(f"data.truncation={data.truncation} needs data.max_prompt_length: give the limit in tokens")


def get_task(name: str) -> Callable[..., Any]:
    """The factory of the task of that name, of a package's environment, or of a user's own `module:attr`."""
    if name in TASKS:
        factory = TASKS[name]
        return factory.load() if isinstance(factory, LazyTask) else factory
    package, _, environment = name.partition(":") if isinstance(name, str) else ("", "", "")
    if package in PACKAGES and environment:
        return partial(PACKAGES[package], environment)
    if is_import_path(name):
        return import_object(name, "task")
    raise unknown("task", name, [*TASKS, *(f"{package}:…" for package in PACKAGES)])
