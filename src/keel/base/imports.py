"""A user's own part, named `module:attr`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from keel.base.errors import KeelError
from keel.base.moved import import_module

_USERS_OWN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def is_users_own(name: str) -> bool:
    """Whether a name has the form `module:attr`."""
    return bool(_USERS_OWN.fullmatch(name))


def import_own(spec: str, kind: str) -> Callable[..., Any]:
    """The user's own part named `module:attr`."""
    module, _, attr = spec.partition(":")
    try:
        found = getattr(import_module(module), attr)
    except Exception as error:  # a user's module may raise anything while it is imported
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise KeelError(f"cannot import {kind} {spec!r}: {cause}; check the spelling and PYTHONPATH") from error
    if not callable(found):
        raise KeelError(f"{kind} {spec!r} is a {type(found).__name__}: it must be a function or a class")
    return found
