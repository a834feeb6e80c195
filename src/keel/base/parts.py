"""Parts that an option names (task, reward, engine, logger…): each declares its own parameters by its factory."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from keel.base.errors import KeelError, unknown
from keel.base.options import Options
from keel.base.validation import read_options


def part_arguments(
    kind: str,
    factory: Callable[..., Any],
    params: Mapping[str, Any],
    *,
    section: str | None = None,
    positional: int = 0,
    reserved: Collection[str] = (),
    **offered: Any,
) -> dict[str, Any]:
    """The keyword arguments to call a part's factory with: its own parameters, and what it takes of `offered`.

    A part declares its parameters as keyword parameters, or all of them as one `options` whose type is a class of
    `Options`, with ranges. One that is not declared, or is lacking, is refused in a line. The caller itself gives the
    first `positional` parameters and those that are `reserved`. `section` is where the parameters stand, if not `kind`.
    """
    signature = parameters_of(factory)
    if signature is None and isinstance(factory, type):
        raise KeelError(f"{kind} is Python's own {factory.__name__}: give a function or a class of yours")
    if signature is None:
        return dict(params)
    parameters = list(signature.values())
    placed = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:positional]
    if len(placed) < positional and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        names = ", ".join(p.name for p in parameters)
        raise KeelError(f"{kind} takes ({names}): it must take {positional} before its own parameters")
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p not in placed]
    filled = {p.name: offered[p.name] for p in by_name if p.name in offered}
    remaining = {p.name: p for p in by_name if p.name not in offered and p.name not in reserved}
    declared = options_class(factory)
    if declared is not None and "options" in remaining:
        return {**filled, "options": read_options(declared, params, section or kind)}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for name in params:
            if not remaining:
                raise KeelError(
                    f"{kind} has no parameters: leave {name!r} out, or give the whole entry anew if it is another's"
                )
            if name not in remaining:
                raise unknown(f"{kind} parameter", name, remaining)
    for name, parameter in remaining.items():
        if parameter.default is parameter.empty and name not in params:
            raise KeelError(f"{kind} needs the parameter {name!r}" + (f": give {section}.{name}" if section else ""))
    return {**filled, **params}


def options_class(factory: Callable[..., Any]) -> type[Options] | None:
    """The type of a factory's parameter `options`, where it declares its own parameters by a class of `Options`."""
    parameter = (parameters_of(factory) or {}).get("options")
    declared = None if parameter is None else parameter.annotation
    return declared if isinstance(declared, type) and issubclass(declared, Options) else None


def parameters_of(factory: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """A factory's parameters with their types; None of a built-in callable that does not tell them."""
    for read_types in (True, False):  # types that are there for type checkers only stay text
        try:
            return inspect.signature(factory, eval_str=read_types).parameters
        except Exception:
            continue
    return None
