"""From the `log` section of a configuration to loggers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from keel.base.errors import KeelError, unknown
from keel.base.imports import import_object
from keel.base.redact import masked
from keel.loggers.base import Fanout, Logger
from keel.loggers.console import ConsoleLogger
from keel.loggers.jsonl import JsonlLogger
from keel.loggers.rundir import RunDirectory
from keel.loggers.tensorboard import TensorBoardLogger
from keel.loggers.wandb import WandbLogger

OPTIONS = ("console", "tensorboard", "wandb", "extra", "rollouts_every")
CONSOLES = ("auto", "rich", "plain", "none")


def build_loggers(
    log: Mapping[str, Any],
    run: RunDirectory,
    *,
    total_steps: int,
    name: str | None = None,
    config: Mapping[str, Any] | None = None,
    resumed_from: int | None = None,
) -> Fanout:
    """JSONL always, and what `log` asks for.

    `console` (auto, rich, plain or none), `tensorboard` (default false here), `wandb` (null, true, a project, or a
    mapping of project, name, id, entity, mode, group, tags), `extra` (a list of `module:attr`, or mappings
    `{name: module:attr, ...}` whose other keys are arguments); `rollouts_every` is for whoever calls `rollouts`.
    A TensorBoard that is not installed is recorded and left out, because it is on by default; anything asked for by
    name must work.
    """
    for option in log:
        if option not in OPTIONS:
            raise unknown("log option", option, OPTIONS)
    others: dict[str, Logger] = {}
    missing: list[str] = []
    console = log.get("console", "auto")
    if console not in CONSOLES:
        raise unknown("log.console", console, CONSOLES)
    if console != "none":
        live = {"auto": None, "rich": True, "plain": False}[console]
        others["console"] = ConsoleLogger(total_steps, start_step=resumed_from or 0, live=live)
    if log.get("tensorboard"):
        try:
            others["tensorboard"] = TensorBoardLogger(run.tensorboard, resumed_from)
        except KeelError as error:
            missing.append(str(error))
    if log.get("wandb"):
        others["wandb"] = _wandb(log["wandb"], run, name, config)
    for spec in log.get("extra") or ():
        label, logger = user_logger(spec, run=run, total_steps=total_steps)
        others[label] = logger
    fanout = Fanout(JsonlLogger(run), others)
    for message in missing:
        fanout.event("logger/missing", step=resumed_from or 0, message=message)
    return fanout


def _wandb(options: Any, run: RunDirectory, name: str | None, config: Mapping[str, Any] | None) -> WandbLogger:
    if isinstance(options, str):  # log.wandb=my-project
        options = {"project": options}
    given = dict(options) if isinstance(options, Mapping) else {}
    known = [option for option in inspect.signature(WandbLogger).parameters if option not in ("folder", "config")]
    for option in given:
        if option not in known:
            raise unknown("log.wandb option", option, known)
    given = {option: value for option, value in given.items() if value is not None}
    return WandbLogger(run.path, config=masked(config), **{"name": name, **given})


def user_logger(spec: Any, **offered: Any) -> tuple[str, Logger]:
    """A user's `module:attr`, called with its own arguments plus those of `run` and `total_steps` that it takes."""
    given = dict(spec) if isinstance(spec, Mapping) else {"name": spec}
    target: Any = given.pop("name", None)
    made = import_object(target, "log.extra")
    try:
        takes: Mapping[str, inspect.Parameter] = inspect.signature(made).parameters
    except ValueError:  # built in, without a signature
        takes = {}
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values()):
        for option in given:
            if option not in takes:
                raise unknown(f"argument of {target}", option, takes)
    arguments = {**{name: value for name, value in offered.items() if name in takes}, **given}
    try:
        logger: Logger = made(**arguments)
    except TypeError as error:
        raise KeelError(f"log.extra: {target} could not be made: {error}") from error
    lacking = [name for name in ("step", "rollouts", "evaluation", "event", "close") if not hasattr(logger, name)]
    if lacking:
        raise KeelError(f"log.extra: {target} has no {', '.join(lacking)}; derive it from keel.loggers.Quiet")
    return target, logger
