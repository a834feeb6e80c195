"""Crash-safe files: whole files are replaced by rename, JSON lines are appended one at a time."""

from __future__ import annotations

import errno
import json
import math
import os
import threading
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from keel.base.errors import KeelError

MAX_DEPTH = 100  # nesting of lists and objects; deeper input could overflow the recursion


def encode(record: Mapping[str, Any], *, indent: int | None = None) -> str:
    """Strict JSON of a record: NaN and infinities become null, and `nonfinite` lists their names."""
    nonfinite: list[str] = []
    plain = {str(key): _plain(value, str(key), nonfinite) for key, value in record.items()}
    if nonfinite:
        plain["nonfinite"] = nonfinite
    return json.dumps(plain, ensure_ascii=False, allow_nan=False, indent=indent)


def _plain(value: Any, name: str, nonfinite: list[str]) -> Any:
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        nonfinite.append(name)
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{name}.{key}", nonfinite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{name}.{index}", nonfinite) for index, item in enumerate(value)]
    if hasattr(value, "tolist"):  # numpy and torch values, without importing either
        return _plain(value.tolist(), name, nonfinite)
    return str(value)


def to_bytes(text: str) -> bytes:
    """Encode as UTF-8. A lone surrogate (half a character) becomes its JSON escape."""
    return text.encode("utf-8", "backslashreplace")


@contextmanager
def one_line_errors(doing: str) -> Iterator[None]:
    """Turn an OSError into a KeelError that names the file and the fix."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise KeelError(f"{doing}: the disk is full; free some space, then resume with --resume") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise KeelError(f"{doing}: no permission to write there; choose another folder with run.dir=...") from error
        raise KeelError(f"{doing}: {error.strerror or error}") from error


def write_atomic(path: Path, data: bytes | str, mode: int = 0o666) -> None:
    """Replace a file atomically: write a temporary file beside it, fsync, rename, sync the folder."""
    with one_line_errors(f"cannot write {path}"):
        name = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(to_bytes(data) if isinstance(data, str) else data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make a rename in this folder durable, if the file system supports it."""
    with suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class JsonlFile:
    """A JSON lines file without partial lines: opening cuts a partial last line, a failed append is undone."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with one_line_errors(f"cannot write {path}"):
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._cut_torn_end()

    def _cut_torn_end(self) -> None:
        size = os.fstat(self._handle).st_size
        end = size
        while end > 0:
            start = max(0, end - 65536)
            newline = os.pread(self._handle, end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            os.ftruncate(self._handle, end)

    def append(self, record: Mapping[str, Any]) -> None:
        """Append one record as a line. The kernel has it when this returns, so a later kill -9 cannot lose it."""
        data = to_bytes(encode(record) + "\n")
        before = os.fstat(self._handle).st_size
        with one_line_errors(f"cannot append to {self.path}"):
            try:
                written = 0
                while written < len(data):
                    written += os.write(self._handle, data[written:])
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._handle, before)
                raise

    def sync(self) -> None:
        """Flush to disk, so that a power cut cannot lose lines."""
        with one_line_errors(f"cannot write {self.path}"):
            os.fsync(self._handle)

    def close(self) -> None:
        """Close the handle; safe to call twice."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def drop_lines_after(path: Path, step: int, history: Collection[str] = ()) -> int:
    """Drop the lines past `step`, and unreadable ones, from a JSON lines file atomically; return how many.

    All lines up to the last one whose `kind` is in `history` stay: they belong to earlier attempts.
    """
    before, dropped = _split_at_step(path, step, history)
    if dropped:
        write_atomic(path, b"".join(before))
    return len(dropped)


def lines_after(path: Path, step: int, history: Collection[str] = ()) -> bytes:
    """The lines that `drop_lines_after` would drop, verbatim."""
    return b"".join(_split_at_step(path, step, history)[1])


def _split_at_step(path: Path, step: int, history: Collection[str]) -> tuple[list[bytes], list[bytes]]:
    """Return (lines that `drop_lines_after` keeps, lines that it drops)."""
    before: list[bytes] = []
    past: list[bytes] = []
    lines = _lines(path)
    last_history = max(
        (index for index, line in enumerate(lines) if history and _field(line, "kind") in history), default=-1
    )
    for index, line in enumerate(lines):
        (before if index <= last_history or _within(line, step) else past).append(line + b"\n")
    return before, past


def read_json(path: Path) -> Any:
    """The value in a JSON file; None if it is missing, unreadable or not JSON."""
    try:
        return parse_json(path.read_bytes())
    except (OSError, ValueError):
        return None


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a JSON lines file, [] if there is no file; lines that are not JSON objects are skipped."""
    return [record for _, record in json_lines(_lines(path)) if not isinstance(record, str)]


def unreadable_lines(path: Path) -> list[int]:
    """The numbers of the lines that are not JSON objects."""
    return [number for number, record in json_lines(_lines(path)) if isinstance(record, str)]


def json_lines(lines: Iterable[bytes], *, strict: bool = False) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yield (number, record or error text) for every line that is not blank; see `json_object`."""
    for number, line in enumerate(lines, start=1):
        text = line.removeprefix(BOM_UTF8) if number == 1 else line
        if text.strip():
            yield number, json_object(text, strict=strict)


def json_object(line: bytes, *, strict: bool = False) -> dict[str, Any] | str:
    """The JSON object of a line, or an error text. `strict` refuses NaN and invalid UTF-8."""
    try:
        text = line.decode("utf-8", "strict" if strict else "replace")
        record = parse_json(text, parse_constant=no_constant if strict else None)
    except UnicodeDecodeError as error:
        return f"not UTF-8 (byte {error.start + 1})"
    except ValueError as error:
        return f"not JSON ({error})"
    return record if isinstance(record, dict) else f"a JSON {json_kind(record)}, not an object"


def parse_json(text: str | bytes, *, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """The value of a JSON text; ValueError if it is not JSON or nested more than MAX_DEPTH deep."""
    try:
        value = json.loads(text, parse_constant=parse_constant)
    except RecursionError:
        raise ValueError(f"nested more than {MAX_DEPTH} deep") from None
    return check_depth(value)


def check_depth(value: Any) -> Any:
    """Return the value; ValueError if it is nested more than MAX_DEPTH deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = (item.values() if isinstance(item, Mapping) else item for item in level if _is_container(item))
        level = [item for items in inner for item in items if _is_container(item)]
        if not level:
            return value
    raise ValueError(f"nested more than {MAX_DEPTH} deep")


def _is_container(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple)


def json_kind(value: Any) -> str:
    """The JSON name of a value's type, for messages."""
    kinds = {list: "list", str: "text", bool: "boolean", int: "number", float: "number", type(None): "null"}
    return kinds.get(type(value), type(value).__name__)


def no_constant(name: str) -> NoReturn:
    """The `parse_constant` argument that refuses NaN and infinities."""
    raise ValueError(f"{name} is no JSON value")


def _lines(path: Path) -> list[bytes]:
    if not path.exists():
        return []
    with one_line_errors(f"cannot read {path}"):
        return [line for line in path.read_bytes().split(b"\n") if line]


def _field(line: bytes, name: str) -> Any:
    record = json_object(line)
    return None if isinstance(record, str) else record.get(name)


def _within(line: bytes, step: int) -> bool:
    record = json_object(line)
    if isinstance(record, str):
        return False
    at = record.get("step")
    return not isinstance(at, int | float) or at <= step
