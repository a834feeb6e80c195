"""References between options, `${data.max_response_length}`, and arithmetic on whole numbers; nothing is executed."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from keel.config import text

_OPERATIONS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_REFERENCE = re.compile(r"\$\{\s*(?:oc\.select:\s*)?(\.*[A-Za-z_][\w.]*)\s*(?:,\s*([^{}]*))?\}")
_MAX_DEPTH = 8


def arithmetic(node: ast.expr, lookup: Callable[[str], Any]) -> int:
    """The value of + - * // % on whole numbers and names; a `ValueError` for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -arithmetic(node.operand, lookup)
    if isinstance(node, ast.Name):
        try:
            value = lookup(node.id)
        except KeyError:
            raise ValueError(f"{node.id} is not known") from None
        if type(value) is int:
            return value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left, right = arithmetic(node.left, lookup), arithmetic(node.right, lookup)
        if right == 0 and isinstance(node.op, ast.FloorDiv | ast.Mod):
            raise ValueError("division by zero")
        return _OPERATIONS[type(node.op)](left, right)
    raise ValueError("not arithmetic on whole numbers")


def interpolated(name: str, value: Any, values: Mapping[str, Any], depth: int = 0) -> Any:
    """The value of option `name` with `${other.option}` filled in from the same file; unknown ones stay."""
    if isinstance(value, list):
        return [interpolated(name, item, values, depth) for item in value]
    if not isinstance(value, str) or "${" not in value or depth > _MAX_DEPTH:
        return value

    def resolve(match: re.Match[str]) -> Any:
        target = _absolute(name, match[1])
        if target in values:
            return interpolated(target, values[target], values, depth + 1)
        return match[0] if match[2] is None else text.parse(match[2], f"the value of {name}")

    reference = _REFERENCE.fullmatch(value.strip())
    if reference is not None:
        return resolve(reference)
    return _REFERENCE.sub(lambda match: _as_text(resolve(match)), value)


def _absolute(name: str, target: str) -> str:
    """`${.x}` is a sibling of the option, each further dot is one section higher."""
    dots = len(target) - len(target.lstrip("."))
    return ".".join([*name.split(".")[:-dots], target[dots:]]) if dots else target


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else text.dump(value)


def undetermined(value: Any) -> bool:
    """Whether a value still contains a reference that only a shell or hydra could resolve."""
    if isinstance(value, list | tuple):
        return any(undetermined(item) for item in value)
    return isinstance(value, str) and ("$" in value or "`" in value)
