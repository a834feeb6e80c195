"""Parts that an option names (task, reward, engine, logger…). A factory's signature declares the part's parameters."""

from __future__ import annotations

import importlib
import inspect
import json
import math
import re
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from keel.base.errors import KeelError, first_line, unknown
from keel.base.options import Options, one_line, read_options

_IDENTIFIER = r"[^\W\d]\w*"
_IMPORT_PATH = re.compile(rf"{_IDENTIFIER}(\.{_IDENTIFIER})*:{_IDENTIFIER}")


def is_import_path(name: object) -> bool:
    """Whether a name has the form `module:attr`."""
    return isinstance(name, str) and bool(_IMPORT_PATH.fullmatch(name))


def add_working_folder() -> None:
    """Import modules of the working folder too, as with `python -m`."""
    if "" not in sys.path:
        sys.path.insert(0, "")


def import_object(spec: str, part: str, *, callable_only: bool = True) -> Any:
    """Import `module:attr`; the working folder is on the path.

    `part` is the option (`kl.estimator`) or the kind (`task`) that errors name.
    """
    label = f"{part}={spec}" if "." in part else f"{part} {spec!r}"
    if not is_import_path(spec):
        raise KeelError(f"{label} is not module:attr, such as my_module:my_part")
    add_working_folder()
    module, _, attribute = spec.partition(":")
    try:
        loaded = getattr(importlib.import_module(module), attribute)
    except KeelError:
        raise
    except (ImportError, AttributeError) as error:
        raise KeelError(f"cannot import {label}: {first_line(error)}; check the spelling and PYTHONPATH") from error
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        line = traceback.extract_tb(error.__traceback__)[-1]
        cause = f"{type(error).__name__}: {first_line(error)}"
        raise KeelError(f"cannot import {label}: {cause}, in {line.filename}, line {line.lineno}") from error
    if callable_only and not callable(loaded):
        raise KeelError(f"{label} is of type {type(loaded).__name__}: it must be a function or a class")
    return loaded


@dataclass(frozen=True)
class Range:
    """A constraint inside a parameter's type: the check and its description."""

    expected: str
    holds: Callable[[Any], bool]


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
    """The keyword arguments for a part's factory: `params`, and those of `offered` that it takes.

    A part declares keyword parameters, or one parameter `options` whose type is a subclass of `Options`. A parameter
    that is undeclared, missing or of the wrong type raises a KeelError. The caller passes the first `positional`
    parameters and the `reserved` ones itself. `section` is the parameters' section in errors, by default `kind`.
    """
    signature = parameters_of(factory)
    if signature is None and isinstance(factory, type):
        raise KeelError(f"{kind} is the built-in {factory.__name__}: give a function or class of your own")
    if signature is None:
        return dict(params)
    parameters = list(signature.values())
    placed = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:positional]
    if len(placed) < positional and not any(p.kind is p.VAR_POSITIONAL for p in parameters):
        names = ", ".join(p.name for p in parameters)
        raise KeelError(f"{kind} takes ({names}): it must take {positional} positional parameters before its own")
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
                    f"{kind} has no parameters: leave {name!r} out, or replace the whole entry if it is another part's"
                )
            if name not in remaining:
                raise unknown(f"{kind} parameter", name, remaining)
    for name, parameter in remaining.items():
        if parameter.default is parameter.empty and name not in params:
            raise KeelError(f"{kind} needs the parameter {name!r}" + (f": give {section}.{name}" if section else ""))
        if name in params:
            check_value(f"{section or kind}.{name}", params[name], parameter)
    return {**filled, **params}


_OBJECTS = ("needs_python_object", "callable_type")  # types that YAML cannot express


def check_value(option: str, value: Any, parameter: inspect.Parameter) -> None:
    """Refuse a value that does not have its parameter's declared type.

    Numbers are strict: 2.5 is not an int, true is not a number, infinity is allowed only as the default. Types that
    YAML cannot express are left to the part itself.
    """
    declared, default = parameter.annotation, parameter.default
    for item in getattr(declared, "__metadata__", ()):
        if isinstance(item, Range) and not item.holds(value):
            raise KeelError(f"{option} is {value!r}: expected {item.expected}")
    if declared is parameter.empty or isinstance(declared, str) or value is default:
        return
    if isinstance(value, float) and math.isinf(value) and value == default:
        return
    rules = ConfigDict(arbitrary_types_allowed=True, strict=True, allow_inf_nan=False)
    section, _, name = option.rpartition(".")
    try:
        named: Any = dict.__class_getitem__((str, declared))
        adapter: TypeAdapter[Any] = TypeAdapter(named, config=rules)
    except Exception:  # the annotation may be any expression
        return
    try:
        data = json.dumps({name: value})  # in JSON a list is valid for a tuple
    except (TypeError, ValueError):
        data = None
    try:
        _ = adapter.validate_python({name: value}) if data is None else adapter.validate_json(data)
    except ValidationError as error:
        if all(item["type"] not in _OBJECTS for item in error.errors()):
            raise KeelError(one_line(error, KeelError, section)) from None


def make_part(kind: str, factory: Callable[..., Any], /, *given: Any, **arguments: Any) -> Any:
    """Call a part's factory; its TypeError or ValueError becomes one line that names the part, file and line."""
    try:
        return factory(*given, **arguments)
    except KeelError:
        raise
    except (TypeError, ValueError) as error:
        line = traceback.extract_tb(error.__traceback__)[-1]
        cause = f"{type(error).__name__}: {first_line(error)}"
        raise KeelError(
            f"{kind} cannot be built from its parameters: {cause}, in {line.filename}, line {line.lineno}"
        ) from error


def options_class(factory: Callable[..., Any]) -> type[Options] | None:
    """The type of a factory's parameter `options` if it is a subclass of `Options`, else None."""
    parameter = (parameters_of(factory) or {}).get("options")
    declared = None if parameter is None else parameter.annotation
    return declared if isinstance(declared, type) and issubclass(declared, Options) else None


def parameters_of(factory: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """A factory's parameters with their types; None for built-in callables without a signature."""
    for read_types in (True, False):  # types imported under TYPE_CHECKING cannot be evaluated
        try:
            return inspect.signature(factory, eval_str=read_types).parameters
        except Exception:
            continue
    return None


class DelegatedAttribute:
    """A class attribute of a wrapper that reads the attribute of its `inner` object."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, wrapper: Any, owner: type) -> Any:
        return self if wrapper is None else getattr(wrapper.inner, self.name)
