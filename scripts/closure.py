"""The import closure of a module: files and lines of the package that it loads.

python scripts/closure.py [MODULE] [--files]     # keel.trainer.step by default; --files lists them, longest first

Two figures, for `.py` files: by imports at the top of files, and with those inside functions. An import of `a.b.c` also
counts `a` and `a.b`. Imports under TYPE_CHECKING do not count. A package with lazy names (base/__init__.py) lists there
where each name comes from: `from a import Name` counts the module of that one name.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from circles import modules


def imports(node: ast.AST, *, inside: bool) -> Iterator[tuple[str, str]]:
    """The `(module, name)` pairs that a file imports; those inside functions only if asked for."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, "") for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from ((child.module or "", alias.name) for alias in child.names)
        elif isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        elif inside or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imports(child, inside=inside)


def closure(start: str, files: dict[str, Path], *, inside: bool) -> set[str]:
    """Every module of `files` that importing `start` loads."""
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in files.items()}
    lazy = {  # of what a package imports under TYPE_CHECKING: where each name comes from
        name: {n: m for part in tree.body if isinstance(part, ast.If) for m, n in imports(part, inside=False)}
        for name, tree in trees.items()
    }
    loaded, waiting = set[str](), [(start, "")]
    while waiting:
        module, name = waiting.pop()
        parts = [*lazy.get(module, {}).get(name, module).split("."), name]
        for package in {".".join(parts[:end]) for end in range(1, len(parts) + 1)} & files.keys() - loaded:
            loaded.add(package)
            waiting.extend(imports(trees[package], inside=inside))
    return loaded


def main(start: str = "keel.trainer.step", *options: str) -> None:
    files = modules(Path("src/keel"))
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in files.items()}
    for inside, how in ((False, "imports at the top of files"), (True, "with imports inside functions")):
        found = sorted(closure(start, files, inside=inside), key=lambda name: -lines[name])
        print(f"{start}, {how}: {len(found)} files, {sum(lines[name] for name in found)} lines")
    print(*(f"{lines[name]:6} {name}" for name in found if options), sep="\n")


main(*sys.argv[1:])
