"""Where a run's numbers go: the run directory always, and the console, TensorBoard, W&B or a user's own class."""

from __future__ import annotations

from keel.loggers.base import Fanout, Logger, Quiet
from keel.loggers.build import build_loggers
from keel.loggers.console import ConsoleLogger
from keel.loggers.jsonl import JsonlLogger
from keel.loggers.rundir import RunDirectory

__all__ = ["ConsoleLogger", "Fanout", "JsonlLogger", "Logger", "Quiet", "RunDirectory", "build_loggers"]
