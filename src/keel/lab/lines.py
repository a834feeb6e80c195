"""The lines of a file that another process appends to: each read parses only what is new."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import Any, BinaryIO

from keel.base.files import json_lines

Record = dict[str, Any]
_MARK = 64  # bytes before the place where reading stopped: they tell a file that was written anew


class GrowingLines:
    """The records of a file of JSON lines, read again and again while it grows.

    A file that shrank, was replaced, or differs just before the place where reading stopped is read from its beginning,
    since a resume or a rollback cuts lines off. Of more than twice `limit` bytes, the first and the last `limit` are
    kept, on whole lines.
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
        """All records so far; a torn last line is left out and said, since a running run may have one."""
        try:
            with self.path.open("rb") as file:
                self._begin(file)
                torn = self._take(file)
        except FileNotFoundError:
            self._restart(None)
            notes.append(f"{self.path.name} is not there")
            return ()
        except OSError as error:
            self._restart(None)
            notes.append(f"{self.path.name} cannot be read: {error.strerror or error}")
            return ()
        return self._records(torn, notes)

    def _begin(self, file: BinaryIO) -> None:
        """Stand where reading stopped, or at the beginning of a file that is not the one of before."""
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
        """Parse the whole lines from here on, and return what follows the last of them."""
        data = file.read()
        end = data.rfind(b"\n") + 1
        self._parse(data[:end], first=self._offset == 0)
        self._offset += end
        self._mark = (self._mark + data[max(0, end - _MARK) : end])[-_MARK:]
        return data[end:]

    def _parse(self, data: bytes, *, first: bool) -> None:
        lines = data.split(b"\n")[:-1]
        if not first:
            lines.insert(0, b"")  # only a file's first line may begin with a byte order mark
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
            notes.append(f"the last line of {self.path.name} is incomplete and was left out")
        if unread:
            notes.append(f"{unread} line(s) of {self.path.name} could not be read")
        if not records:
            notes.append(f"{self.path.name} has no complete line yet")
        return records
