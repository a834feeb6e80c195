"""The command line's arguments: which is the configuration, and which are options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from keel.base.errors import KeelError
from keel.config import aliases, text


def of_task(override: str) -> str:
    """An override where a task is described: a name without a section is a parameter of the task."""
    from keel.config.schema import Config

    key = override.lstrip("+").partition("=")[0]
    return override if key.partition(".")[0] in Config.model_fields else f"task.{override}"


def _names_data(override: str) -> bool:
    name = aliases.normal(override.partition("=")[0])
    alias = aliases.table().get(name)
    return name == "data.path" or (alias is not None and alias.target == "data.path")


def is_run(path: Path) -> bool:
    """Whether this is the folder of a run."""
    return path.is_dir() and (path / "config.yaml").is_file()


def choose(paths: Sequence[str], *, resume: bool = False, overrides: Sequence[str] = ()) -> tuple[str, list[str]]:
    """(configuration, overrides that it brings): no path means the default; `--resume RUN` names a run's folder.

    Where the overrides name data, no path means `own_data`: the default's warm start is about its own task. A run that
    is resumed by its folder stays in that folder, wherever it was moved to.
    """
    if len(paths) > 1 + resume:
        extra = paths[1 + resume]
        raise KeelError(f"one configuration at a time, but {extra!r} is another: options are written name=value")
    if not paths:
        return "own_data" if any(map(_names_data, overrides)) else "default", []
    run = Path(paths[-1]).expanduser()
    if not resume:
        return paths[0], []
    if is_run(run):
        return paths[0], [f"run.dir={text.dump(str(run.parent))}", f"run.name={text.dump(run.resolve().name)}"]
    if len(paths) == 2 or run.is_dir():
        raise KeelError(f"nothing to resume at {run}: it has no config.yaml; give the folder of a run")
    return paths[0], []
