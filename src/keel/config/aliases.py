"""Options under the names of other trainers: one table of data that loading and docs/migrate.md both read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from keel.base.errors import KeelError
from keel.config import text
from keel.config.alias import Alias, Options, Settings
from keel.config.aliases_keel import KEEL
from keel.config.aliases_trl import TRL
from keel.config.aliases_verl import VERL

Setting = tuple[str, Any, str]  # dotted name, value, where it was given


@cache
def tables() -> tuple[tuple[str, list[Alias]], ...]:
    """The aliases of each origin."""
    return ("Keel", KEEL), ("TRL", TRL), ("verl", VERL)


@cache
def table() -> dict[str, Alias]:
    """Every alias by name."""
    return {alias.name: alias for _, aliases in tables() for alias in aliases}


def translate(
    layer: Sequence[Setting], settings: Settings, is_option: Callable[[str], bool]
) -> tuple[list[Setting], list[str]]:
    """A layer of settings under Keel's names, and one sentence for each that had another name.

    Two settings of one layer that disagree about an option are refused; a later layer overrides an earlier one.
    """
    result: dict[str, Setting] = {}
    shown: dict[str, tuple[str, str]] = {}
    notes = []
    for raw_name, value, origin in layer:
        name = normal(raw_name)
        alias = table().get(name)
        if alias is not None and is_option(name) and (value is None or isinstance(value, Mapping)):
            alias = None  # a section of Keel's that shares its name with another trainer's option
        options = {name: value} if alias is None else alias.apply(value, settings)
        for target, converted in options.items():
            if target in result and result[target][1] != converted:
                raise disagree(target, shown[target], (name, text.dump(value)))
            result[target] = (target, converted, origin)
            shown[target] = (name, text.dump(value))
        if alias is not None and options != {name: value}:
            notes.append(_sentence(name, value, options, alias))
    return list(result.values()), notes


def normal(name: str) -> str:
    """A flag's name as an option's: leading dashes go, inner ones are underscores."""
    return name.lstrip("-").replace("-", "_")


def disagree(target: str, first: tuple[str, str], second: tuple[str, str]) -> KeelError:
    """The refusal of two settings, each (name, value as shown), that give one option two values."""
    if first[0] == second[0]:
        return KeelError(f"{first[0]} is given twice, as {first[1]} and as {second[1]}: keep one")
    return KeelError(f"{first[0]}={first[1]} and {second[0]}={second[1]} disagree about {target}: keep one")


def _sentence(name: str, value: Any, options: Options, alias: Alias) -> str:
    if not options:
        no_effect = "what was given beside it leaves it without effect, or it is the default"
        return f"{name}={text.dump(value)} changes nothing: {no_effect if alias.target else alias.note}"
    return f"{name} became " + " ".join(f"{key}={text.dump(item)}" for key, item in options.items())
