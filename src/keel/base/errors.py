"""KeelError, the exception for a user's mistakes, and suggestions for unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from keel.base.redact import redact_text


class KeelError(ValueError):
    """A mistake in the user's input, as one line: what is wrong, where, what to do. Secrets are masked."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(redact_text(arg) if isinstance(arg, str) else arg for arg in args))


def first_line(error: BaseException) -> str:
    """The first line of an error's message that is not blank, or the error's type."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def nearest(name: object, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The known name with the closest spelling, None below `cutoff` (difflib's ratio)."""
    return next(iter(difflib.get_close_matches(str(name), list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(name: object, known: Iterable[str], cutoff: float = 0.5) -> str:
    """`did you mean X? ` with the nearest known name, or an empty string."""
    near = nearest(name, known, cutoff)
    return f"did you mean {near}? " if near else ""


def unknown(kind: str, name: object, known: Iterable[str]) -> KeelError:
    """The error for a name that is not in a registry, with the closest valid name."""
    names = sorted(known)
    near = nearest(name, names)
    hint = f"did you mean {near!r}? " if near else ""
    return KeelError(f"unknown {kind} {name!r}: {hint}known: {', '.join(names)}")
