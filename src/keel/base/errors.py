"""The one exception that a user can cause, and checks on what they hand in."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from keel.base.redact import hide


class KeelError(ValueError):
    """A mistake in what the user gave: one line that names the thing, the place and the fix; secrets are masked."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(hide(arg) if isinstance(arg, str) else arg for arg in args))


class RenamedImport(KeelError, ImportError):
    """A module or a name of 0.1 that is imported."""


class RenamedAttribute(KeelError, AttributeError):
    """A name of 0.1 that is asked of its module."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message that says anything, or its type."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def unknown(kind: str, name: object, known: Iterable[str]) -> KeelError:
    """The error for a name that is not in a registry, with the nearest valid one."""
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return KeelError(f"unknown {kind} {name!r}: {hint}known: {', '.join(names)}")
