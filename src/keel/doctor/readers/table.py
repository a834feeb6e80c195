"""Readers of metrics by name: tables (CSV, JSON lines), console output, W&B folders and TensorBoard folders."""

from __future__ import annotations

import ast
import csv
import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from keel.base.errors import KeelError
from keel.base.files import check_depth, json_lines, parse_json
from keel.doctor.history import History, Series, in_order, series_of
from keel.doctor.names import canonical, from_map, keel_options, renamed, source_of

TABLES, PRINTED = (".csv", ".tsv", ".jsonl", ".ndjson", ".json"), (".log", ".txt", ".out")
SUFFIXES = (*TABLES, *PRINTED)
Row = dict[str, Any]
_LONGEST_NAME = 10_000


def parse_map(text: str | None) -> dict[str, str]:
    """`kl=train_kl,reward=score` as {name: column}."""
    columns: dict[str, str] = {}
    for pair in filter(None, (part.strip() for part in (text or "").split(","))):
        name, equals, column = pair.partition("=")
        if not equals or not column:
            raise KeelError(f"--map {pair!r} must be name=column, such as kl=train_kl,reward=score")
        from_map(name.strip())
        columns[name.strip()] = column.strip()
    return columns


def read_table(path: Path, mapping: Mapping[str, str] | None = None) -> History:
    """Read a table. Columns without a mapping are recognised by the names of Keel and of the trainers in names.yaml."""
    return history_of(path, _rows(path), mapping)


def history_of(path: Path, rows: list[Row], mapping: Mapping[str, str] | None = None) -> History:
    """Convert rows of metrics to a history."""
    columns, mapped = list(dict.fromkeys(name for row in rows for name in row)), dict(mapping or {})
    lower = {name.lower(): name for name in reversed(columns)}
    step = mapped.get("step") or next((lower[name] for name in _STEPS if name in lower), "step")
    steps = f"; steps from {step!r}" if step in columns else ""
    history = named_history(
        path, series_of(rows, step), mapped, "column", columns, f"read {len(rows)} rows of {path}{steps}"
    )
    if steps:
        return history
    counted = "no step column was found, so rows are counted from 1; set it with --map step=COLUMN"
    return replace(history, notes=(*history.notes, counted))


def named_history(
    path: Path, series: Mapping[str, Series], mapping: Mapping[str, str], what: str, names: Sequence[str], note: str
) -> History:
    """Map series to Keel's names. `what` is "column" or "tag", for messages."""
    listed = ", ".join(names) or "none"
    for name, theirs in mapping.items():
        if theirs not in names:
            raise KeelError(f"--map {name}={theirs}: {path} has no {what} {theirs!r}; there are: {listed}")
    source = source_of(names)
    named, unused = renamed(series, {name: theirs for name, theirs in mapping.items() if name != "step"}, source)
    if all(name.startswith(("time/", "memory/", "speed/")) for name in named):  # none, or nothing that a check reads
        raise KeelError(
            f"no {what} of {path} has a known name: assign them with --map kl={what.upper()},reward={what.upper()}; "
            f"there are: {listed}"
        )
    notes = [note]
    if source is not None:
        notes.append(f"recognised by its metric names as a log of {source}")
    if unused:
        notes.append(f"not used: {', '.join(sorted(unused))}")
    missing = (f"{what}s contain no options, so checks that need the configuration are skipped",)
    return History(source or "table", path, named, missing=missing, notes=tuple(notes))


# Best first: W&B counts calls of log() in `_step`, and a trainer may make several per step.
_STEPS = ("step", "global_step", "training/global_step", "train/global_step", "steps", "iteration", "_step")


def _rows(path: Path) -> list[Row]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise KeelError(f"cannot read {path}: {error.strerror or error}") from error
    if path.suffix in (".csv", ".tsv"):
        rows = _cells(path, data)
    elif path.suffix in PRINTED:
        rows = printed_rows(data.decode("utf-8", "replace").splitlines())
    else:
        rows = [_flat(row) for row in _objects(path, data)]
    if not rows:
        raise KeelError(f"{path} has no rows")
    return rows


def _cells(path: Path, data: bytes) -> list[Row]:
    """Rows of a CSV file. Empty cells are left out."""
    delimiter = "\t" if path.suffix == ".tsv" else ","
    text = data.decode("utf-8-sig", "replace").replace("\0", "")
    try:
        rows = list(csv.DictReader(text.splitlines(), delimiter=delimiter))
        longest = max((len(name) for row in rows[:1] for name in row if name), default=0)
        if longest > _LONGEST_NAME:  # csv's own limit is global, and libraries raise it
            raise csv.Error(f"the name of a column has {longest} characters")
    except csv.Error as error:
        raise KeelError(f"{path} is not a CSV file: {error}") from error
    names = _export_names(path, [name for name in (rows[0] if rows else {}) if name])
    return [{names[k]: _number(v) for k, v in row.items() if v not in (None, "") and k in names} for row in rows]


