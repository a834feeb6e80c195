"""Operators: each breaks one property of a healthy subject, as mutation testing does for code.

A subject is a configuration (a nested dict, for the preflight) or a log (`faults.logs.Log`, for `keel doctor LOG`).
Whether an operator is held back is decided by the hash of its name: whoever writes probes looks at the other half.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Operator:
    """What it breaks in one sentence, the codes that name it, and how it is done; `fits` says to which subjects."""

    name: str  # kind/what-is-wrong: never renamed, since its hash decides the half
    breaks: str
    codes: tuple[str, ...]
    apply: Breaks
    fits: Callable[[Any], bool] = lambda subject: True

    @property
    def kind(self) -> str:
        return self.name.partition("/")[0]

    @property
    def held_back(self) -> bool:
        return hashlib.sha256(self.name.encode()).digest()[0] % 2 == 1


OPERATORS: dict[str, Operator] = {}


def operator(
    name: str, breaks: str, *codes: str, fits: Callable[[Any], bool] = lambda subject: True
) -> Callable[[Breaks], Breaks]:
    """Registers `apply(subject, random) -> subject` under `name`; the subject that is passed must not be changed."""

    def register(apply: Breaks) -> Breaks:
        if name in OPERATORS:
            raise ValueError(f"two operators are called {name}")
        if name.partition("/")[0] not in KINDS or not codes:
            raise ValueError(f"{name}: a kind of {KINDS} before the slash, and at least one code")
        OPERATORS[name] = Operator(name, breaks, codes, apply, fits)
        return apply

    return register
