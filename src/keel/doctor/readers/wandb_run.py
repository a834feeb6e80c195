"""A run folder of W&B (`wandb/run-…`): its history, or what was printed, and the options in its config.yaml."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from keel.base.errors import KeelError
from keel.base.files import check_depth, parse_json
from keel.doctor.history import History
from keel.doctor.names import keel_options
from keel.doctor.readers.table import history_of, printed_rows, read_table

HISTORY, CONFIG, PRINTED = "wandb-history.jsonl", "config.yaml", "output.log"
BLOCK = 32768  # of the log format of LevelDB, which the binary file has


def is_wandb_run(path: Path) -> bool:
    """Whether a folder is one run of W&B's."""
    return path.is_dir() and (any(path.glob("run-*.wandb")) or (path / "files" / "wandb-summary.json").is_file())


def read_wandb(path: Path, mapping: dict[str, str] | None = None) -> History:
    """The history as far as it can be read: of an old version's JSONL, of the binary file, of the console."""
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
    """The trainer's options: each is under `value`."""
    try:
        tree = check_depth(yaml.safe_load(path.read_text(encoding="utf-8", errors="replace")))
    except (OSError, yaml.YAMLError, ValueError, RecursionError):
        return {}
    values = tree.items() if isinstance(tree, Mapping) else ()
    return {str(name): row.get("value") for name, row in values if isinstance(row, Mapping)}


def _history(path: Path) -> list[dict[str, Any]]:
    """Rows of the binary file; none where W&B is not installed or the file is another."""
    try:
        from wandb.proto import wandb_internal_pb2
    except ImportError:
        return []
    records: Any = wandb_internal_pb2  # whose names are made as it is loaded
    rows = []
    for data in _log_records(path.read_bytes()):
        record = records.Record()
        try:
            record.ParseFromString(data)
        except Exception:  # any error of the protocol's library: the record is of another version
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
    """Records of a LevelDB log behind W&B's header of seven bytes; a record may go over several blocks."""
    position, parts = 7, b""
    while position + 7 <= len(data):
        if BLOCK - position % BLOCK < 7:  # the rest of a block is too short for a header
            position += BLOCK - position % BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", data, position)
        parts += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""
        elif kind not in (2, 3):  # padding, or no log
            return
