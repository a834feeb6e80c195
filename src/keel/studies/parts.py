"""The checks of a point that need its parts to be built, so that a study does not find out at its last point."""

from __future__ import annotations

from keel.config import Config
from keel.errors import KeelError


def check_parts(config: Config) -> None:
    """Refuse what only building finds: parameters that a task does not take, a penalty that cannot be trained on."""
    from keel.build import check_trainable

    check_trainable(config)
    _check_tasks(config.model_dump_json(include={"task", "data", "eval"}), config)


_built: set[str] = set()


def _check_tasks(key: str, config: Config) -> None:
    """Once for all points whose tasks are the same."""
    from keel.build import build_named_task

    if key not in _built:
        for spec in (config.task, *config.eval.tasks):
            try:
                build_named_task(spec, config)
            except (TypeError, ValueError) as error:  # a value that the task has not looked at before it used it
                name = spec if isinstance(spec, str) else spec.name
                raise KeelError(f"the task {name} cannot be built from its parameters: {error}") from None
        _built.add(key)
