"""Metrics and evaluations as TensorBoard scalars."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from keel.base.errors import KeelError
from keel.loggers.base import Logger


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
        """Events as text, beside the curves."""
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
