"""Training: the step, the loop around it, checkpoints, the supervised start.

The package can be called: `keel.train(config, task=…, reward=…, callbacks=[…])` is `keel.train.api.train`. Its parts
are imported when they are asked for, so that `import keel` costs nothing.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keel.train.api import TrainResult, main, train

_API = ("TrainResult", "main", "train")


class _Callable(ModuleType):
    """A module that can be called, because the verb and the room have the same name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return importlib.import_module("keel.train.api").train(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in _API:
            return getattr(importlib.import_module("keel.train.api"), name)
        if name == "sft":
            return importlib.import_module("keel.train.sft")
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


sys.modules[__name__].__class__ = _Callable

__all__ = ["TrainResult", "main", "train"]
