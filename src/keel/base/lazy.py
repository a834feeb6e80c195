"""Import a package's public names on first access, so that options and checks load without torch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    """A package whose lazy names are listed, and whose functions keep their names when a submodule of that name loads.

    A class, because importing a submodule sets it on the package, which only a class's `__setattr__` sees.
    """

    def __dir__(self) -> Iterable[str]:
        return {*super().__dir__(), *vars(self).get("__all__", ())}

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and name in vars(self).get("__all__", ()):
            value = getattr(value, name)  # the import of the submodule, which binds it to its package
        super().__setattr__(name, value)


def public_names(room: str, modules: str) -> Callable[[str], Any]:
    """A package's `__getattr__`: names of its `__all__` from the first of these modules, a word each, that has them."""
    package = sys.modules[room]
    package.__class__ = _Room

    def lookup(name: str) -> Any:
        for module in modules.split() if name in vars(package)["__all__"] else ():
            value = getattr(importlib.import_module(f"{room}.{module}"), name, None)
            if value is not None and not isinstance(value, ModuleType):
                return value  # not kept: a test may have replaced it for a while
        if PathFinder.find_spec(f"{room}.{name}", package.__path__):
            return importlib.import_module(f"{room}.{name}")
        raise AttributeError(f"module {room!r} has no attribute {name!r}")

    return lookup
