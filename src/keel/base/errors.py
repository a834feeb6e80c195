"""The one exception that a user can cause, and checks on what they hand in."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from keel.base.redact import hide


class KeelError(ValueError):
    """A mistake in what the user gave: one line that names the thing, the place and the fix; secrets are masked."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(hide(arg) if isinstance(arg, str) else arg for arg in args))


def first_line(error: BaseException) -> str:
    """The first line of an error's message that says anything, or its type."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def nearest(name: object, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The name that is spelt most alike, None where none is alike enough; `cutoff` is difflib's ratio."""
    return next(iter(difflib.get_close_matches(str(name), list(known), n=1, cutoff=cutoff)), None)


def unknown(kind: str, name: object, known: Iterable[str]) -> KeelError:
    """The error for a name that is not in a registry, with the nearest valid one."""
    names = sorted(known)
    near = nearest(name, names)
    hint = f"did you mean {near!r}? " if near else ""
    return KeelError(f"unknown {kind} {name!r}: {hint}known: {', '.join(names)}")