def _export_names(path: Path, columns: list[str]) -> dict[str, str]:
    """Column → metric for a chart exported from W&B: `RUN - METRIC`, without its `__MIN` and `__MAX` columns."""
    if {"Name", "State"} <= set(columns):
        raise KeelError(
            f"{path} is W&B's table of runs, with one row per run: export the history or a chart of one run instead"
        )
    if not any(name.endswith("__MIN") for name in columns):
        return {name: name for name in columns}
    values = [name for name in columns if not name.endswith(("__MIN", "__MAX"))]
    runs = list(dict.fromkeys(name.rpartition(" - ")[0] for name in values if " - " in name))
    if len(runs) > 1:
        raise KeelError(f"{path} contains {len(runs)} W&B runs ({', '.join(runs)}): export a single run")
    return {name: name.rpartition(" - ")[2] for name in values}


def _objects(path: Path, data: bytes) -> Iterator[Row]:
    """Rows of a JSON-lines file, or of a JSON file that is a list or contains one."""
    if path.suffix == ".json":
        try:
            whole = parse_json(data)
        except ValueError:
            whole = None
        if isinstance(whole, dict):
            whole = next((v for v in whole.values() if isinstance(v, list) and v and isinstance(v[0], dict)), whole)
        if isinstance(whole, list):
            yield from (row for row in whole if isinstance(row, dict))
            return
    # the last line may be incomplete while the file is being written
    yield from (row for _, row in json_lines(data.split(b"\n")) if row and not isinstance(row, str))


def _flat(row: Row) -> Row:
    """A row's metrics: those under `data` for verl's file logger; for W&B only those logged at this step."""
    inner = row.get("data")
    flat = {**{k: v for k, v in row.items() if k != "data"}, **inner} if isinstance(inner, dict) else row
    if "_step" in flat or "_runtime" in flat:
        flat = {name: value for name, value in flat.items() if value is not None}
    return {name: None if isinstance(value, str) and value in _NOT_FINITE else value for name, value in flat.items()}


_NOT_FINITE = ("NaN", "Infinity", "-Infinity", "nan", "inf", "-inf")
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|inf|NaN|Infinity)"
_NAME = r"(?<![\w/.@()\-])(?!pid=)([A-Za-z_][\w/.@()\-]{0,200})"  # bounded, since a line may be one long word
_PAIR = re.compile(rf"{_NAME}\s{{0,9}}[:=]\s{{0,9}}(?:np\.\w+\(|tensor\()?({_NUMBER})(?![\w.])")


def printed_rows(lines: Iterable[str]) -> list[Row]:
    """Metrics in console output: `step:3 - actor/kl_loss:0.01 - …`, one dict per line, or `step=3 reward=0.5 …`."""
    rows = []
    for line in lines:
        text = _COLOURS.sub("", line)
        row = _dictionary(text) or _pairs(text)
        named = sum(name.lower() not in _STEPS for name in row)
        if named >= 2 or (named and any(name.lower() in _STEPS for name in row)):
            rows.append(row)
    steps = [row for row in rows if any(name.lower() in _STEPS for name in row)]
    return steps or rows  # if some lines have a step, the others belong to no step


def _pairs(text: str) -> Row:
    """Names and numbers. Rates and KLs that are rounded to about 0 are left out."""
    return {
        name: float(value)
        for name, value in _PAIR.findall(text)
        if not (_COARSE.fullmatch(value) and _is_small(canonical(name)))
    }


_COARSE = re.compile(r"-?0\.0{2,4}\d?")  # a value with at most one significant digit after rounding


def _is_small(name: str | None) -> bool:
    return name == "optim/learning_rate" or (name is not None and name.startswith("kl/"))


