"""Tools: Python functions with type hints and a docstring that the model may call."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Union, get_args, get_origin, get_type_hints

from keel.base.errors import KeelError
from keel.envs.calls import is_async

TIMEOUT_S = 10.0
MAX_CHARACTERS = 4000
ASYNC_AT_ONCE = 16
_NAMES = {str: "string", int: "integer", float: "number", bool: "boolean"}
_NAME = re.compile(r"[A-Za-z_][\w-]*")


class Session(Protocol):
    """A tool function with state for one episode."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Tool:
    """A function that the model may call, with its description and limits.

    `hints` are the parameter types by name, `required` the parameters without a default. A call fails after
    `timeout_s`; a result longer than `max_characters` is truncated. `tag` is the name in the format `tags`. A tool that
    `ends` terminates the episode. `at_once` is the number of concurrent calls of different episodes. `parameters` is
    the JSON schema if it is given, else it is built from `hints`. `session` creates the function for each episode; its
    `close` is called at the end of the episode.
    """

    name: str
    description: str
    function: Callable[..., Any]
    hints: Mapping[str, Any]
    required: tuple[str, ...]
    about: Mapping[str, str]
    timeout_s: float | None = TIMEOUT_S
    max_characters: int = MAX_CHARACTERS
    tag: str = ""
    ends: bool = False
    at_once: int = 1
    parameters: Mapping[str, Any] | None = None
    session: Callable[[], Session] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, so that a decorated function stays callable."""
        return self.function(*args, **kwargs)

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema for chat templates."""
        properties = {
            name: {**json_type(hint), **({"description": self.about[name]} if name in self.about else {})}
            for name, hint in self.hints.items()
        }
        built = {"type": "object", "properties": properties, "required": list(self.required)}
        parameters = built if self.parameters is None else dict(self.parameters)
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def arguments(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Convert the arguments of a call to the types of the signature; raises ValueError."""
        for name in values:
            if name not in self.hints:
                raise ValueError(f"unknown parameter {name!r}; the parameters are {', '.join(self.hints) or 'none'}")
        missing = [name for name in self.required if name not in values]
        if missing:
            raise ValueError(f"the parameter {missing[0]!r} is missing")
        coerced = {}
        for name, value in values.items():
            try:
                coerced[name] = coerce(value, self.hints[name])
            except (TypeError, ValueError, OverflowError):
                raise ValueError(f"{name!r} must be {_type_name(self.hints[name])}, not {_short(value)}") from None
        return coerced


def tool(
    function: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    timeout_s: float | None = TIMEOUT_S,
    max_characters: int = MAX_CHARACTERS,
    tag: str | None = None,
    ends: bool = False,
    at_once: int | None = None,
) -> Any:
    """Make a tool of a function: `tool(search)`, `@tool` or `@tool(timeout_s=2)`.

    The first paragraph of the docstring is the description for the model; `Args:` entries or `:param name:` lines
    describe the parameters. Types are str, int, float, bool, list, dict, Literal and their unions. `at_once` is the
    number of concurrent calls (default: 1, or 16 for a coroutine function).
    """
    if function is None:
        options: dict[str, Any] = {"timeout_s": timeout_s, "max_characters": max_characters, "tag": tag, "ends": ends}
        return lambda f: tool(f, name=name, at_once=at_once, **options)
    if isinstance(function, Tool):
        return function
    tool_name = str(name or getattr(function, "__name__", type(function).__name__))
    if not _NAME.fullmatch(tool_name):
        raise KeelError(f"{tool_name!r} is not a valid tool name: pass tool(…, name=…) with letters, digits and _")
    if timeout_s is not None and not timeout_s > 0:
        raise KeelError(f"tool {tool_name!r}: timeout_s is {timeout_s}, it must be above 0, or None for no limit")
    if not max_characters > 0:
        raise KeelError(f"tool {tool_name!r}: max_characters is {max_characters}, it must be above 0")
    concurrent = at_once if at_once is not None else ASYNC_AT_ONCE if is_async(function) else 1
    if not concurrent > 0:
        raise KeelError(f"tool {tool_name!r}: at_once is {at_once}, it must be above 0")
    doc = inspect.getdoc(function) or ""
    description = " ".join(doc.partition("\n\n")[0].split()) if doc else ""
    if not description:
        raise KeelError(f"tool {tool_name!r} has no docstring: describe the tool for the model in its first sentence")
    hints, required = _parameters(tool_name, function)
    about = _described(doc, hints)
    limits: dict[str, Any] = {"timeout_s": timeout_s, "max_characters": max_characters, "at_once": concurrent}
    return Tool(tool_name, description, function, hints, required, about, tag=tag or tool_name, ends=ends, **limits)


def check_distinct(names: Sequence[str]) -> None:
    """Refuse two tools with the same name."""
    twice = next((name for name in names if list(names).count(name) > 1), None)
    if twice is not None:
        raise KeelError(f"two tools have the name {twice!r}: rename one with tool(…, name=…), or exclude it with only")


def json_type(hint: Any) -> dict[str, Any]:
    """The JSON schema of a type; raises TypeError if there is none."""
    if hint is Any:
        return {}
    if hint in _NAMES:
        return {"type": _NAMES[hint]}
    if hint in (None, type(None)):
        return {"type": "null"}
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        kinds = {type(value) for value in args}
        same = {"type": _NAMES[kinds.pop()]} if len(kinds) == 1 and kinds <= set(_NAMES) else {}
        return {**same, "enum": list(args)}
    if origin in (Union, types.UnionType):
        some = [json_type(arg) for arg in args if arg is not type(None)]
        nullable = {"nullable": True} if type(None) in args else {}
        return {**some[0], **nullable} if len(some) == 1 else {"anyOf": some, **nullable}
    base = origin or hint
    if base in (list, tuple, set, Sequence):
        inner = [arg for arg in args if arg is not Ellipsis]
        return {"type": "array", **({"items": json_type(inner[0])} if inner else {})}
    if base in (dict, Mapping):
        return {"type": "object", **({"additionalProperties": json_type(args[1])} if args else {})}
    raise TypeError(f"{hint} has no JSON form")


def coerce(value: Any, hint: Any) -> Any:
    """Convert a value to the type of a hint without loss (`"3"` → 3, 3 → `"3"`), or raise an error."""
    if hint is Any:
        return value
    origin, args = get_origin(hint), get_args(hint)
    if hint in (None, type(None)):
        return _expect(value is None, value)
    if origin is Literal:
        same = [choice for choice in args if choice == value and type(choice) is type(value)]
        return same[0] if same else next(choice for choice in _choices(args, value) if str(choice) == str(value))
    if origin in (Union, types.UnionType):
        return _coerce_union(value, args)
    base = origin or hint
    if base in _NAMES:
        return _coerce_plain(value, base)
    if base in (dict, Mapping):
        _expect(isinstance(value, Mapping), value)
        return {key: coerce(item, args[1]) if args else item for key, item in value.items()}
    _expect(isinstance(value, list | tuple), value)
    inner = [arg for arg in args if arg is not Ellipsis]
    items = [coerce(item, inner[0]) if inner else item for item in value]
    return items if base in (list, Sequence) else base(items)


def _coerce_union(value: Any, args: Sequence[Any]) -> Any:
    """Convert to the union member of the value's type, else to the first member that accepts the value."""
    for arg in args:
        if type(value) is (get_origin(arg) or arg) or (arg is type(None) and value is None):
            return coerce(value, arg)
    for arg in args:
        try:
            return coerce(value, arg)
        except (TypeError, ValueError, OverflowError):
            continue
    raise TypeError


def _coerce_plain(value: Any, base: type) -> Any:
    _expect(isinstance(value, str | int | float), value)
    if base is str:
        return value if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
    if base is bool:
        _expect(isinstance(value, bool) or str(value).strip().lower() in ("true", "false"), value)
        return str(value).strip().lower() == "true"
    _expect(not isinstance(value, bool), value)
    number = float(value)
    if base is float:
        return number
    _expect(number.is_integer(), value)
    return int(value) if not isinstance(value, float) else int(number)


def _choices(args: Sequence[Any], value: Any) -> Sequence[Any]:
    """The choices of a Literal, if one of them equals the value as text."""
    _expect(isinstance(value, str | int | float) and any(str(choice) == str(value) for choice in args), value)
    return args


def _expect(fine: bool, value: Any) -> Any:
    if not fine:
        raise TypeError
    return value


def _parameters(tool_name: str, function: Callable[..., Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The types by parameter, and the required parameters."""
    try:
        types_by_name = get_type_hints(function if inspect.isroutine(function) else type(function).__call__)
        signature = inspect.signature(function)
    except (TypeError, ValueError, NameError) as error:
        raise KeelError(f"tool {tool_name!r}: its signature cannot be read ({error})") from error
    hints: dict[str, Any] = {}
    for parameter in signature.parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise KeelError(f"tool {tool_name!r}: *args, **kwargs and positional-only parameters are not supported")
        if parameter.name not in types_by_name:
            raise KeelError(f"tool {tool_name!r}: the parameter {parameter.name!r} needs a type hint, such as str")
        hint = types_by_name[parameter.name]
        try:
            json_type(hint)
        except TypeError:
            raise KeelError(
                f"tool {tool_name!r}: {parameter.name!r} is a {_type_name(hint)}, which JSON cannot represent: use "
                "str, int, float, bool, list, dict or Literal"
            ) from None
        hints[parameter.name] = hint
    required = [p.name for p in signature.parameters.values() if p.default is p.empty]
    return hints, tuple(required)


def _described(doc: str, names: Mapping[str, Any]) -> dict[str, str]:
    """The parameter descriptions in a docstring, in Google style (`Args:`) or Sphinx style (`:param name:`)."""
    descriptions: dict[str, str] = {}
    last: str | None = None
    for line in doc.splitlines():
        match = re.match(r"\s*(?:\:param\s+(?:\w+\s+)?)?(\w+)\s*(?:\([^)]*\))?\s*:\s*(\S.*)$", line)
        if match and match[1] in names:
            last = match[1]
            descriptions[last] = match[2].strip()
        elif last is not None and re.match(r"\s{6,}\S", line):
            descriptions[last] += " " + line.strip()
        else:
            last = None
    return descriptions


def _type_name(hint: Any) -> str:
    return getattr(hint, "__name__", str(hint)) if get_origin(hint) is None else str(hint).replace("typing.", "")


def _short(value: Any, most: int = 40) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}…"
