"""A user's own estimator, `module:attr`: a function of d, of (logp, ref_logp) or of (logp, ref_logp, old_logp).

Parameters follow the name: `module:attr(width=0.5)`. They are part of the name because the audit verifies the function
with these values only.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from keel.base.errors import KeelError
from keel.base.imports import import_object, is_import_path
from keel.base.parts import part_arguments

_SPEC = re.compile(r"(?P<path>[^()]+)(?:\((?P<params>.*)\))?", re.DOTALL)


def is_custom(name: str) -> bool:
    """Whether an estimator is a user's own: `module:attr` with or without parameters."""
    match = _SPEC.fullmatch(name)
    return match is not None and is_import_path(match["path"])


def custom_estimator(name: str) -> Callable[..., object]:
    """The user's function, bound to the parameters in its name."""
    match = _SPEC.fullmatch(name)
    path, text = (name, None) if match is None else (match["path"], match["params"])
    function: Callable[..., object] = import_object(path, "kl.estimator")
    params = {} if text is None else _parameters(name, text)
    if not params:
        return function
    tensors = 1 if takes_ratio(partial(function, **params)) else arity(function)
    return partial(function, **part_arguments(f"kl.estimator {path}", function, params, positional=tensors))


def _parameters(name: str, text: str) -> dict[str, Any]:
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError(text)
        return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError):
        raise KeelError(f"kl.estimator={name}: write parameters as module:attr(name=value, …)") from None


def takes_ratio(function: Callable[..., object]) -> bool:
    """Whether the function takes one tensor, the log-ratio d."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in callables have no signature
        return False
    positional = [
        p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ]
    return len(positional) == 1


def arity(function: Callable[..., object]) -> int:
    """2 for (logp, ref), 3 for (logp, ref, old).

    A third parameter counts as `old` if it has no default or its name starts with `old`. `clamp=10.0` does not count.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # a built-in without a signature: assume three parameters
        return 3
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 3:
        return 3 if any(p.kind is p.VAR_POSITIONAL for p in parameters) else 2
    third = positional[2]
    return 3 if third.default is third.empty or third.name.startswith("old") else 2
