"""Import a user's own part by its name `module:attr`."""

from __future__ import annotations

import importlib
import re
import sys
import traceback
from typing import Any

from keel.base.errors import KeelError, first_line

_IDENTIFIER = r"[^\W\d]\w*"
_IMPORT_PATH = re.compile(rf"{_IDENTIFIER}(\.{_IDENTIFIER})*:{_IDENTIFIER}")


def is_import_path(name: object) -> bool:
    """Whether a name has the form `module:attr`."""
    return isinstance(name, str) and bool(_IMPORT_PATH.fullmatch(name))


def add_working_folder() -> None:
    """Import modules of the working folder too, as with `python -m`."""
    if "" not in sys.path:
        sys.path.insert(0, "")


def import_object(spec: str, part: str, *, callable_only: bool = True) -> Any:
    """Import `module:attr`; the working folder is on the path.

    `part` names its purpose in errors: an option (`kl.estimator`) or a kind (`task`).
    """
    label = f"{part}={spec}" if "." in part else f"{part} {spec!r}"
    if not is_import_path(spec):
        raise KeelError(f"{label} is not module:attr, such as my_module:my_part")
    add_working_folder()
    module, _, attribute = spec.partition(":")
    try:
        loaded = getattr(importlib.import_module(module), attribute)
    except KeelError:
        raise
    except (ImportError, AttributeError) as error:
        raise KeelError(f"cannot import {label}: {first_line(error)}; check the spelling and PYTHONPATH") from error
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        line = traceback.extract_tb(error.__traceback__)[-1]
        cause = f"{type(error).__name__}: {first_line(error)}"
        raise KeelError(f"cannot import {label}: {cause}, in {line.filename}, line {line.lineno}") from error
    if callable_only and not callable(loaded):
        raise KeelError(f"{label} is of type {type(loaded).__name__}: it must be a function or a class")
    return loaded
