"""Tasks by name. Parameters are checked against the factory's signature before the task is built."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from keel.base.errors import KeelError, unknown
from keel.base.parts import import_object, is_import_path, make_part, part_arguments
from keel.envs.base import Task, check_is_task
from keel.envs.options import DataOptions, SourceOptions, TaskOptions


def inner_task(what: str, task: Any) -> Task:
    """Build the inner task of a wrapping task, written as in `task:`."""
    if not isinstance(task, Mapping) or "name" not in task:
        raise KeelError(f"{what} takes a task with a name, such as {{name: arithmetic, style: words}}")
    return build_task(**task)


class LazyTask:
    """A task's factory, imported at first use. `extra` is the pip extra with the packages that it needs."""

    def __init__(self, spec: str, extra: str | None = None) -> None:
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
            if self.extra is None:
                raise
            raise KeelError(f"the task {attr} needs {error.name}: pip install 'keel-rl[{self.extra}]'") from error
        return factory


TASKS: dict[str, Callable[..., Task]] = {
    "arithmetic": LazyTask("keel.envs.arithmetic:arithmetic"),
    "capitals": LazyTask("keel.envs.capitals:capitals"),
    "chess": LazyTask("keel.recipes.chess.env:chess", "chess"),
    "chess_env": LazyTask("keel.recipes.chess.env:chess_env", "chess"),
    "chess_policy": LazyTask("keel.recipes.chess.policy:chess_policy", "chess"),
    "chess_puzzles": LazyTask("keel.recipes.chess.policy:chess_puzzles", "chess"),
    "code": LazyTask("keel.envs.code:code"),
    "countdown": LazyTask("keel.envs.countdown:countdown"),
    "dataset": LazyTask("keel.envs.dataset:dataset"),
    "gsm8k": LazyTask("keel.envs.dataset:gsm8k"),
    "http": LazyTask("keel.envs.http:http"),
    "mixture": LazyTask("keel.envs.mixture:mixture_of"),
    "multihop": LazyTask("keel.recipes.multihop:multihop", "retrieval"),
    "openenv": LazyTask("keel.envs.game_packages:openenv"),
    "reasoning_gym": LazyTask("keel.envs.reasoning_gym:reasoning_gym"),
    "tools": LazyTask("keel.envs.with_tools:tools_around"),
}
# Environments of other packages, as `task.name: PACKAGE:ENVIRONMENT`.
PACKAGES: dict[str, LazyTask] = {
    "gem": LazyTask("keel.envs.game_packages:gem"),
    "skyrl_gym": LazyTask("keel.envs.game_packages:skyrl_gym"),
    "textarena": LazyTask("keel.envs.game_packages:textarena"),
    "trl": LazyTask("keel.envs.trl:trl"),
    "verifiers": LazyTask("keel.envs.verifiers:verifiers"),
}
# Parameter checks beyond a task's signature.
CHECKS: dict[str, LazyTask] = {"reasoning_gym": LazyTask("keel.envs.reasoning_gym:check_reasoning_gym")}


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
        CHECKS[name].load()(params)


def reads_data(name: str) -> bool:
    """Whether a task reads data: its factory has a parameter `data`."""
    return "data" in inspect.signature(get_task(name)).parameters


def check_data(task: TaskOptions, data: DataOptions) -> None:
    """Raise a KeelError if the task ignores a given data option, or if data are missing or given twice."""
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
    """The factory for a task name, for `PACKAGE:ENVIRONMENT`, or for a user's `module:attr`."""
    if name in TASKS:
        factory = TASKS[name]
        return factory.load() if isinstance(factory, LazyTask) else factory
    package, _, environment = name.partition(":") if isinstance(name, str) else ("", "", "")
    if package in PACKAGES and environment:
        return partial(PACKAGES[package].load(), environment)
    if is_import_path(name):
        return import_object(name, "task")
    raise unknown("task", name, [*TASKS, *(f"{package}:…" for package in PACKAGES)])
