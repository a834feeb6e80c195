"""Readers of what training left behind: Keel's runs, TRL's, TensorBoard folders, tables."""

from __future__ import annotations

from pathlib import Path

from keel.base.errors import KeelError
from keel.lab.doctor.history import History
from keel.lab.doctor.readers.keel_run import is_keel_run, read_keel_run
from keel.lab.doctor.readers.table import SUFFIXES, parse_map, read_table
from keel.lab.doctor.readers.tensorboard import event_folders, read_tensorboard
from keel.lab.doctor.readers.trl import STATE, read_trl, state_files

__all__ = ["parse_map", "read_history"]


def read_history(path: Path, mapping: dict[str, str] | None = None) -> History:
    """Whatever lies at `path`, recognised by its files; `mapping` names columns of a table or tags of a folder."""
    if path.is_file():
        if path.name == STATE:
            return read_trl(path)
        if path.suffix in SUFFIXES:
            return read_table(path, mapping)
        raise KeelError(f"{path} is no log: give a run's folder, {STATE}, or a file ending in {', '.join(SUFFIXES)}")
    if not path.is_dir():
        raise KeelError(f"nothing at {path}: give a run's folder, a log, or a configuration")
    if is_keel_run(path) and not mapping:
        return read_keel_run(path)
    if state_files(path) and not mapping:
        return read_trl(path)
    if event_folders(path):
        return read_tensorboard(path, mapping)
    raise KeelError(
        f"{path} holds no run: none of Keel's metrics.jsonl, TRL's {STATE} or TensorBoard's event files is in it"
    )
