"""Circles of imports between files: none is allowed.

python scripts/circles.py [PACKAGE FOLDER]     # src/keel by default; exit status 1 if there is a circle

Counted are imports inside functions and under TYPE_CHECKING too, and the packages that an import loads on its way: who
imports `keel.rollout.request` also runs `keel/rollout/__init__.py`, unless he stands in `keel.rollout` himself.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path


def modules(package: Path) -> dict[str, Path]:
    """Every module of a package by its dotted name."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(name: str, path: Path) -> Iterator[str]:
    """The dotted names that a file imports, wherever in it; of `from a import b` both a and a.b."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            room = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
            base = (
                ".".join([*room[: len(room) - node.level + 1], *filter(None, [node.module])])
                if node.level
                else node.module
            )
            for alias in node.names:
                yield f"{base}.{alias.name}"


def graph(package: Path) -> dict[str, set[str]]:
    """Which files of the package each of them loads."""
    files = modules(package)
    found: dict[str, set[str]] = {name: set() for name in files}
    for name, path in files.items():
        for target in imported(name, path):
            target = target if target in files else target.rpartition(".")[0]
            parts = target.split(".")
            packages = {".".join(parts[:end]) for end in range(1, len(parts))}
            loaded = {target, *(room for room in packages if not f"{name}.".startswith(f"{room}."))}
            found[name] |= loaded & set(files) - {name}
    return found


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """The sets of files that all reach each other, largest first (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    waiting: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        waiting.append(name)
        for target in sorted(edges[name]):
            if target not in order:
                visit(target)
            if target in waiting:
                low[name] = min(low[name], low[target])
        if low[name] == order[name]:
            start = waiting.index(name)
            if len(waiting) - start > 1:
                found.append(sorted(waiting[start:]))
            del waiting[start:]

    for name in sorted(edges):
        if name not in order:
            visit(name)
    return sorted(found, key=len, reverse=True)


def main(package: Path) -> int:
    found = circles(graph(package))
    for circle in found:
        print(f"{len(circle)} files import each other: {', '.join(circle)}")
    print(f"{len(found)} circles of imports")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "src/keel")))
