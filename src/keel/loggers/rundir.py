"""The run directory: the files that training writes and all other tools read.

`JsonlLogger`, the primary logger, writes its JSON lines. `RunLock` allows one writer; the kernel releases it when that
process dies.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock, Timeout

from keel.base.errors import KeelError
from keel.base.files import (
    JsonlFile,
    drop_lines_after,
    encode,
    lines_after,
    one_line_errors,
    parse_json,
    read_records,
    unreadable_lines,
    write_atomic,
)
from keel.base.redact import redact_data
from keel.loggers.base import Logger

_WAIT_S = 0.2  # seconds; `is_locked` in another process briefly holds a shared lock
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)  # a file system without locks

CONFIG = "config.yaml"
ENV = "env.json"
METRICS = "metrics.jsonl"
ROLLOUTS = "rollouts.jsonl"
EVAL = "eval.jsonl"
EVENTS = "events.jsonl"
TENSORBOARD = "tensorboard"
CHECKPOINTS = "checkpoints"
FINDINGS = "findings.json"
SUMMARY = "summary.json"
REPORT = "report.html"
LOCK = ".lock"
WANDB = "wandb.json"
WARMSTART = "warmstart"
SKIPPED = "skipped"
ABANDONED = "abandoned"
ROLLBACK = "rollback.json"

LINE_FILES = (METRICS, ROLLOUTS, EVAL, EVENTS)
# Files of a run that started training; a run that failed earlier may be overwritten.
_RESULTS = (METRICS, ROLLOUTS, EVAL, CHECKPOINTS, FINDINGS, SUMMARY)
_WRITTEN = (CONFIG, ENV, *LINE_FILES, TENSORBOARD, CHECKPOINTS, FINDINGS, SUMMARY, REPORT, WANDB, "wandb")
_ALL_FILES = (*_WRITTEN, WARMSTART, SKIPPED, ABANDONED, ROLLBACK)
# Events that reset the run to an earlier step: lines before them are never cut.
HISTORY = ("rollback", "stop")


class RunExists(KeelError):
    """The folder of a new run contains another run."""


class RunDirectory:
    """One run's folder, locked for one writer: whole files are replaced atomically, lines are appended complete.

    Steps count finished updates. Measurements before training have step 0, the first update writes step 1, and
    `checkpoints/step-N` holds the state after N updates. Write all lines of step N before that checkpoint is saved;
    `truncate_after(N)` on resume then restores the files exactly.
    """

    def __init__(self, path: Path, lock: RunLock | None) -> None:
        self.path = path
        self._lock = lock
        self._lines: dict[str, JsonlFile] = {}

    @classmethod
    def create(cls, path: str | Path, *, overwrite: bool = False) -> RunDirectory:
        """Create a run. An existing one is refused unless `overwrite` is true, which deletes its data."""
        path = Path(path)
        _make_folder(path)
        lock = RunLock(path / LOCK)
        try:
            existing = [name for name in _RESULTS if _has_content(path / name)]
            if existing and not overwrite:
                state = "a finished run" if _has_content(path / SUMMARY) else "an unfinished run"
                raise RunExists(
                    f"{path} already holds {state} ({', '.join(existing)}): continue it with --resume, "
                    "choose another run.name, or discard it with run.if_exists=replace"
                )
            if existing:
                _remove(path)
            with one_line_errors(f"cannot create {path / CHECKPOINTS}"):
                (path / CHECKPOINTS).mkdir(exist_ok=True)
        except BaseException:
            lock.release()
            raise
        return cls(path, lock)

    @classmethod
    def follow(cls, path: str | Path) -> RunDirectory:
        """Open the run of another process for reading; writing does nothing."""
        return cls(Path(path), None)

    @classmethod
    def resume(cls, path: str | Path) -> RunDirectory:
        """Open an existing run to resume it; call `truncate_after` once the checkpoint is chosen."""
        path = Path(path)
        if not any((path / name).exists() for name in (CONFIG, *_RESULTS)):
            raise KeelError(
                f"no run to resume in {path}: leave --resume out to start one, or check run.dir and run.name"
            )
        lock = RunLock(path / LOCK)
        run = cls(path, lock)
        try:
            with one_line_errors(f"cannot create {path / CHECKPOINTS}"):
                (path / CHECKPOINTS).mkdir(exist_ok=True)
            for name in LINE_FILES:
                run._file(name)  # cuts a partial last line
        except BaseException:
            run.close()
            raise
        return run

    @property
    def checkpoints(self) -> Path:
        """The folder of the `step-N` checkpoints."""
        return self.path / CHECKPOINTS

    @property
    def tensorboard(self) -> Path:
        """The folder of TensorBoard event files."""
        return self.path / TENSORBOARD

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        """Append one line to a JSON lines file."""
        if self._lock is not None:
            self._file(name).append(record)

    def truncate_after(self, step: int) -> dict[str, int]:
        """Drop every line past `step`, atomically per file; return counts per file. Without a checkpoint, pass -1."""
        dropped: dict[str, int] = {}
        for name in LINE_FILES:
            if name in self._lines:
                self._lines.pop(name).close()
            dropped[name] = drop_lines_after(self.path / name, step, HISTORY if name == EVENTS else ())
        return dropped

    def unreadable(self) -> dict[str, list[int]]:
        """The numbers of lines that are not JSON objects, by file."""
        numbers_by_file = {name: unreadable_lines(self.path / name) for name in LINE_FILES}
        return {name: numbers for name, numbers in numbers_by_file.items() if numbers}

    def unused_attempt(self, attempt: int) -> int:
        """The first number from `attempt` on without an abandoned folder; a resumed run may repeat its attempt."""
        used = {path.name for path in (self.path / ABANDONED).glob("attempt-*")}
        return next(number for number in count(attempt) if f"attempt-{number}" not in used)

    def has_lines_past(self, step: int) -> bool:
        """Whether metrics, rollouts or evaluations have lines past `step`."""
        return any(lines_after(self.path / name, step) for name in (METRICS, ROLLOUTS, EVAL))

    def set_aside(self, step: int, attempt: int, *, events: bool = False) -> Path:
        """Move metrics, rollouts and evaluations past `step` to `abandoned/attempt-K/`.

        With `events`, also move events past `step` that follow the last rollback or stop. All copies are on disk before
        the first line is cut, so this can be killed at any time and repeated.
        """
        folder = self.path / ABANDONED / f"attempt-{attempt}"
        _make_folder(folder)
        moved = {name: HISTORY if name == EVENTS else () for name in LINE_FILES if events or name != EVENTS}
        for name, history in moved.items():
            if past := lines_after(self.path / name, step, history):
                write_atomic(folder / name, past)
        for name, history in moved.items():
            if name in self._lines:
                self._lines.pop(name).close()
            drop_lines_after(self.path / name, step, history)
        return folder

    def write_text(self, name: str, text: str, *, private: bool = False) -> Path:
        """Write a text file atomically; a private one is readable by its owner only."""
        path = self.path / name
        if self._lock is not None:
            _make_folder(path.parent)
            write_atomic(path, text, mode=0o600 if private else 0o666)
        return path

    def write_json(self, name: str, data: Any, *, raw: bool = False) -> Path:
        """Write a JSON file atomically; NaN and infinities become null, secrets are masked unless `raw`."""
        data = data if raw else redact_data(data)
        if isinstance(data, Mapping):
            return self.write_text(name, encode(data, indent=2) + "\n")
        wrapped = json.loads(encode({"data": data}))["data"]
        return self.write_text(name, json.dumps(wrapped, indent=2, ensure_ascii=False) + "\n")

    def read_json(self, name: str) -> Any:
        """Read a JSON file; None if it is missing."""
        path = self.path / name
        if not path.exists():
            return None
        try:
            return parse_json(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise KeelError(f"{path} is not JSON: {error}") from error

    def read_lines(self, name: str) -> list[dict[str, Any]]:
        """The records of a JSON lines file; unreadable lines are skipped."""
        return read_records(self.path / name)

    def sync(self) -> None:
        """Flush all lines to disk; call it before a checkpoint, so that no checkpoint is newer than its lines."""
        for file in self._lines.values():
            file.sync()

    def close(self) -> None:
        """Close the files and release the lock; safe to call twice."""
        for file in self._lines.values():
            file.close()
        self._lines.clear()
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _file(self, name: str) -> JsonlFile:
        if name not in self._lines:
            self._lines[name] = JsonlFile(self.path / name)
        return self._lines[name]


def _make_folder(path: Path) -> None:
    with one_line_errors(f"cannot create the run directory {path}"):
        path.mkdir(parents=True, exist_ok=True)


def _has_content(path: Path) -> bool:
    if path.is_dir():
        return any(path.iterdir())
    return path.exists() and path.stat().st_size > 0


def _remove(path: Path) -> None:
    """Delete a run's files; other files in the folder stay."""
    with one_line_errors(f"cannot clear {path}"):
        for name in _ALL_FILES:
            target = path / name
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target)
            elif target.exists() or target.is_symlink():
                target.unlink()


