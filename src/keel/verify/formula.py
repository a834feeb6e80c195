"""Parse and interpret a user's formula with a whitelist. It is never evaluated as Python code."""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from keel.base.errors import KeelError, unknown
from keel.base.parts import import_object
from keel.kl.estimators import arity, call_checked
from keel.verify.oracle import Formula

NAMES = ("logp", "ref", "old")
MAX_EXPONENT = 16
MAX_LENGTH, MAX_NODES = 2_000, 400

FUNCTIONS: dict[str, tuple[int, Callable[..., Tensor]]] = {
    "exp": (1, torch.exp),
    "expm1": (1, torch.expm1),
    "log": (1, torch.log),
    "log1p": (1, torch.log1p),
    "abs": (1, torch.abs),
    "sigmoid": (1, torch.sigmoid),
    "softplus": (1, torch.nn.functional.softplus),
    "detach": (1, torch.detach),
    "minimum": (2, torch.minimum),
    "maximum": (2, torch.maximum),
    "clamp": (3, torch.clamp),
}
OPERATORS: dict[type[ast.operator], Callable[[Tensor, Tensor], Tensor]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
SIGNS: dict[type[ast.unaryop], Callable[[Tensor], Tensor]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}


def parse_formula(text: str) -> Formula:
    """Parse text such as `exp(ref - logp) - 1` into a function of (logp, ref, old)."""
    if len(text) > MAX_LENGTH:
        raise KeelError(f"the formula has {len(text)} characters: shorten it to {MAX_LENGTH}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", SyntaxWarning)
            tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise KeelError(
            f"the formula {text!r} cannot be parsed ({reason}): write it as in 'exp(ref - logp) - 1'"
        ) from None
    if sum(1 for _ in ast.walk(tree)) > MAX_NODES:
        raise KeelError(f"the formula has more than {MAX_NODES} parts: simplify it")
    try:
        _check(tree)
    except RecursionError:
        raise KeelError("the formula is nested too deeply: simplify it") from None

    def formula(logp: Tensor, ref: Tensor, old: Tensor) -> Tensor:
        return _walk(tree, {"logp": logp, "ref": ref, "old": old}).expand(logp.shape)

    return formula


def _check(node: ast.expr) -> None:
    """Refuse every node that is not on the whitelist."""
    if isinstance(node, ast.Constant):
        _check_number(node)
    elif isinstance(node, ast.Name):
        if node.id not in NAMES:
            if node.id in FUNCTIONS:
                raise KeelError(f"the function {node.id!r} has no arguments: write {node.id}(...)")
            raise unknown("name in the formula", node.id, NAMES)
    elif isinstance(node, ast.UnaryOp) and type(node.op) in SIGNS:
        _check(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        _check(node.left)
        if isinstance(node.op, ast.Pow):
            _check_exponent(node.right)
        _check(node.right)
    elif isinstance(node, ast.Call):
        _check_call(node)
    else:
        raise KeelError(
            f"{ast.unparse(node)[:60]!r} is not allowed in a formula: use + - * / **, numbers, "
            f"{', '.join(NAMES)} and {', '.join(FUNCTIONS)}"
        )


def _check_number(node: ast.Constant) -> None:
    if isinstance(node.value, bool) or not isinstance(node.value, int | float):
        raise KeelError(f"{node.value!r} is not allowed in a formula: only numbers are")
    if not abs(node.value) <= 1e30:  # also refuses infinity, and integers too large for a float
        raise KeelError(f"the number {str(node.value)[:20]} in the formula is too large: at most 1e30")


def _check_exponent(node: ast.expr) -> None:
    sign = -1 if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) else 1
    number = node.operand if isinstance(node, ast.UnaryOp) else node
    if not isinstance(number, ast.Constant) or isinstance(number.value, bool | str | bytes | complex):
        raise KeelError(f"the exponent {ast.unparse(node)[:60]!r} must be a number: write other powers with exp(...)")
    _check_number(number)
    if abs(sign * number.value) > MAX_EXPONENT:  # type: ignore[operator]
        raise KeelError(f"the exponent {ast.unparse(node)[:20]} is too large: at most {MAX_EXPONENT}")


def _check_call(node: ast.Call) -> None:
    if not isinstance(node.func, ast.Name):
        raise KeelError(f"{ast.unparse(node.func)[:60]!r} may not be called in a formula: only {', '.join(FUNCTIONS)}")
    if node.func.id not in FUNCTIONS:
        raise unknown("function in the formula", node.func.id, FUNCTIONS)
    count, _ = FUNCTIONS[node.func.id]
    if node.keywords or len(node.args) != count:
        expected = "clamp(x, low, high)" if node.func.id == "clamp" else f"{count} argument{'s' if count > 1 else ''}"
        raise KeelError(f"{node.func.id} takes {expected}, got {ast.unparse(node)[:60]!r}")
    for argument in node.args:
        _check(argument)


def _walk(node: ast.expr, values: dict[str, Tensor]) -> Tensor:
    """Evaluate a checked tree. Numbers are converted to tensors, because Python integers can grow without bound."""
    if isinstance(node, ast.Constant):
        return torch.as_tensor(float(node.value), dtype=values["logp"].dtype)  # type: ignore[arg-type]
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.UnaryOp):
        return SIGNS[type(node.op)](_walk(node.operand, values))
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](_walk(node.left, values), _walk(node.right, values))
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Name)
    return FUNCTIONS[node.func.id][1](*(_walk(argument, values) for argument in node.args))


@dataclass(frozen=True)
class UserCallable:
    """A user's own function, and the dtype that it returns for float64 inputs."""

    formula: Formula
    dtype: torch.dtype


def load_callable(name: str) -> UserCallable:
    """A user's `module:function` of (logp, ref) or (logp, ref, old), with its results checked."""
    return checked_callable(name, import_object(name, "callable"))


def checked_callable(name: str, function: Callable[..., object]) -> UserCallable:
    """Wrap a function of (logp, ref) or (logp, ref, old) with checks, and call it once."""
    arguments = arity(function)
    dtypes: list[torch.dtype] = []

    def formula(logp: Tensor, ref: Tensor, old: Tensor) -> Tensor:
        result = call_checked(name, function, *(logp, ref, old)[:arguments])
        dtypes.append(result.dtype)
        return result.to(logp.dtype)

    example = torch.full((1, 1), -1.0, dtype=torch.float64)
    formula(example, example, example)
    return UserCallable(formula, dtypes[0])
