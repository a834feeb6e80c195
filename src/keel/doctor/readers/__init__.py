"""Readers of training logs: Keel and TRL runs, TensorBoard and W&B folders, tables, console output."""

from __future__ import annotations

import os
from pathlib import Path

from keel.base.errors import KeelError
from keel.doctor.history import History
from keel.doctor.names import TRAINERS
from keel.doctor.readers.table import (
    EVENTS,
    SUFFIXES,
    event_folders,
    is_wandb_run,
    parse_map,
    read_table,
    read_tensorboard,
    read_wandb,
)
from keel.doctor.readers.trainers import STATE, is_keel_run, read_keel_run, read_trl, state_files
from keel.loggers import rundir

__all__ = ["is_run", "parse_map", "read_history", "runs_below"]
DEPTH = 5  # levels of folders that are searched for runs


def read_history(path: Path, mapping: dict[str, str] | None = None) -> History:
    """Read the log at `path` and detect its format. `mapping` names columns of a table or tags of a folder."""
    if path.is_file():
        if path.name == STATE:
            return read_trl(path)
        if path.suffix in SUFFIXES:
            return read_table(path, mapping)
        raise KeelError(f"{path} is not a log: give a run folder, {STATE}, or a file ending in {', '.join(SUFFIXES)}")
    if not path.is_dir():
        raise KeelError(f"{path} does not exist: give a run folder, a log, or a configuration")
    if is_keel_run(path) and not mapping:
        return _other_metrics(path) or read_keel_run(path)
    if state_files(path) and not mapping:
        return read_trl(path)
    if is_wandb_run(path):
        return read_wandb(path, mapping)
    if event_folders(path):
        return read_tensorboard(path, mapping)
    raise KeelError(
        f"{path} contains no run: there is no metrics.jsonl of Keel, no {STATE} of TRL, no run folder of W&B, and no "
        "event file of TensorBoard"
    )


def _other_metrics(path: Path) -> History | None:
    """Read a folder whose metrics.jsonl another trainer wrote, such as prime-rl; None if it is Keel's."""
    file = path / rundir.METRICS
    if not file.is_file() or (path / rundir.ENV).is_file():
        return None
    try:
        history = read_table(file)
    except KeelError:
        return None
    return history if history.source in TRAINERS else None


def is_run(path: Path) -> bool:
    """Whether a folder itself is a run."""
    return is_keel_run(path) or bool(state_files(path)) or is_wandb_run(path) or any(path.glob(EVENTS))


def runs_below(path: Path) -> list[Path]:
    """The runs at or below a folder, down to DEPTH levels, sorted. Folders inside a run are skipped."""
    runs = []
    for folder, inner, _ in os.walk(path):
        here = Path(folder)
        if is_run(here):
            runs.append(here)
            inner.clear()
        elif len(here.relative_to(path).parts) >= DEPTH:
            inner.clear()
        inner[:] = [name for name in inner if not name.startswith(".")]
    return sorted(runs)
