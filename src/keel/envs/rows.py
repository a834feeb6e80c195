"""Read rows with their locations from JSONL, JSON, parquet or CSV files, folders or hub datasets."""

from __future__ import annotations

import csv
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from keel.base.errors import KeelError, first_line, nearest, unknown
from keel.base.files import json_kind, json_lines, no_constant

SPLITS = ("train", "validation", "valid", "val", "dev", "test", "eval")
T = TypeVar("T")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(,[\w.-]+){0,2}")


@dataclass(frozen=True)
class DataRow:
    """One record and its location, such as `mine.jsonl:3`."""

    location: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class BrokenRow:
    """A record that cannot be used, and the reason."""

    location: str
    why: str


@dataclass(frozen=True)
class DataRows:
    """The rows of a source; `columns` is the union over rows."""

    source: str
    rows: tuple[DataRow, ...]
    broken: tuple[BrokenRow, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for row in self.rows for name in row.values))

    @property
    def files(self) -> tuple[str, ...]:
        """The locations of the rows without their lines."""
        locations = [row.location for row in self.rows] + [row.location for row in self.broken]
        return tuple(dict.fromkeys(location.rpartition(":")[0] for location in locations))


def read_rows(path: str | Sequence[str], split: str = "train") -> DataRows:
    """Read `data.path`: a file, a folder, a hub name (`path`, `path,name` or `path,name,split`), or a list of them.

    Invalid lines are listed in `broken`.
    """
    paths = [path] if isinstance(path, str) else list(path)
    if not paths:
        raise KeelError("data.path is an empty list: give a file, a folder or a hub name")
    several = [_read(name, split) for name in paths]
    result = several[0] if len(several) == 1 else _joined(paths, several)
    if not result.rows and not result.broken:
        raise KeelError(f"{result.source} is empty: give a file with rows")
    return result


def _joined(paths: Sequence[str], several: Sequence[DataRows]) -> DataRows:
    """The rows of several sources. If file names are equal, locations have the whole path."""
    names = [name for part in several for name in part.files]
    located = [_with_path(path, part) for path, part in zip(paths, several, strict=True)]
    read = set[Path]()
    for name in (name for part in located for name in part.files):
        if (file := Path(name).expanduser().resolve()) in read:
            raise KeelError(f"data.path names {name} twice: leave one out")
        read.add(file)
    several = located if len(set(names)) < len(names) else several
    rows = tuple(row for part in several for row in part.rows)
    broken = tuple(row for part in several for row in part.broken)
    return DataRows(f"{paths[0]} and {len(paths) - 1} more", rows, broken)


def _with_path(path: str, part: DataRows) -> DataRows:
    """The same rows, located by the path from `data.path`."""

    def whole(location: str) -> str:
        name, _, line = location.rpartition(":")
        file = Path(path, name)  # of a folder; the name of a file or of a hub dataset is in its path
        return f"{file if file.expanduser().exists() else path}:{line}"

    rows = tuple(replace(row, location=whole(row.location)) for row in part.rows)
    return replace(part, rows=rows, broken=tuple(replace(row, location=whole(row.location)) for row in part.broken))


def row_order(row: DataRow | BrokenRow) -> tuple[str, int]:
    """Sort key: file and line of a row."""
    file, _, line = row.location.rpartition(":")
    return file, int(line)


def handle_broken_rows(source: str, broken: Sequence[BrokenRow], on_broken: str) -> str | None:
    """Raise an error for broken rows, or with `data.on_broken: skip` return a note with their number."""
    if not broken:
        return None
    shown = ", ".join(item.location for item in broken[1:4]) + (", …" if len(broken) > 4 else "")
    more = f" ({len(broken) - 1} more: {shown})" if len(broken) > 1 else ""
    if on_broken == "error":
        first = broken[0]
        raise KeelError(f"{first.location}: {first.why}{more}; fix it, or skip such rows with data.on_broken=skip")
    return f"{source}: {len(broken)} broken rows skipped (data.on_broken=skip), the first at {broken[0].location}"


