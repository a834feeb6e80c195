"""An SQLite cache of engine analyses, shared by several processes."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from keel.base.errors import KeelError

Lines = tuple[tuple[str, float], ...]  # moves with their evaluations in pawns, best first
_TABLES = """
CREATE TABLE IF NOT EXISTS lines (key TEXT PRIMARY KEY, lines TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS engines (file TEXT PRIMARY KEY, name TEXT NOT NULL);
"""
_LINES, _ENGINE = "SELECT lines FROM lines WHERE key = ?", "SELECT name FROM engines WHERE file = ?"


class AnalysisCache:
    """Analysis lines by key and engine names by file. Writes are atomic.

    Entries that cannot be read are analysed again.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(self.path, timeout=60.0, check_same_thread=False, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_TABLES)
        except (OSError, sqlite3.Error) as error:
            raise KeelError(
                f"the engine's cache {self.path} cannot be used ({error}): delete it, or set task.engine.cache"
            ) from error
        self._lock = threading.Lock()

    def lines(self, keys: Iterable[str]) -> dict[str, Lines]:
        """Those of `keys` that are known."""
        known: dict[str, Lines] = {}
        for key in keys:
            with suppress(ValueError, TypeError):  # an entry that is no longer what was written
                lines = tuple((str(move), float(value)) for move, value in json.loads(self._value(_LINES, key) or "[]"))
                if lines:
                    known[key] = lines
        return known

    def put_lines(self, key: str, lines: Lines) -> None:
        """Store the lines of a position; the latest replaces what was there, a damaged entry too."""
        with self._lock:
            self._db.execute("INSERT OR REPLACE INTO lines VALUES (?, ?)", (key, json.dumps(lines)))

    def engine(self, file: str) -> str | None:
        """The name of the engine in a file, if it is known."""
        return self._value(_ENGINE, file)

    def put_engine(self, file: str, name: str) -> None:
        """Remember the name of the engine in a file, where the disk takes it."""
        with self._lock, suppress(sqlite3.Error):
            self._db.execute("INSERT OR REPLACE INTO engines VALUES (?, ?)", (file, name))

    def _value(self, query: str, key: str) -> str | None:
        with self._lock, suppress(sqlite3.Error):
            row = self._db.execute(query, (key,)).fetchone()
            return None if row is None else str(row[0])
        return None


def default_path() -> Path:
    """`keel/stockfish.sqlite` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "keel" / "stockfish.sqlite"
