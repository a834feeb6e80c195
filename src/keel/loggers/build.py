"""Build the loggers of a configuration's `log` section."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from keel.base.errors import KeelError
from keel.base.files import read_json, write_atomic
from keel.base.parts import import_object, is_import_path, make_part, part_arguments
from keel.base.redact import masked
from keel.loggers.base import Logger, MultiLogger
from keel.loggers.console import ConsoleLogger
from keel.loggers.options import LoggerOptions, LogOptions, WandbOptions
from keel.loggers.rundir import WANDB, JsonlLogger, RunDirectory


class TensorBoardLogger(Logger):
    """Scalars under Keel's metric names; a resume or rollback hides points past the checkpoint."""

    def __init__(self, folder: Path, resumed_from: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise KeelError(
                "log.tensorboard needs tensorboard: pip install 'keel-rl[tensorboard]', or set log.tensorboard=false"
            ) from error
        self._open: Callable[[int | None], SummaryWriter] = lambda step: SummaryWriter(
            log_dir=str(folder), purge_step=None if step is None else step + 1
        )
        self._writer = self._open(resumed_from)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def evaluation(self, step: int, record: Mapping[str, Any]) -> None:
        """`eval/<task>/<number>`."""
        for name, value in flat_numbers(record).items():
            self._writer.add_scalar(f"eval/{record.get('task', 'task')}/{name}", value, step)
        self._writer.flush()

    def event(self, kind: str, **fields: Any) -> None:
        """Write the event as text. A rollback hides later points."""
        shown = ", ".join(f"{name}={value}" for name, value in fields.items() if name not in ("step", "time"))
        self._writer.add_text("events", f"{kind}: {shown}" if shown else kind, int(fields.get("step") or 0))
        if kind == "rollback":  # later points repeat earlier steps
            self._writer.close()
            self._writer = self._open(int(fields["to"]))

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


def flat_numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of an evaluation record by name, nested ones joined with a slash; `step` is left out."""
    numbers: dict[str, float] = {}
    for name, value in record.items():
        if name == "step" or isinstance(value, bool):
            continue
        if isinstance(value, Mapping):
            numbers |= {f"{name}/{inner}": number for inner, number in flat_numbers(value).items()}
        elif name == "ci95" and isinstance(value, list | tuple) and len(value) == 2:
            numbers |= flat_numbers({"ci95/low": value[0], "ci95/high": value[1]})
        elif isinstance(value, int | float) and math.isfinite(value):
            numbers[name] = float(value)
    return numbers


class WandbLogger(Logger):
    """One W&B run per run directory: its id is in `wandb.json`, so a resume continues the same run.

    `step` is a separate metric, because W&B's own counter cannot go back to a checkpoint.
    """

    def __init__(
        self,
        folder: Path,
        options: WandbOptions,
        *,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise KeelError(
                "log.wandb needs the wandb package: pip install 'keel-rl[wandb]', or log.wandb=null"
            ) from error
        self.id = options.id or saved_run_id(folder) or secrets.token_hex(4)
        write_atomic(folder / WANDB, json.dumps({"id": self.id, "project": options.project}) + "\n")
        try:
            self._run = wandb.init(
                project=options.project,
                name=options.name or name,
                id=self.id,
                entity=options.entity,
                group=options.group,
                tags=options.tags,
                resume="allow",
                mode=options.mode,
                dir=str(folder),
                config=dict(config or {}),
            )
        except Exception as error:  # not logged in, no network, a bad name: error types differ by version
            reason = " ".join(str(error).split()) or type(error).__name__
            raise KeelError(f"log.wandb could not start ({reason}): log in, or set log.wandb.mode=offline") from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one row."""
        self._run.log({"step": step, **metrics})

    def evaluation(self, step: int, record: Mapping[str, Any]) -> None:
        """`eval/<task>/<number>`."""
        prefix = f"eval/{record.get('task', 'task')}"
        self._run.log({"step": step, **{f"{prefix}/{name}": value for name, value in flat_numbers(record).items()}})

    def close(self) -> None:
        """Finish the W&B run (offline: its files stay under `wandb/` for `wandb sync`)."""
        self._run.finish()


def saved_run_id(folder: Path) -> str | None:
    """The W&B id of this run directory, or None."""
    remembered = read_json(folder / WANDB)
    return str(remembered["id"]) if isinstance(remembered, dict) and "id" in remembered else None


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
    """The JSONL logger and those of `log`. `name` is the run's name.

    If TensorBoard (on by default) is not installed, an event records this. Other missing loggers raise an error.
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
        raise KeelError(
            f"log.extra: {part.name} returned a {type(logger).__name__}: derive it from keel.loggers.Logger"
        )
    return logger


def _factory(part: LoggerOptions) -> Callable[..., Any]:
    factory: Callable[..., Any] = import_object(part.name, "log.extra")
    if isinstance(factory, type) and not issubclass(factory, Logger):
        raise KeelError(f"log.extra: {part.name} is not a logger: derive it from keel.loggers.Logger")
    return factory


def _arguments(part: LoggerOptions, factory: Callable[..., Any], run: Any = None, total_steps: int = 0) -> Any:
    return part_arguments(f"logger {part.name}", factory, part.params, run=run, total_steps=total_steps)
