"""YAML loader and writer: 1e-6 is a number, and a duplicate key is an error."""

from __future__ import annotations

import re
from collections.abc import Hashable
from importlib.resources import files
from typing import Any

import yaml

from keel.base.errors import KeelError


class Loader(yaml.SafeLoader):
    """The safe YAML 1.1 loader, with 1e-6 as a number and duplicate keys refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise KeelError(
                    f"line {key_node.start_mark.line + 1}: a key must be a single word or number, not {key!r}"
                )
            line = key_node.start_mark.line + 1
            if key in seen and key != "<<":
                raise KeelError(f"{key!r} is given twice, on lines {seen[key]} and {line}: keep one")
            seen[key] = line
        return super().construct_mapping(node, deep=deep)


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def parse(text: str, where: str) -> Any:
    """Parse a YAML text; `where` names the source in errors."""
    try:
        return yaml.load(text, Loader)
    except KeelError as error:
        raise KeelError(f"{where}: {error}") from None
    except RecursionError:
        raise KeelError(f"{where} cannot be read as YAML: lists or mappings are nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        raise KeelError(f"{where} is not YAML{line}: {' '.join(str(problem).split())}") from None


def load_package_yaml(package: str, name: str) -> Any:
    """Load a package's YAML file, with libyaml if PyYAML has it. Trusted files only: deep nesting crashes libyaml."""
    return yaml.load(files(package).joinpath(name).read_text("utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def dump(value: Any) -> str:
    """A value as one line of YAML; `parse` gives the same value back."""
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
