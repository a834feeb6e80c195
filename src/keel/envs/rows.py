"""Rows of a user's data: JSONL, JSON, parquet, CSV, a folder of them or a hub dataset, each row with its place."""

from __future__ import annotations

import csv
import difflib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keel.base.errors import KeelError, unknown
from keel.base.files import json_kind, json_lines, no_constant

SPLITS = ("train", "validation", "valid", "val", "dev", "test", "eval")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(,[\w.-]+){0,2}")


@dataclass(frozen=True)
class DataRow:
    """One record and where it stands, such as `mine.jsonl:3`."""

    place: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Broken:
    """A record that cannot be used, and why."""

    place: str
    why: str


@dataclass(frozen=True)
class Rows:
    """What was read: `columns` are all that occur, `source` is for messages."""

    source: str
    rows: tuple[DataRow, ...]
    broken: tuple[Broken, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for row in self.rows for name in row.values))


def read_rows(path: str | Sequence[str], split: str = "train") -> Rows:
    """All rows behind `data.path`: a file, a folder, a hub name (`path`, `path,name` or `path,name,split`), or several.

    Lines that are no records are listed as broken, for the caller to refuse or count.
    """
    paths = [path] if isinstance(path, str) else list(path)
    if not paths:
        raise KeelError("data.path is an empty list: give a file, a folder or a hub name")
    several = [_read(one, split) for one in paths]
    if len(several) == 1:
        found = several[0]
    else:
        rows = tuple(row for part in several for row in part.rows)
        places = {row.place for row in rows}
        if len(places) < len(rows):  # files of one name in several folders: then the whole path tells them apart
            rows = tuple(
                DataRow(f"{one}:{row.place.rpartition(':')[2]}", row.values)
                for one, part in zip(paths, several, strict=True)
                for row in part.rows
            )
        found = Rows(f"{paths[0]} and {len(paths) - 1} more", rows, tuple(b for part in several for b in part.broken))
    if not found.rows and not found.broken:
        raise KeelError(f"{found.source} is empty: it holds no row")
    return found


def settle(source: str, broken: Sequence[Broken], on_broken: str) -> str | None:
    """Refuse broken rows by their places, or with `data.on_broken: skip` return the note that counts them."""
    if not broken:
        return None
    shown = ", ".join(item.place for item in broken[1:4]) + (", …" if len(broken) > 4 else "")
    more = f" ({len(broken) - 1} more: {shown})" if len(broken) > 1 else ""
    if on_broken == "error":
        first = broken[0]
        raise KeelError(f"{first.place}: {first.why}{more}; mend it, or leave such rows out with data.on_broken=skip")
    return f"{source}: {len(broken)} broken rows left out (data.on_broken=skip), the first at {broken[0].place}"


def _read(path: str, split: str) -> Rows:
    place = Path(path).expanduser()
    if place.is_dir():
        return _folder(place, split)
    if place.is_file():
        if split != "train" and split.lower() not in _words(place.name):
            raise KeelError(
                f"data.split={split} has no meaning for {path}: a file has no splits; leave it out, or give a folder "
                "or a hub name"
            )
        return _file(place)
    looks_like_a_file = place.suffix.lower() in READERS or path.startswith(("/", ".", "~")) or path.count("/") > 1
    if looks_like_a_file or not _HUB_NAME.fullmatch(path):
        there = [p.name for p in place.parent.iterdir()] if place.parent.is_dir() else []
        near = difflib.get_close_matches(place.name, there, n=1)
        hint = f"did you mean {place.parent / near[0]}?" if near else "give a file, a folder or a hub name"
        raise KeelError(f"data.path: there is no file {path}: {hint}")
    return _hub(path, split)


def _file(path: Path) -> Rows:
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise KeelError(f"cannot read {path}: its ending is {path.suffix!r}, known are {', '.join(READERS)}")
    rows: list[DataRow] = []
    broken: list[Broken] = []
    try:
        for number, record in reader(path):
            place = f"{path.name}:{number}"
            if isinstance(record, str):
                broken.append(Broken(place, record))
            else:
                rows.append(DataRow(place, record))
    except OSError as error:
        raise KeelError(f"cannot read {path}: {error.strerror or error}") from error
    return Rows(str(path), tuple(rows), tuple(broken))


# ------------------------------------------------------- readers: (number, record), or (number, why it is none)

Records = Iterator[tuple[int, dict[str, Any] | str]]


def _jsonl(path: Path) -> Records:
    with path.open("rb") as lines:
        yield from json_lines(lines, strict=True)


