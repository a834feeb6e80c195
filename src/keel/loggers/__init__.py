"""Loggers: the run directory always, and the console, TensorBoard, W&B or a user's own class."""

from __future__ import annotations

from keel.loggers.base import Logger, MultiLogger
from keel.loggers.build import build_loggers
from keel.loggers.console import ConsoleLogger
from keel.loggers.rundir import JsonlLogger, RunDirectory

__all__ = ["ConsoleLogger", "JsonlLogger", "Logger", "MultiLogger", "RunDirectory", "build_loggers"]
