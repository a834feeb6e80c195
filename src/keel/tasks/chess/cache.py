"""What an engine said, on disk: an SQLite file that several processes may read and write at once."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterable
from pathlib import Path

from keel.errors import KeelError

Lines = tuple[tuple[str, float], ...]  # moves with their evaluations in pawns, best first
_TABLES = """
CREATE TABLE IF NOT EXISTS lines (key TEXT PRIMARY KEY, lines TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS engines (file TEXT PRIMARY KEY, name TEXT NOT NULL);
"""


class Cache:
    """Lines by key and engines' names by file. Each entry is written whole or not at all."""

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
        found: dict[str, Lines] = {}
        with self._lock:
            for key in keys:
                row = self._db.execute("SELECT lines FROM lines WHERE key = ?", (key,)).fetchone()
                if row is not None:
                    found[key] = tuple((move, value) for move, value in json.loads(row[0]))
        return found

    def put_lines(self, key: str, lines: Lines) -> None:
        """Remember what was said of a position; the first to say it stays."""
        with self._lock:
            self._db.execute("INSERT OR IGNORE INTO lines VALUES (?, ?)", (key, json.dumps(lines)))

    def engine(self, file: str) -> str | None:
        """The name of the engine in a file, if it was asked before."""
        with self._lock:
            row = self._db.execute("SELECT name FROM engines WHERE file = ?", (file,)).fetchone()
        return None if row is None else str(row[0])

    def put_engine(self, file: str, name: str) -> None:
        """Remember the name of the engine in a file."""
        with self._lock:
            self._db.execute("INSERT OR REPLACE INTO engines VALUES (?, ?)", (file, name))


def default_path() -> Path:
    """`keel/stockfish.sqlite` in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "keel" / "stockfish.sqlite"
