"""The command line's words: which is the configuration, which are options, and under whose names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from keel.base.errors import KeelError
from keel.config import aliases, text

_SETTING = re.compile(r"\+{0,2}[A-Za-z_][\w.\-]*=")


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(paths, overrides): `key=value`, `--key=value` and `--key value` are overrides, a lone `--key` means true.

    What follows a flag is its value unless it is another flag or a setting.
    """
    paths, overrides = [], []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            if not equals:
                takes = rest and not rest[0].startswith("--") and not _SETTING.match(rest[0])
                value = rest.pop(0) if takes else "true"
            overrides.append(f"{name}={value}")
        elif _SETTING.match(word):
            overrides.append(word)
        elif word.startswith("-") and len(word) > 1:
            raise KeelError(f"unknown option {word}: write --name value or name=value")
        else:
            paths.append(word)
    return paths, overrides


def of_task(word: str) -> str:
    """A setting where a task is described: a word without a section is a parameter of the task."""
    from keel.config.schema import Config

    key = word.lstrip("+").partition("=")[0]
    return word if key.partition(".")[0] in Config.model_fields else f"task.{word}"


def _names_data(override: str) -> bool:
    name = aliases.normal(override.partition("=")[0])
    alias = aliases.table().get(name)
    return name == "data.path" or (alias is not None and alias.target == "data.path")


def is_run(path: Path) -> bool:
    """Whether this is the folder of a run."""
    return path.is_dir() and (path / "config.yaml").is_file()


def choose(paths: Sequence[str], *, resume: bool = False, overrides: Sequence[str] = ()) -> tuple[str, list[str]]:
    """(configuration, overrides that it brings): no path means the default; `--resume RUN` names a run's folder.

    Where the overrides name data, no path means `own_data`: the default's warm start is about its own task.

    A run that is resumed by its folder keeps to that folder, wherever it was moved to.
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
