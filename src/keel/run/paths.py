"""Paths of data in a configuration, made to mean the same wherever they are read."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any


def absolute_paths(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with the paths of data files and folders made absolute, so that a run is understood from anywhere.

    What is not there (a name on a hub) is left as it is.
    """
    resolved = copy.deepcopy(settings)
    warmstart = resolved.get("warmstart") or {}
    evaluated = (resolved.get("eval") or {}).get("tasks") or ()
    tasks = [
        task for task in (resolved.get("task"), *evaluated, *(warmstart.get("task") or ())) if isinstance(task, dict)
    ]
    sections = [resolved.get("data"), warmstart, *tasks, *(task.get("data") for task in tasks)]
    for section in sections:
        for name in ("path", "eval_path"):
            if isinstance(section, dict) and section.get(name):
                section[name] = _absolute(section[name])
    return resolved


def _absolute(path: Any) -> Any:
    if isinstance(path, list | tuple):
        return [_absolute(item) for item in path]
    expanded = Path(path).expanduser()
    return str(expanded.absolute()) if expanded.exists() else path
