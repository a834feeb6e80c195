"""YAML: numbers as people write them, and a key given twice is an error rather than a silent choice."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from keel.base.errors import KeelError


class Loader(yaml.SafeLoader):
    """YAML 1.1's safe loader, but 1e-6 is a number, and duplicate keys are refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise KeelError(f"line {key_node.start_mark.line + 1}: a key must be a word, not {key!r}")
            line = key_node.start_mark.line + 1
            if key in seen and key != "<<":
                raise KeelError(f"{key!r} is given twice, on lines {seen[key]} and {line}: keep one")
            seen[key] = line
        return super().construct_mapping(node, deep=deep)


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def parse(text: str, source: str) -> Any:
    """The value of a YAML text; `source` names it in errors."""
    try:
        return yaml.load(text, Loader)
    except KeelError as error:
        raise KeelError(f"{source}: {error}") from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        raise KeelError(f"{source} is not YAML{line}: {' '.join(str(problem).split())}") from None


def read(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    path = find(path.expanduser())
    if path.is_dir():
        config = path / "config.yaml"
        if not config.is_file():
            raise KeelError(f"{path} is a folder without a config.yaml: give a YAML file, or the folder of a run")
        path = config
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise KeelError(f"no configuration at {path}: check the path{_neighbours(path)}") from None
    except UnicodeDecodeError:
        raise KeelError(f"{path} is not text, so no YAML: give a configuration file") from None
    except OSError as error:
        raise KeelError(f"cannot read {path}: {error.strerror or error}") from None
    data = parse(text, str(path))
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise KeelError(
            f"{path} holds a {type(data).__name__}: a configuration is a mapping such as 'kl: {{beta: 0.01}}'"
        )
    return data


def find(path: Path) -> Path:
    """The path itself, or the shipped configuration of that name: `default` is configs/default.yaml."""
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
    return f"; there is {', '.join(files[:5])}" if files else ""


def dump(value: Any) -> str:
    """A value in one line of YAML that `parse` reads back as the same value."""
    if isinstance(value, float):
        text = repr(value)
        return {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(text, text)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{dump(key)}: {dump(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(dump(item) for item in value) + "]"
    if isinstance(value, str):
        plain = yaml.safe_dump([value], default_flow_style=True, width=10**9, allow_unicode=True).strip()[1:-1]
        if "\n" not in plain and parse(plain, "") == value:
            return plain
        return yaml.safe_dump(value, default_style='"', width=10**9).strip()
    return yaml.safe_dump(value, default_flow_style=True, width=10**9).removesuffix("...\n").strip()
