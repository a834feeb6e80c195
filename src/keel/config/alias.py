"""An option of another trainer by its name there, and helpers to write tables of them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from keel.base.errors import KeelError
from keel.config import text

Settings = Mapping[str, Any]  # all that the user gave, by name
Options = Mapping[str, Any]  # options of Keel, by dotted name
Convert = Callable[[Any, Settings], Options]
# Names of other trainers for the completions of a problem, in the same unit.
GROUP = (
    *("group_size", "k_samples", "rloo_k", "n_rollouts", "num_return_sequences", "num_samples_per_prompt_rollout"),
    *("num_generations_per_prompt", "responses_per_prompt", "rollouts_per_example", "num_completions"),
)


@dataclass(frozen=True)
class Alias:
    """One name: what it becomes, how its value is converted, and what differs.

    `target` is the option as the documentation shows it, empty where there is no counterpart. `convert` maps (value,
    all settings) to options; without it the value is taken as it is. An empty result changes nothing, for the reason in
    `unneeded` where there is one.
    """

    name: str
    target: str
    note: str = ""
    convert: Convert | None = None
    unneeded: str = ""

    def apply(self, value: Any, settings: Settings) -> Options:
        """The options that this name and value stand for."""
        if self.convert is not None:
            try:
                return self.convert(value, settings)
            except KeelError:
                raise
            except (TypeError, ValueError, ArithmeticError, AttributeError):
                raise KeelError(f"{self.name} is {text.dump(value)}: that makes no {self.target or 'sense'}") from None
        if not self.target:
            raise KeelError(f"{self.name} has no counterpart: {self.note}")
        return {self.target: value}


def first_set(settings: Settings, *candidates: str, default: Any = None) -> Any:
    """The first of these names that is set and not null."""
    for name in candidates:
        if settings.get(name) is not None:
            return settings[name]
    return default


def no_counterpart(reason: str, *names: str) -> list[Alias]:
    """Names that are refused, with the reason."""
    return [Alias(name, "", reason) for name in names]


def refer(target: str, advice: str, *names: str) -> list[Alias]:
    """Names whose meaning is not Keel's: each is refused with what to write, where {value} is the user's own."""

    def refusal(name: str) -> Convert:
        def convert(value: Any, settings: Settings) -> Options:
            shown = text.dump(value)
            raise KeelError(f"{name}={shown} has no counterpart: {advice.format(value=shown)}")

        return convert

    return [Alias(name, target, f"refused: {advice.format(value='…')}", refusal(name)) for name in names]


def harmless(name: str, note: str, *values: Any) -> Alias:
    """A name that needs no option, since Keel does so anyway for these values; others are refused. None: all fit."""

    def convert(value: Any, settings: Settings) -> Options:
        if values and (isinstance(value, bool), value) not in [(isinstance(fit, bool), fit) for fit in values]:
            raise KeelError(f"{name}={text.dump(value)} has no counterpart: {note}")
        return {}

    return Alias(name, "", note, convert)


def choice(name: str, target: str, options: Mapping[Any, Mapping[str, Any]], note: str = "") -> Alias:
    """A name whose values translate one by one; a value that is not listed is refused with those that are."""

    def convert(value: Any, settings: Settings) -> Options:
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
    return lambda value, settings: {} if value is None else {target: value}


def boolean(name: str, value: Any) -> bool:
    """The value, which has to be true or false: a text such as "False" would otherwise count as true."""
    if not isinstance(value, bool):
        raise KeelError(f"{name} is {text.dump(value)}: expected true or false")
    return value


def number(name: str, value: Any, reason: str) -> float:
    """The value, which has to be a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise KeelError(f"{name} is {value!r}: {reason}")
    return value


def whole(name: str, value: Any) -> int:
    """The value, which has to be a whole number from 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 1 or value != int(value):
        raise KeelError(f"{name} is {text.dump(value)}: give a whole number, at least 1")
    return int(value)


def group_size(settings: Settings, default: int = 8) -> int:
    """Completions a problem, under whichever name they are given; Keel's own default otherwise."""
    own = ("rollout.num_generations", "num_generations", "n_samples_per_prompt", "actor_rollout_ref.rollout.n")
    for name in (*own, *GROUP):
        if settings.get(name) is not None:
            return whole(name, settings[name])
    return default