def _dictionary(text: str) -> Row:
    """The dict in a line, in Python or JSON syntax. Values may be strings."""
    start, end = text.find("{"), text.rfind("}")
    if start < 0 or end < start or end - start > 100_000:
        return {}
    for parse in (json.loads, ast.literal_eval):
        try:
            value = check_depth(parse(text[start : end + 1]))
        except (ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
            continue
        if isinstance(value, dict):
            return {name: _number(v) for name, v in value.items() if isinstance(name, str)}
    return {}


def _number(value: Any) -> Any:
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


# ------------------------------------------------------------------------ W&B

HISTORY, CONFIG, CONSOLE = "wandb-history.jsonl", "config.yaml", "output.log"
BLOCK = 32768  # block size of the LevelDB log format, which W&B's binary file uses


def is_wandb_run(path: Path) -> bool:
    """Whether a folder is a W&B run."""
    return path.is_dir() and (any(path.glob("run-*.wandb")) or (path / "files" / "wandb-summary.json").is_file())


def read_wandb(path: Path, mapping: dict[str, str] | None = None) -> History:
    """The history from the first readable source: old JSONL, the binary file, or the console output."""
    files = path / "files"
    if (files / HISTORY).is_file():
        history = read_table(files / HISTORY, mapping)
    else:
        rows = [row for file in sorted(path.glob("run-*.wandb")) for row in _history(file)]
        printed = files / CONSOLE
        if not rows and printed.is_file():
            rows = printed_rows(printed.read_text(encoding="utf-8", errors="replace").splitlines())
        if not rows:
            raise KeelError(f"{path} has no readable history: export it as CSV, or pip install 'keel-rl[wandb]'")
        history = history_of(path, rows, mapping)
    config = keel_options(history.source, _options(files / CONFIG))
    missing = () if config else history.missing
    return replace(history, path=path, config=config, missing=missing)


def _options(path: Path) -> dict[str, Any]:
    """The trainer's options, each stored under `value`."""
    try:
        tree = check_depth(yaml.safe_load(path.read_text(encoding="utf-8", errors="replace")))
    except (OSError, yaml.YAMLError, ValueError, RecursionError):
        return {}
    values = tree.items() if isinstance(tree, Mapping) else ()
    return {str(name): row.get("value") for name, row in values if isinstance(row, Mapping)}


def _history(path: Path) -> list[dict[str, Any]]:
    """Rows of the binary file; empty if W&B is not installed or the file cannot be read."""
    try:
        from wandb.proto import wandb_internal_pb2
    except ImportError:
        return []
    records: Any = wandb_internal_pb2  # its names are created at import time
    rows = []
    for data in _log_records(path.read_bytes()):
        record = records.Record()
        try:
            record.ParseFromString(data)
        except Exception:  # a record of an unknown version may raise anything
            continue
        if record.HasField("history"):
            items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            row = {name: _value(text) for name, text in items.items()}
            rows.append({"_step": record.history.step.num, **row})
    return rows


def _value(text: str) -> Any:
    try:
        value = parse_json(text)
    except ValueError:
        return None
    return None if isinstance(value, str) else value


def _log_records(data: bytes) -> Iterator[bytes]:
    """Records of a LevelDB log after W&B's 7-byte header. A record may span several blocks."""
    position, parts = 7, b""
    while position + 7 <= len(data):
        if BLOCK - position % BLOCK < 7:  # the rest of the block is too short for a header
            position += BLOCK - position % BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a full record, or its last part
            yield parts
            parts = b""
        elif kind not in (2, 3):  # padding, or not a log
            return


# ------------------------------------------------------------------------ TensorBoard

EVENTS = "events.out.tfevents.*"


def event_folders(path: Path) -> list[Path]:
    """Folders at or below `path` with event files, the largest first."""
    size: dict[Path, int] = {}
    for file in path.rglob(EVENTS):
        size[file.parent] = size.get(file.parent, 0) + file.stat().st_size
    return sorted(size, key=lambda folder: (-size[folder], str(folder)))


def read_tensorboard(path: Path, mapping: dict[str, str] | None = None) -> History:
    """Read the folder with the most data below `path` and list the others in a note."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise KeelError("reading TensorBoard files needs tensorboard: pip install 'keel-rl[tensorboard]'") from error
    folder, *others = event_folders(path)
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    series: dict[str, Series] = {}
    for tag in events.Tags()["scalars"]:
        series[tag] = in_order((event.step, event.value) for event in events.Scalars(tag))
    for tag in events.Tags()["tensors"]:  # newer writers store scalars as tensors
        points = [(event.step, event.tensor_proto) for event in events.Tensors(tag)]
        if all(len(proto.float_val) == 1 for _, proto in points):
            series[tag] = in_order((step, proto.float_val[0]) for step, proto in points)
    note = f"read {len(series)} scalars of the TensorBoard files in {folder}"
    history = named_history(folder, series, mapping or {}, "tag", sorted(series), note)
    also = (
        [f"other folders with event files: {', '.join(map(str, others))}; give one of them to read it"]
        if others
        else []
    )
    source = "TensorBoard" if history.source == "table" else history.source
    return replace(history, path=path, source=source, notes=(*history.notes, *also))
