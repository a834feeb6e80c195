"""The one exception that a user can cause, and checks on what they hand in."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KeelError(ValueError):
    """A mistake in what the user gave us: one line that names the thing, the place and the fix."""


def unknown(kind: str, name: object, known: Iterable[str]) -> KeelError:
    """The error for a name that is not in a registry, with the nearest valid one."""
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return KeelError(f"unknown {kind} {name!r}: {hint}known: {', '.join(names)}")
