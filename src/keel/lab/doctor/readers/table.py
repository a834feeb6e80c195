"""A CSV or JSONL file, its columns named by `--map`."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from keel.base.errors import KeelError
from keel.base.files import json_lines
from keel.lab.doctor.history import History, series_of
from keel.lab.doctor.names import from_map, renamed

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson")


def parse_map(text: str | None) -> dict[str, str]:
    """`kl=train_kl,reward=score` as {name: column}."""
    columns: dict[str, str] = {}
    for pair in filter(None, (part.strip() for part in (text or "").split(","))):
        name, equals, column = pair.partition("=")
        if not equals or not column:
            raise KeelError(f"--map {pair!r} is not name=column, such as kl=train_kl,reward=score")
        from_map(name.strip())
        columns[name.strip()] = column.strip()
    return columns


def read_table(path: Path, mapping: Mapping[str, str] | None = None) -> History:
    """Columns as `mapping` names them, the others by the names that Keel, TRL and verl use."""
    rows = _rows(path)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    mapped = dict(mapping or {})
    for name, column in mapped.items():
        if column not in columns:
            listed = ", ".join(columns) or "none"
            raise KeelError(f"--map {name}={column}: {path} has no column {column!r}; there are: {listed}")
    step = mapped.pop("step", None) or next((name for name in columns if name.lower() in _STEPS), "step")
    series = series_of(rows, step)
    named, unused = renamed(series, mapped)
    if not named:
        raise KeelError(
            f"no column of {path} is known: name them with --map kl=COLUMN,reward=COLUMN; "
            f"there are: {', '.join(columns) or 'none'}"
        )
    notes = [f"read {len(rows)} rows of {path}; steps from {step!r}" if step in columns else f"read {len(rows)} rows"]
    if step not in columns:
        notes.append("no step column: rows are counted from 1; name it with --map step=COLUMN")
    if unused:
        notes.append(f"not used: {', '.join(sorted(unused))}")
    missing = ("a table holds no options: checks that need the configuration are left out",)
    return History("table", path, named, missing=missing, notes=tuple(notes))


_STEPS = ("step", "global_step", "_step", "steps", "iteration", "train/global_step")


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise KeelError(f"cannot read {path}: {error.strerror or error}") from error
    if path.suffix in (".csv", ".tsv"):
        lines = csv.DictReader(
            data.decode("utf-8-sig", "replace").splitlines(), delimiter="\t" if path.suffix == ".tsv" else ","
        )
        rows: list[dict[str, Any]] = [{k: v for k, v in _numbers(row).items() if v != ""} for row in lines]
    else:
        # the last line of a file that is being written is no object yet
        rows = [row for _, row in json_lines(data.split(b"\n")) if row and not isinstance(row, str)]
    if not rows:
        raise KeelError(f"{path} has no rows")
    return rows


def _numbers(row: Mapping[str | None, Any]) -> dict[str, Any]:
    """Cells as numbers where they are some; an empty cell was not measured and is left out."""
    cells: dict[str, Any] = {}
    for name, cell in row.items():
        if name is None:
            continue
        try:
            cells[name] = float(cell) if cell not in (None, "") else ""
        except (TypeError, ValueError):
            cells[name] = cell
    return cells
