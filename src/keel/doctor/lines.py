"""Read a JSON-lines file that another process appends to; each read parses only new lines."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import Any, BinaryIO

from keel.base.files import json_lines

Record = dict[str, Any]
_MARK = 64  # bytes before the read position, compared to detect a rewritten file


class GrowingLines:
    """The records of a growing JSON-lines file.

    A file that shrank, was replaced, or differs just before the read position is read from the start, because a resume
    or a rollback truncates it. If it is larger than 2 × `limit` bytes, only the first and last `limit` bytes are kept,
    rounded to whole lines.
    """

    def __init__(self, path: Path, limit: int | None = None) -> None:
        self.path = path
        self._limit = limit
        self._restart(None)

    def _restart(self, identity: tuple[int, int] | None) -> None:
        self._identity = identity
        self._offset = 0
        self._mark = b""
        self._head: list[Record] = []
        self._head_bytes = 0
        self._tail: deque[tuple[Record, int]] = deque()
        self._tail_bytes = 0
        self._unreadable = 0
        self._last_unreadable = False
        self._left_out = False

    def read(self, notes: list[str]) -> tuple[Record, ...]:
        """All records so far; an incomplete last line is skipped, with a note."""
        try:
            with self.path.open("rb") as file:
                self._begin(file)
                torn = self._take(file)
        except FileNotFoundError:
            self._restart(None)
            notes.append(f"{self.path.name} does not exist")
            return ()
        except OSError as error:
            self._restart(None)
            notes.append(f"{self.path.name} cannot be read: {error.strerror or error}")
            return ()
        return self._records(torn, notes)

    def _begin(self, file: BinaryIO) -> None:
        """Seek to the read position, or to the start of a new file."""
        status = os.fstat(file.fileno())
        identity = (status.st_dev, status.st_ino)
        same = identity == self._identity and status.st_size >= self._offset
        if same:
            file.seek(self._offset - len(self._mark))
            same = file.read(len(self._mark)) == self._mark
        if not same:
            self._restart(identity)
            file.seek(0)
            if self._limit is not None and status.st_size > 2 * self._limit:
                self._skip_middle(file, status.st_size, self._limit)

    def _skip_middle(self, file: BinaryIO, size: int, limit: int) -> None:
        head = file.read(limit)
        self._parse(head[: head.rfind(b"\n") + 1], first=True)
        file.seek(size - limit)
        file.readline()
        self._offset = file.tell()
        self._left_out = True

    def _take(self, file: BinaryIO) -> bytes:
        """Parse the complete lines and return the rest."""
        data = file.read()
        end = data.rfind(b"\n") + 1
        self._parse(data[:end], first=self._offset == 0)
        self._offset += end
        self._mark = (self._mark + data[max(0, end - _MARK) : end])[-_MARK:]
        return data[end:]

    def _parse(self, data: bytes, *, first: bool) -> None:
        lines = data.split(b"\n")[:-1]
        if not first:
            lines.insert(0, b"")  # only the first line of a file may have a byte order mark
        for number, record in json_lines(lines):
            self._last_unreadable = isinstance(record, str)
            if isinstance(record, str):
                self._unreadable += 1
            else:
                self._keep(record, len(lines[number - 1]) + 1)

    def _keep(self, record: Record, size: int) -> None:
        if self._limit is None or (not self._tail and self._head_bytes + size <= self._limit):
            self._head.append(record)
            self._head_bytes += size
            return
        self._tail.append((record, size))
        self._tail_bytes += size
        while self._tail_bytes > self._limit and self._head_bytes + self._tail_bytes > 2 * self._limit:
            self._tail_bytes -= self._tail.popleft()[1]
            self._left_out = True

    def _records(self, torn: bytes, notes: list[str]) -> tuple[Record, ...]:
        parsed = [record for _, record in json_lines([torn] if self._offset == 0 else [b"", torn])]
        whole = [record for record in parsed if not isinstance(record, str)]
        incomplete = len(whole) < len(parsed) or (not parsed and self._last_unreadable)
        unread = self._unreadable - (incomplete and not parsed)
        records = (*self._head, *(record for record, _ in self._tail), *whole)
        if self._limit is not None and self._left_out:
            notes.append(f"{self.path.name} is large: only its first and last {self._limit // 2**20} MiB were read")
        if incomplete:
            notes.append(f"the last line of {self.path.name} is incomplete and was skipped")
        if unread:
            notes.append(f"{unread} line(s) of {self.path.name} could not be read")
        if not records:
            notes.append(f"{self.path.name} has no complete line yet")
        return records
