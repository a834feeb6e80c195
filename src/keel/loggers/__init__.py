"""Where a run's numbers go: the run directory always, and the console, TensorBoard, W&B or a user's own class."""

from __future__ import annotations

from typing import Any

from keel.base.errors import KeelError
from keel.loggers.base import Logger, MultiLogger
from keel.loggers.build import build_loggers
from keel.loggers.console import ConsoleLogger
from keel.loggers.jsonl import JsonlLogger
from keel.loggers.rundir import RunDirectory

__all__ = ["ConsoleLogger", "JsonlLogger", "Logger", "MultiLogger", "RunDirectory", "build_loggers"]


def __getattr__(name: str) -> Any:
    if name == "Quiet":  # of 0.1
        raise KeelError("keel.loggers.Quiet is now keel.loggers.Logger: change the import")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
