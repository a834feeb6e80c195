"""Readers of W&B folders (`wandb/run-…`: history, console output, config.yaml) and TensorBoard folders."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from keel.base.errors import KeelError
from keel.base.files import check_depth, parse_json
from keel.doctor.history import History, Series, in_order
from keel.doctor.names import keel_options
from keel.doctor.readers.table import history_of, named_history, printed_rows, read_table

HISTORY, CONFIG, PRINTED = "wandb-history.jsonl", "config.yaml", "output.log"
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
        printed = files / PRINTED
        if not rows and printed.is_file():
            rows = printed_rows(printed.read_text(encoding="utf-8", errors="replace").splitlines())
        if not rows:
            raise KeelError(f"{path} has no history to be read: export it as CSV, or pip install 'keel-rl[wandb]'")
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
    also = [f"event files also in {', '.join(map(str, others))}: name one to have it read"] if others else []
    source = "TensorBoard" if history.source == "table" else history.source
    return replace(history, path=path, source=source, notes=(*history.notes, *also))
