"""Read configuration files by path or shipped name, and make their data paths absolute."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from keel.base.errors import KeelError
from keel.base.yaml_text import dump, parse


def read(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML file or a run folder."""
    path = find(path.expanduser())
    if path.is_dir():
        config = path / "config.yaml"
        if not config.is_file():
            raise KeelError(f"{path} is a folder without a config.yaml: give a YAML file or a run folder")
        path = config
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise KeelError(f"no configuration at {path}: check the path{_neighbours(path)}") from None
    except UnicodeDecodeError:
        raise KeelError(f"{path} is not a UTF-8 text file: give a YAML configuration") from None
    except OSError as error:
        raise KeelError(f"cannot read {path}: {error.strerror or error}") from None
    data = parse(text, str(path))
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise KeelError(
            f"{path} contains a {type(data).__name__}: a configuration is a mapping such as 'kl: {{beta: 0.01}}'"
        )
    return data


def find(path: Path) -> Path:
    """The path itself, or the shipped configuration with this name: `default` is configs/default.yaml."""
    if path.exists() or path.suffix or len(path.parts) != 1:
        return path
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "configs", package.parents[1] / "configs"):  # installed, or in a clone
        shipped = folder / f"{path.name}.yaml"
        if shipped.is_file():
            return shipped
    return path


def _neighbours(path: Path) -> str:
    parent = path.parent
    try:
        files = sorted(str(p) for p in parent.glob("*.y*ml")) if parent.is_dir() else []
    except OSError:
        files = []
    return f"; found {', '.join(files[:5])}" if files else ""


def absolute_paths(settings: dict[str, Any]) -> dict[str, Any]:
    """Make the paths of data files absolute, so that a run can be resumed from any folder.

    Paths that do not exist (names on a hub) are left unchanged.
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


__all__ = ["absolute_paths", "dump", "find", "parse", "read"]
