"""Metrics and evaluations to Weights & Biases, online or offline."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keel.base.errors import KeelError
from keel.base.files import read_json, write_atomic
from keel.loggers.base import Logger
from keel.loggers.options import WandbOptions
from keel.loggers.rundir import WANDB
from keel.loggers.tensorboard import flat_numbers


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
        """One row."""
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
