"""Shared foundations: data classes, metrics, errors, options, files, process groups.

`lazy_attributes` imports a package's public names on first access, so that options and checks load without torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any


class _LazyPackage(ModuleType):
    """A package that loads the names in `__all__` on first access.

    Importing a submodule binds it to the package and so replaces a public function of the same name. Only a class's
    `__setattr__` can prevent that.
    """

    def __dir__(self) -> Iterable[str]:
        return {*super().__dir__(), *vars(self).get("__all__", ())}

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and name in vars(self).get("__all__", ()):
            value = getattr(value, name)  # import has just bound the submodule to its package
        super().__setattr__(name, value)


def lazy_attributes(room: str, modules: str) -> Callable[[str], Any]:
    """Return a package's `__getattr__`. It looks up names of `__all__` in `modules` (space-separated), in order."""
    package = sys.modules[room]
    package.__class__ = _LazyPackage

    def lookup(name: str) -> Any:
        for module in modules.split() if name in vars(package)["__all__"] else ():
            value = getattr(importlib.import_module(f"{room}.{module}"), name, None)
            if value is not None and not isinstance(value, ModuleType):
                return value  # not cached: a test may have patched it
        if PathFinder.find_spec(f"{room}.{name}", package.__path__):
            return importlib.import_module(f"{room}.{name}")
        raise AttributeError(f"module {room!r} has no attribute {name!r}")

    return lookup
