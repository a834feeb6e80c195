"""Where a run's numbers go: the run directory always, and the console, TensorBoard, W&B or a user's own class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keel.base.moved import refuse_renamed
from keel.loggers.base import Logger, MultiLogger
from keel.loggers.build import build_loggers
from keel.loggers.console import ConsoleLogger
from keel.loggers.jsonl import JsonlLogger
from keel.loggers.rundir import RunDirectory

if not TYPE_CHECKING:  # type checkers see the names that are there
    __getattr__ = refuse_renamed(__name__, {"Quiet": "keel.loggers.Logger", "Fanout": "keel.loggers.MultiLogger"})

__all__ = ["ConsoleLogger", "JsonlLogger", "Logger", "MultiLogger", "RunDirectory", "build_loggers"]