class JsonlLogger(Logger):
    """Write JSON lines into the run directory; every line is complete, valid JSON."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append to metrics.jsonl."""
        self._run.append(METRICS, {"step": step, **metrics})

    def rollouts(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Append to rollouts.jsonl, one line per completion."""
        for record in records:
            self._run.append(ROLLOUTS, {"step": step, **record})

    def evaluation(self, step: int, record: Mapping[str, Any]) -> None:
        """Append to eval.jsonl."""
        self._run.append(EVAL, {"step": step, **record})

    def event(self, kind: str, **fields: Any) -> None:
        """Append to events.jsonl."""
        details = {name: value for name, value in fields.items() if name not in ("step", "time")}
        self._run.append(EVENTS, {"step": fields.get("step"), "kind": kind, "time": fields.get("time"), **details})


class RunLock:
    """A file lock, held from construction to `release`. The pid in the file is for the error message."""

    def __init__(self, path: Path) -> None:
        self._lock = FileLock(
            path, _WAIT_S, thread_local=False, preserve_lock_file=True, fallback_to_soft=False, on_acquired=_write_pid
        )
        with one_line_errors(f"cannot write {path}"):
            try:
                self._lock.acquire()
            except Timeout:
                raise _in_use(path) from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:  # without locks, a second writer is not detected
                    raise

    def release(self) -> None:
        """Release the lock; safe to call twice, and in a forked child, which holds no lock."""
        self._lock.release(force=True)


def _write_pid(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    os.write(descriptor, str(os.getpid()).encode())


def _in_use(path: Path) -> KeelError:
    holder = path.read_text(encoding="ascii", errors="replace").strip() or "unknown"
    if holder == str(os.getpid()):
        return KeelError(f"{path.parent} is already open in this process (pid {holder}); close it first")
    return KeelError(
        f"{path.parent} is in use by another process (pid {holder}); wait for it or choose another run.name"
    )


def is_locked(path: Path) -> bool:
    """Whether a living process holds this lock. Needs no write permission and changes nothing."""
    import fcntl  # POSIX only; RunLock does not need it

    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two readers do not block each other
    except (BlockingIOError, PermissionError):  # PermissionError on a few file systems
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(descriptor)
    return False