def convert_rows(rows: DataRows, convert: Callable[[DataRow], T], on_broken: str) -> tuple[list[T], tuple[str, ...]]:
    """Convert each row. A row for which `convert` raises a ValueError is broken. Returns a note on skipped rows too."""
    converted, broken = [], list(rows.broken)
    for row in rows.rows:
        try:
            converted.append(convert(row))
        except ValueError as error:
            broken.append(BrokenRow(row.location, str(error)))
    note = handle_broken_rows(rows.source, sorted(broken, key=row_order), on_broken)
    return converted, (note,) if note else ()


def _read(path: str, split: str) -> DataRows:
    file = Path(path).expanduser()
    if file.is_dir():
        return _folder(file, split)
    if file.is_file():
        if split != "train" and split.lower() not in _words(file.name):
            raise KeelError(
                f"data.split={split} has no effect for {path}: a file has no splits; leave it out, or give a folder "
                "or a hub name"
            )
        return _file(file)
    looks_like_a_file = file.suffix.lower() in READERS or path.startswith(("/", ".", "~")) or path.count("/") > 1
    if looks_like_a_file or not _HUB_NAME.fullmatch(path):
        siblings = [p.name for p in file.parent.iterdir()] if file.parent.is_dir() else []
        near = nearest(file.name, siblings, 0.6)
        hint = f"did you mean {file.parent / near}?" if near else "give a file, a folder or a hub name"
        raise KeelError(f"data.path: file {path} not found: {hint}")
    return _hub(path, split)


def _file(path: Path) -> DataRows:
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise KeelError(f"cannot read {path}: unknown file type {path.suffix!r}, use one of {', '.join(READERS)}")
    rows: list[DataRow] = []
    broken: list[BrokenRow] = []
    try:
        for number, record in reader(path):
            location = f"{path.name}:{number}"
            if isinstance(record, str):
                broken.append(BrokenRow(location, record))
            else:
                rows.append(DataRow(location, record))
    except OSError as error:
        raise KeelError(f"cannot read {path}: {error.strerror or error}") from error
    return DataRows(str(path), tuple(rows), tuple(broken))


# -------------------------------------------- readers: yield (number, record) or (number, reason why it is broken)

Records = Iterator[tuple[int, dict[str, Any] | str]]


def _jsonl(path: Path) -> Records:
    with path.open("rb") as lines:
        yield from json_lines(lines, strict=True)


