"""Operators: each breaks one property of a healthy subject, as mutation testing does for code.

A subject is a configuration (a nested dict, for the preflight) or a log (`faults.logs.Log`, for `keel doctor LOG`).
Whether an operator is held back is decided by the hash of its name: whoever writes probes looks at the other half. A
test pins all names by a digest, so that no operator changes sides by being called otherwise. Of the first 203 that were
held back 96, by the hash's next bit, were opened once the doctor had been measured on all, of the next 163 in the same
way 82, and of 197 a quarter, 43: opened.txt names them, and 14 more whose code was seen by mistake. The operators of
the modules `*_more` were written for whoever writes probes: all are seen, also those that the hash would hold back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

Subject = Any  # a configuration or a log: an operator takes one kind and returns the same
Breaks = Callable[[Any, Random], Any]

KINDS = (
    "scorer",
    "reference",
    "sync",
    "kl",
    "loss",
    "engine",
    "model",
    "template",
    "data",
    "reward",
    "tool",
    "option",
    "log",
)

OPENED = frozenset(Path(__file__).with_name("opened.txt").read_text(encoding="utf-8").split())  # held back once


@dataclass(frozen=True)
class Operator:
    """What it breaks in one sentence, the codes that name it, and how it is done; `fits` says to which subjects."""

    name: str  # kind/what-is-wrong: never renamed, since its hash decides the half
    breaks: str
    codes: tuple[str, ...]
    apply: Breaks
    fits: Callable[[Any], bool] = lambda subject: True
    refusal: str = ""  # what a refusal at load says that names it, where no option's name does

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]

    @property
    def held_back(self) -> bool:
        return hashlib.sha256(self.name.encode()).digest()[0] % 2 == 1 and self.name not in OPENED


OPERATORS: dict[str, Operator] = {}


def operator(
    name: str, breaks: str, *codes: str, fits: Callable[[Any], bool] = lambda subject: True, refusal: str = ""
) -> Callable[[Breaks], Breaks]:
    """Registers `apply(subject, random) -> subject` under `name`; the subject that is passed must not be changed."""

    def register(apply: Breaks) -> Breaks:
        if name in OPERATORS:
            raise ValueError(f"two operators are called {name}")
        if name.partition("/")[0] not in KINDS or not codes:
            raise ValueError(f"{name}: a kind of {KINDS} before the slash, and at least one code")
        OPERATORS[name] = Operator(name, breaks, codes, apply, fits, refusal)
        return apply

    return register


@dataclass(frozen=True)
class Lookalike:
    """A change of a healthy configuration that looks odd and is right; `fits` says to which configurations."""

    apply: Breaks
    fits: Callable[[Any], bool]

    def __call__(self, subject: Subject, random: Random) -> Subject:
        return self.apply(subject, random)


LOOKALIKES: dict[str, Lookalike] = {}


def lookalike(name: str, fits: Callable[[Any], bool] = lambda subject: True) -> Callable[[Breaks], Breaks]:
    """Registers `apply(subject, random) -> subject` under `name`: what it returns must not be accused."""

    def register(apply: Breaks) -> Breaks:
        if name in LOOKALIKES:
            raise ValueError(f"two look-alikes are called {name}")
        LOOKALIKES[name] = Lookalike(apply, fits)
        return apply

    return register


def edited(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a nested configuration with other values at dotted paths."""
    copied = deepcopy(dict(config))
    for path, value in changes.items():
        *sections, option = path.split(".")
        section = copied
        for name in sections:
            section[name] = dict(section.get(name) or {})
            section = section[name]
        section[option] = value
    return copied


def is_float32(config: Mapping[str, Any]) -> bool:
    """Whether nothing runs in 16 bits."""
    return option(config, "model.dtype") is None and option(config, "optim.precision") is None


def option(config: Mapping[str, Any], path: str, default: Any = None) -> Any:
    """The value at a dotted path; the default where a section or the option is not there."""
    value: Any = config
    for name in path.split("."):
        if not isinstance(value, Mapping) or value.get(name) is None:
            return default
        value = value[name]
    return value


def path_of(part: Any) -> str:
    """How a configuration names a function or class of this package."""
    return f"{part.__module__}:{part.__name__}"
