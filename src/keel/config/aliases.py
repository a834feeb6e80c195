"""Options under the names of other trainers: one table of data that loading and docs/migrate.md both read."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from keel.base.errors import KeelError
from keel.config import text

Convert = Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]
Setting = tuple[str, Any, str]  # dotted name, value, where it was given


@dataclass(frozen=True)
class Alias:
    """One name: what it becomes, how its value is converted, and what differs.

    `target` is the option as the documentation shows it, empty where there is no counterpart. `convert` maps (value,
    all that was given) to options; without it the value is taken as it is. An empty result changes nothing.
    """

    name: str
    target: str
    note: str = ""
    convert: Convert | None = None

    def apply(self, value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The options that this name and value stand for."""
        if self.convert is not None:
            try:
                return self.convert(value, given)
            except KeelError:
                raise
            except (TypeError, ValueError, ArithmeticError, AttributeError):
                raise KeelError(f"{self.name} is {text.dump(value)}: that makes no {self.target or 'sense'}") from None
        if not self.target:
            raise KeelError(f"{self.name} has no counterpart: {self.note}")
        return {self.target: value}


@cache
def tables() -> tuple[tuple[str, list[Alias]], ...]:
    """The aliases of each origin."""
    from keel.config.aliases_keel import KEEL
    from keel.config.aliases_trl import TRL
    from keel.config.aliases_verl import VERL

    return ("Keel", KEEL), ("TRL", TRL), ("verl", VERL)


@cache
def table() -> dict[str, Alias]:
    """Every alias by name."""
    return {alias.name: alias for _, aliases in tables() for alias in aliases}


def translate(
    layer: Sequence[Setting], given: Mapping[str, Any], is_option: Callable[[str], bool]
) -> tuple[list[Setting], list[str]]:
    """A layer of settings under Keel's names, and one sentence for each that came under another.

    Two settings of one layer that disagree about an option are refused; a later layer overrides an earlier one.
    """
    result: dict[str, Setting] = {}
    shown: dict[str, tuple[str, str]] = {}
    notes = []
    for raw_name, value, origin in layer:
        name = normal(raw_name)
        alias = table().get(name)
        if alias is not None and is_option(name) and (value is None or isinstance(value, Mapping)):
            alias = None  # a section that shares its name with somebody's option
        became = {name: value} if alias is None else alias.apply(value, given)
        for target, setting in became.items():
            if target in result and result[target][1] != setting:
                raise disagree(target, shown[target], (name, text.dump(value)))
            result[target] = (target, setting, origin)
            shown[target] = (name, text.dump(value))
        if alias is not None and became != {name: value}:
            notes.append(_sentence(name, value, became, alias))
    return list(result.values()), notes


def normal(name: str) -> str:
    """A flag's name as an option's: leading dashes go, inner ones are underscores."""
    return name.lstrip("-").replace("-", "_")


def disagree(target: str, first: tuple[str, str], second: tuple[str, str]) -> KeelError:
    """The refusal of two settings, each (name, value as shown), that give one option two values."""
    if first[0] == second[0]:
        return KeelError(f"{first[0]} is given twice, as {first[1]} and as {second[1]}: keep one")
    return KeelError(f"{first[0]}={first[1]} and {second[0]}={second[1]} disagree about {target}: keep one")


def _sentence(name: str, value: Any, became: Mapping[str, Any], alias: Alias) -> str:
    if not became:
        why = (
            alias.note
            if not alias.target
            else "what was given beside it leaves it without effect, or it is the default"
        )
        return f"{name}={text.dump(value)} changes nothing: {why}"
    return f"{name} became " + " ".join(f"{key}={text.dump(item)}" for key, item in became.items())


# ------------------------------------------------------------------------------------- pieces of the table


def first_given(given: Mapping[str, Any], *candidates: str, default: Any = None) -> Any:
    """The first of these settings that the user gave."""
    for name in candidates:
        if given.get(name) is not None:
            return given[name]
    return default


def no(reason: str, *aliases: str) -> list[Alias]:
    """Names without a counterpart, with the reason."""
    return [Alias(name, "", reason) for name in aliases]


def harmless(name: str, note: str, *values: Any) -> Alias:
    """A name whose given values describe what Keel does anyway; any other value is refused. No values: all are."""

    def convert(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
        if values and not any(value == fine and isinstance(value, bool) == isinstance(fine, bool) for fine in values):
            raise KeelError(f"{name}={text.dump(value)} has no counterpart: {note}")
        return {}

    return Alias(name, "", note, convert)


def choice(name: str, target: str, options: Mapping[Any, Mapping[str, Any]], note: str = "") -> Alias:
    """A name whose values translate one by one; a value that is not listed is refused with those that are."""

    def convert(value: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:
        key = value if isinstance(value, bool) or value is None else str(value)
        if key not in options:
            known = [str(option) for option in options]
            near = difflib.get_close_matches(str(value), known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise KeelError(f"{name}={text.dump(value)} has no counterpart: {hint}known: {', '.join(known)}")
        return options[key]

    return Alias(name, target, note, convert)


def unless_null(target: str) -> Convert:
    """The value as it is; null leaves Keel's own."""
    return lambda value, given: {} if value is None else {target: value}


def switch(name: str, value: Any) -> bool:
    """The value, which has to be true or false: a word such as "False" would otherwise count as on."""
    if not isinstance(value, bool):
        raise KeelError(f"{name} is {text.dump(value)}: expected true or false")
    return value


def number(name: str, value: Any, reason: str) -> float:
    """The value, which has to be a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise KeelError(f"{name} is {value!r}: {reason}")
    return value