def _json(path: Path) -> Records:
    """A list of objects; a file of this ending that is JSONL all the same is read as that."""
    try:
        whole = json.loads(path.read_text(encoding="utf-8-sig"), parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        if str(error).startswith("Extra data"):
            yield from _jsonl(path)
            return
        raise KeelError(f"cannot read {path}: not JSON ({error})") from error
    if isinstance(whole, dict):
        lists = [name for name, value in whole.items() if isinstance(value, list)]
        if len(lists) != 1:
            raise KeelError(f"{path} holds one object: give a list of objects, or one object a line as .jsonl")
        whole = whole[lists[0]]
    if not isinstance(whole, list):
        raise KeelError(f"{path} holds a JSON {json_kind(whole)}: give a list of objects")
    for number, record in enumerate(whole, start=1):
        yield number, record if isinstance(record, dict) else f"a JSON {json_kind(record)}, not an object"


def _csv(path: Path) -> Records:
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        try:
            header = next(reader, [])
            if len(set(header)) < len(header):
                twice = next(name for name in header if header.count(name) > 1)
                raise KeelError(f"{path}: the column {twice!r} occurs twice in the first line")
            while True:
                number = reader.line_num + 1
                fields = next(reader, None)
                if fields is None:
                    return
                if not fields:
                    continue
                if len(fields) == len(header):
                    yield number, dict(zip(header, fields, strict=True))
                else:
                    yield number, f"{len(fields)} fields where the first line names {len(header)} columns"
        except (csv.Error, UnicodeDecodeError) as error:
            raise KeelError(f"{path}:{reader.line_num + 1}: not CSV in UTF-8 ({error})") from error


def _parquet(path: Path) -> Records:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise KeelError(f"reading {path} needs pyarrow: pip install pyarrow") from error
    try:
        table = parquet.ParquetFile(path).read()  # this file alone: folders named a=b are no columns
    except pyarrow.ArrowException as error:
        raise KeelError(f"cannot read {path}: {next(iter(str(error).splitlines()), 'not parquet')}") from error
    yield from enumerate(table.to_pylist(), start=1)


READERS: dict[str, Callable[[Path], Records]] = {
    ".jsonl": _jsonl,
    ".ndjson": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
}


# --------------------------------------------------------------------------------------------- folders and hubs


def _folder(folder: Path, split: str) -> Rows:
    """A `save_to_disk` folder, or files that have the split in their name or their folder's."""
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return _loaded(str(folder), split, lambda datasets: datasets.load_from_disk(str(folder)))
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix.lower() in READERS)
    if not files:
        raise KeelError(f"the folder {folder} holds no data: known endings are {', '.join(READERS)}")
    words = {file: _words(str(file.relative_to(folder))) for file in files}
    chosen = [file for file in files if split.lower() in words[file]]
    if not chosen and split == "train":  # files that name no split are for training
        chosen = [file for file in files if not words[file] & set(SPLITS)]
    if not chosen:
        names = ", ".join(str(file.relative_to(folder)) for file in files[:8])
        raise KeelError(f"the folder {folder} has no file of the split {split!r}: it holds {names}; set data.split")
    parts = [_file(file) for file in chosen]
    source = str(chosen[0]) if len(chosen) == 1 else f"{folder} ({split})"
    prefix = {part.source: str(Path(part.source).relative_to(folder)) for part in parts}
    rows = (DataRow(f"{prefix[p.source]}:{r.place.rpartition(':')[2]}", r.values) for p in parts for r in p.rows)
    broken = (Broken(f"{prefix[p.source]}:{b.place.rpartition(':')[2]}", b.why) for p in parts for b in p.broken)
    return Rows(source, tuple(rows), tuple(broken))


def _words(name: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", name.lower()))


def _hub(name: str, split: str) -> Rows:
    path, *rest = name.split(",")
    wanted = rest[1] if len(rest) > 1 else split
    return _loaded(name, wanted, lambda datasets: datasets.load_dataset(path, *rest[:1], split=wanted))


def _loaded(source: str, split: str, load: Callable[[Any], Any]) -> Rows:
    try:
        import datasets
    except ImportError as error:
        raise KeelError(
            f"data.path={source} is no file here, and a hub needs datasets: pip install datasets"
        ) from error
    try:
        with _quiet("huggingface_hub", "datasets"):
            found = load(datasets)
    except Exception as error:  # a hub fails in many ways; each is one line to the user
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise KeelError(f"cannot load data.path={source}, split {split!r}: {first}") from error
    if isinstance(found, Mapping):
        if split not in found:
            raise unknown(f"split of {source}", split, found)
        found = found[split]
    stem = Path(source.partition(",")[0]).name
    return Rows(f"{source} ({split})", tuple(_numbered(f"{stem}/{split}", found)))


@contextmanager
def _quiet(*libraries: str) -> Iterator[None]:
    """Without the libraries' lines about each retry: what became of it is one line, at the end."""
    loggers = [logging.getLogger(name) for name in libraries]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _numbered(name: str, records: Iterable[Mapping[str, Any]]) -> Iterator[DataRow]:
    for number, record in enumerate(records, start=1):
        yield DataRow(f"{name}:{number}", dict(record))
