"""Keel's own run directory, finished or running."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from keel.base.files import read_json
from keel.doctor.history import KL_NAMES, History, Record, series_of
from keel.doctor.runs import RunRecord, number, read_run
from keel.loggers import rundir


def is_keel_run(path: Path) -> bool:
    """Whether a folder contains Keel's files."""
    return path.is_dir() and ((path / rundir.METRICS).is_file() or (path / rundir.EVENTS).is_file())


def read_keel_run(path: Path) -> History:
    """The history of a run. Of steps that were repeated after a rollback, the last attempt is used."""
    return history_of(read_run(path))


def history_of(run: RunRecord) -> History:
    """The history of a run that is already read."""
    lines, again = _last_attempt(run.metrics)
    notes = [f"read {len(lines)} steps of Keel's run {run.path}{'; it is still running' if run.running else ''}"]
    if again:
        notes.append(f"{again} step lines belong to attempts that were rolled back: the later attempt is judged")
    notes += _abandoned(run)
    return History(
        source="keel",
        path=run.path,
        series=series_of(lines),
        config=run.config,
        events=run.events,
        evaluations=run.evaluations,
        rollouts=run.rollouts,
        vocabulary=_vocabulary(run),
        running=run.running,
        missing=run.missing,
        notes=tuple(notes),
    )


def _last_attempt(lines: Iterable[Record]) -> tuple[list[Record], int]:
    """(the lines of the final attempt, the number of others). A repeated step replaces all later lines."""
    current: list[Record] = []
    dropped = 0
    for line in lines:
        step = number(line.get("step")) or 0.0
        while current and (number(current[-1].get("step")) or 0.0) >= step:
            current.pop()
            dropped += 1
        current.append(line)
    return current, dropped


def _abandoned(run: RunRecord) -> list[str]:
    """One line per attempt that a rollback abandoned: its steps and its KL."""
    notes = []
    for name, lines in run.abandoned:
        series = series_of(lines)
        kl = next((series[name] for name in KL_NAMES if name in series and len(series[name].finite)), None)
        steps = series.get("reward/mean") or kl
        reached = f"; KL had reached {kl.top()[1]:.3g} nats per token" if kl is not None else ""
        notes.append(f"{name.replace(' ', '-')} was abandoned after {steps.span if steps else 'no step'}{reached}")
    return notes


def _vocabulary(run: RunRecord) -> int | None:
    """The vocabulary size from the config.json of the newest checkpoint."""
    configs = sorted((run.path / rundir.CHECKPOINTS).glob("step-*/**/config.json"))
    return vocabulary_of(configs[-1]) if configs else None


def vocabulary_of(path: Path) -> int | None:
    """vocab_size of a Hugging Face config.json, or that of the text part of a composite model."""
    data = read_json(path)
    if not isinstance(data, dict):
        return None
    inner = data.get("text_config")
    size = number(data.get("vocab_size", inner.get("vocab_size") if isinstance(inner, dict) else None))
    return int(size) if size is not None and math.isfinite(size) and size > 1 else None
