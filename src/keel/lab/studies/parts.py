"""Checks of a point that need its tasks to be built, so that a bad one is refused before the first run."""

from __future__ import annotations

from typing import Any

from keel.base.errors import KeelError
from keel.config import Config
from keel.config.checks import task_specs


def check_parts(config: Config) -> None:
    """Refuse what only building finds: parameters that a task does not take."""
    tasks: dict[str, Any] = {"task": True, "data": True, "eval": True, "warmstart": {"task"}}
    _check_tasks(config.model_dump_json(include=tasks), config)


_built: set[str] = set()


def _check_tasks(key: str, config: Config) -> None:
    """Once for all points whose tasks are the same."""
    from keel.run.build import build_named_task

    if key not in _built:
        for _, spec in task_specs(config):
            try:
                build_named_task(spec, config)
            except (TypeError, ValueError) as error:  # a value that the task has not looked at before it used it
                raise KeelError(f"the task {spec.name} cannot be built from its parameters: {error}") from None
        _built.add(key)
