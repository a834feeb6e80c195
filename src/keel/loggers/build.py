"""From the `log` section of a configuration to loggers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from keel.base.errors import KeelError
from keel.base.imports import import_object, is_import_path
from keel.base.parts import make_part, part_arguments
from keel.base.redact import masked
from keel.loggers.base import Logger, MultiLogger
from keel.loggers.console import ConsoleLogger
from keel.loggers.options import LoggerOptions, LogOptions
from keel.loggers.rundir import JsonlLogger, RunDirectory
from keel.loggers.trackers import TensorBoardLogger, WandbLogger

LIVE_DISPLAY = {"auto": None, "rich": True, "plain": False}


def build_loggers(
    log: LogOptions,
    run: RunDirectory,
    *,
    total_steps: int,
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    resumed_from: int | None = None,
) -> MultiLogger:
    """The JSONL logger and those of `log`; `name` is the run's.

    If TensorBoard, which is on by default, is not installed, an event records it. Other missing loggers raise an error.
    """
    others: dict[str, Logger] = {}
    missing: list[str] = []
    if log.console != "none":
        others["console"] = ConsoleLogger(total_steps, start_step=resumed_from or 0, live=LIVE_DISPLAY[log.console])
    if log.tensorboard:
        try:
            others["tensorboard"] = TensorBoardLogger(run.tensorboard, resumed_from)
        except KeelError as error:
            missing.append(str(error))
    if log.wandb is not None:
        others["wandb"] = WandbLogger(run.path, log.wandb, name=name, config=masked(config))
    for part in log.parts:
        others[part.name] = user_logger(part, run=run, total_steps=total_steps)
    loggers = MultiLogger(JsonlLogger(run), others)
    for message in missing:
        loggers.event("logger/missing", step=resumed_from or 0, message=message)
    return loggers


def check_loggers(log: LogOptions) -> None:
    """Refuse a user's logger that cannot be imported, is not a Logger, or does not take its parameters."""
    for part in log.parts:
        if not is_import_path(part.name):
            raise KeelError(f"log.extra names {part.name!r}: give module:attr")
        _arguments(part, _factory(part))


def user_logger(part: LoggerOptions, **offered: Any) -> Logger:
    """A user's `module:attr`, called with its parameters, and with `run` and `total_steps` if it takes them."""
    factory = _factory(part)
    logger = make_part(f"log.extra: {part.name}", factory, **_arguments(part, factory, **offered))
    if not isinstance(logger, Logger):
        raise KeelError(f"log.extra: {part.name} made a {type(logger).__name__}: derive it from keel.loggers.Logger")
    return logger


def _factory(part: LoggerOptions) -> Callable[..., Any]:
    factory: Callable[..., Any] = import_object(part.name, "log.extra")
    if isinstance(factory, type) and not issubclass(factory, Logger):
        raise KeelError(f"log.extra: {part.name} is not a logger: derive it from keel.loggers.Logger")
    return factory


def _arguments(part: LoggerOptions, factory: Callable[..., Any], run: Any = None, total_steps: int = 0) -> Any:
    return part_arguments(f"logger {part.name}", factory, part.params, run=run, total_steps=total_steps)
