"""Paths of data in a configuration, made to mean the same wherever they are read."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any


def absolute_paths(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with the paths of data files and folders made absolute, so that a run is understood from anywhere.

    What is not there (a name on a hub) is left as it is.
    """
    found = copy.deepcopy(settings)
    warmstart = found.get("warmstart") or {}
    evaluated = (found.get("eval") or {}).get("tasks") or ()
    tasks = [task for task in (found.get("task"), *evaluated, *(warmstart.get("task") or ())) if isinstance(task, dict)]
    sections = [found.get("data"), warmstart, *tasks, *(task.get("data") for task in tasks)]
    for section in sections:
        for name in ("path", "eval_path"):
            if isinstance(section, dict) and section.get(name):
                section[name] = _absolute(section[name])
    return found


def _absolute(path: Any) -> Any:
    if isinstance(path, list | tuple):
        return [_absolute(one) for one in path]
    place = Path(path).expanduser()
    return str(place.absolute()) if place.exists() else path