def _json(path: Path) -> Records:
    """Read a list of objects, an object with one list, or JSONL in a .json file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"), parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        if str(error).startswith("Extra data"):
            yield from _jsonl(path)
            return
        raise KeelError(f"cannot read {path}: not JSON ({error})") from error
    if isinstance(content, dict):
        lists = [name for name, value in content.items() if isinstance(value, list)]
        if len(lists) != 1:
            raise KeelError(f"{path} contains one object: give a list of objects, or one object per line as .jsonl")
        content = content[lists[0]]
    if not isinstance(content, list):
        raise KeelError(f"{path} contains a JSON {json_kind(content)}: give a list of objects")
    for number, record in enumerate(content, start=1):
        yield number, record if isinstance(record, dict) else f"a JSON {json_kind(record)}, not an object"


def _csv(path: Path) -> Records:
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding="utf-8-sig", newline="") as text:
        reader, number = csv.reader(text, delimiter=delimiter, strict=True), 1
        try:
            header = next(reader, [])
            if len(set(header)) < len(header):
                twice = next(name for name in header if header.count(name) > 1)
                raise KeelError(f"{path}: the column {twice!r} occurs twice in the header")
            while True:
                number = reader.line_num + 1  # the first line of the row
                fields = next(reader, None)
                if fields is None:
                    return
                if not fields:
                    continue
                if len(fields) == len(header):
                    yield number, dict(zip(header, fields, strict=True))
                else:
                    yield number, f"{len(fields)} fields, but the header has {len(header)} columns"
        except csv.Error as error:
            raise KeelError(f"{path}:{number}: not CSV ({error})") from error
        except UnicodeDecodeError as error:
            raise KeelError(f"{path}:{_undecodable_line(path)}: not UTF-8 ({error.reason})") from error


def _undecodable_line(path: Path) -> int:
    """The number of the first line that is not UTF-8."""
    with path.open("rb") as lines:
        return next(number for number, line in enumerate(lines, start=1) if not _is_utf8(line))


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _parquet(path: Path) -> Records:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise KeelError(f"reading {path} needs pyarrow: pip install pyarrow") from error
    try:
        table = parquet.ParquetFile(path).read()  # only this file, so that folders named a=b do not become columns
    except pyarrow.ArrowException as error:
        raise KeelError(f"cannot read {path}: {first_line(error)}") from error
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


def _folder(folder: Path, split: str) -> DataRows:
    """Read a `save_to_disk` folder, or the files with the split in their path."""
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return _loaded(str(folder), split, lambda datasets: datasets.load_from_disk(str(folder)))
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix.lower() in READERS)
    if not files:
        raise KeelError(f"the folder {folder} has no data files: known types are {', '.join(READERS)}")
    name_parts = {file: _words(str(file.relative_to(folder))) for file in files}
    chosen = [file for file in files if split.lower() in name_parts[file]]
    if not chosen and split == "train":  # files without a split in their path are training data
        chosen = [file for file in files if not name_parts[file] & set(SPLITS)]
    if not chosen:
        names = ", ".join(str(file.relative_to(folder)) for file in files[:8])
        raise KeelError(f"the folder {folder} has no file of the split {split!r}: it has {names}; set data.split")
    parts = [_file(file) for file in chosen]
    source = str(chosen[0]) if len(chosen) == 1 else f"{folder} ({split})"
    prefix = {part.source: str(Path(part.source).relative_to(folder)) for part in parts}
    rows = (DataRow(f"{prefix[p.source]}:{r.location.rpartition(':')[2]}", r.values) for p in parts for r in p.rows)
    broken = (BrokenRow(f"{prefix[p.source]}:{b.location.rpartition(':')[2]}", b.why) for p in parts for b in p.broken)
    return DataRows(source, tuple(rows), tuple(broken))


def _words(name: str) -> set[str]:
    return set(re.split(r"[^a-z0-9]+", name.lower()))


def _hub(name: str, split: str) -> DataRows:
    path, *rest = name.split(",")
    hub_split = rest[1] if len(rest) > 1 else split
    return _loaded(name, hub_split, lambda datasets: datasets.load_dataset(path, *rest[:1], split=hub_split))


def _loaded(source: str, split: str, load: Callable[[Any], Any]) -> DataRows:
    try:
        import datasets
    except ImportError as error:
        raise KeelError(
            f"data.path={source} is not a local file, and hub datasets need the package datasets: pip install datasets"
        ) from error
    try:
        with _quiet("huggingface_hub", "datasets"):
            data = load(datasets)
    except Exception as error:  # hub errors have many types
        raise KeelError(f"cannot load data.path={source}, split {split!r}: {first_line(error)}") from error
    if isinstance(data, Mapping):
        if split not in data:
            raise unknown(f"split of {source}", split, data)
        data = data[split]
    stem = Path(source.partition(",")[0]).name
    rows = (DataRow(f"{stem}/{split}:{number}", dict(record)) for number, record in enumerate(data, start=1))
    return DataRows(f"{source} ({split})", tuple(rows))


@contextmanager
def _quiet(*libraries: str) -> Iterator[None]:
    """Silence the libraries' logs about retries."""
    loggers = [logging.getLogger(name) for name in libraries]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
