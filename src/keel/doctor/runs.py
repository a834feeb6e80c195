"""Read a run folder; the run may be partial, running or interrupted."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from keel.base.errors import KeelError
from keel.base.files import check_depth, json_lines, parse_json
from keel.base.redact import masked, redact_data, redact_text, register_secrets
from keel.doctor.thresholds import Thresholds, load_thresholds, thresholds_of
from keel.loggers import rundir
from keel.loggers.rundir import is_locked

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


# ------------------------------------------------------------------------ a run folder

# rollouts.jsonl may be very large. Of a larger file only the first and last part are read.
ROLLOUT_BYTES = 16 * 2**20
_FILES = (rundir.CONFIG, rundir.ENV, *rundir.LINE_FILES, rundir.FINDINGS, rundir.SUMMARY)


@dataclass(frozen=True)
class RunRecord:
    """The contents of a run folder. Fields of missing files are empty or None, and `missing` has a note."""

    path: Path
    name: str
    config_text: str | None = None
    config: Record = field(default_factory=dict)
    env: Record = field(default_factory=dict)
    metrics: tuple[Record, ...] = ()
    rollouts: tuple[Record, ...] = ()
    evaluations: tuple[Record, ...] = ()
    events: tuple[Record, ...] = ()
    abandoned: tuple[tuple[str, tuple[Record, ...]], ...] = ()
    findings: tuple[Record, ...] | None = None
    summary: Record | None = None
    running: bool = False
    missing: tuple[str, ...] = ()

    def series(self, metric: str) -> list[tuple[float, float | None]]:
        """(step, value) of every line that has this metric; None where it was not finite."""
        return curve_of(self.metrics, metric)

    def last(self, metric: str) -> float | None:
        """The last finite value of a metric."""
        return next((value for _, value in reversed(self.series(metric)) if value is not None), None)

    @property
    def metric_names(self) -> set[str]:
        """The names of metrics on all lines, since some are logged only at some steps."""
        return {name for line in self.metrics for name in line}

    @property
    def evaluated(self) -> dict[tuple[str, str], list[Record]]:
        """The evaluations by (split, task), the trained one first, because a retention task may have the same name."""
        grouped: dict[tuple[str, str], list[Record]] = {}
        for line in self.evaluations:
            split = "retention" if line.get("split") == "retention" else "trained"
            grouped.setdefault((split, str(line.get("task", "task"))), []).append(line)
        return dict(sorted(grouped.items(), key=lambda item: item[0][0] != "trained"))

    @property
    def thresholds(self) -> Thresholds:
        return _thresholds(self.config, [])

    @property
    def max_steps(self) -> int | None:
        """The configured number of steps."""
        value = number(option_of(self.config, "run.max_steps"))
        return None if value is None else int(value)

    @property
    def steps(self) -> int:
        """The number of completed steps."""
        steps = [value for line in self.metrics if (value := number(line.get("step"))) is not None]
        return int(max(steps, default=0))


def curve_of(lines: Sequence[Record], metric: str) -> list[tuple[float, float | None]]:
    """(step, value) of every line that has this metric; None where it was not finite."""
    return [(number(line.get("step")) or 0.0, number(line[metric])) for line in lines if metric in line]


def option_of(config: Mapping[str, Any], dotted: str) -> Any:
    """A value of a configuration given as plain data, such as `kl.beta`; None if it is missing."""
    value: Any = config
    for part in dotted.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def number(value: Any) -> float | None:
    """A finite number, or None for anything else."""
    if type(value) is float:  # the common case, for speed
        return value if math.isfinite(value) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # an integer beyond the largest float
        return None


def interval(value: object) -> tuple[float, float] | None:
    """[low, high] as numbers, or None."""
    if isinstance(value, list | tuple) and len(value) == 2:
        low, high = number(value[0]), number(value[1])
        if low is not None and high is not None:
            return (low, high)
    return None


def read_run(path: Path) -> RunRecord:
    """Read a run folder; raises a KeelError if it contains no run."""
    return RunReader(path, ROLLOUT_BYTES).read()


class RunReader:
    """Read a run folder repeatedly; only new lines of JSON-lines files are parsed."""

    def __init__(self, path: Path, rollout_bytes: int) -> None:
        self.path = path
        limits = {rundir.ROLLOUTS: rollout_bytes}
        self._lines = {name: GrowingLines(path / name, limits.get(name)) for name in rundir.LINE_FILES}

    def running(self) -> bool:
        """Whether a process holds the run's lock."""
        return is_locked(self.path / rundir.LOCK)

    def signature(self) -> tuple[object, ...]:
        """Inode, modification time and size of each file, to detect changes."""
        return tuple(_stamp(self.path / name) for name in (*_FILES, rundir.ABANDONED))

    def read(self, running: bool | None = None) -> RunRecord:
        """Read the current contents; pass `running` if it is known."""
        path, notes = self.path, list[str]()
        if not path.is_dir():
            raise KeelError(f"no run directory at {path}; a run is a folder such as runs/default")
        if not any((path / name).exists() for name in _FILES):
            raise KeelError(f"{path} is not a run folder: it has none of {', '.join(_FILES)}")
        config_text = _text(path / rundir.CONFIG, notes)
        metrics = _stepped(rundir.METRICS, self._lines[rundir.METRICS].read(notes), notes)
        summary = _current(_json(path / rundir.SUMMARY, notes), metrics, notes)
        config = _yaml(config_text, notes)
        register_secrets(config)
        _thresholds(config, notes)
        return RunRecord(
            path=path,
            name=path.resolve().name,
            config_text=_shown(config_text, config),
            config=masked(config),
            env=_mapping(_json(path / rundir.ENV, notes)),
            metrics=metrics,
            rollouts=self._lines[rundir.ROLLOUTS].read(notes),
            evaluations=_stepped(rundir.EVAL, self._lines[rundir.EVAL].read(notes), notes),
            events=tuple(redact_data(event) for event in self._lines[rundir.EVENTS].read(notes)),
            abandoned=_abandoned(path / rundir.ABANDONED),
            findings=_findings(redact_data(_json(path / rundir.FINDINGS, notes))),
            summary=summary,
            running=self.running() if running is None else running,
            missing=tuple(notes),
        )


def _stepped(file: str, lines: tuple[Record, ...], notes: list[str]) -> tuple[Record, ...]:
    """The lines with a numeric step; a note counts the others."""
    kept = tuple(line for line in lines if number(line.get("step")) is not None)
    if len(kept) < len(lines):
        notes.append(f"{len(lines) - len(kept)} line(s) of {file} have no numeric step and were skipped")
    return kept


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _abandoned(folder: Path) -> tuple[tuple[str, tuple[Record, ...]], ...]:
    """(`attempt 0`, its metrics) of every attempt that a rollback abandoned, in order."""
    attempts = [attempt for attempt in folder.glob("attempt-*") if attempt.name.removeprefix("attempt-").isdigit()]
    attempts.sort(key=lambda attempt: int(attempt.name.removeprefix("attempt-")))
    metrics = [_stepped(rundir.METRICS, GrowingLines(attempt / rundir.METRICS).read([]), []) for attempt in attempts]
    return tuple((attempt.name.replace("-", " "), lines) for attempt, lines in zip(attempts, metrics, strict=True))


def _text(path: Path, notes: list[str]) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        notes.append(f"{path.name} does not exist")
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror or error}")
    return None


def _json(path: Path, notes: list[str]) -> Any:
    text = _text(path, notes)
    if text is None:
        return None
    try:
        return parse_json(text)
    except ValueError:
        notes.append(f"{path.name} is not JSON")
        return None


def _yaml(text: str | None, notes: list[str]) -> Record:
    if text is None:
        return {}
    import yaml

    try:
        return _mapping(check_depth(yaml.safe_load(text)))
    except (yaml.YAMLError, ValueError, RecursionError):
        notes.append(f"{rundir.CONFIG} is not YAML")
        return {}


def _thresholds(config: Record, notes: list[str]) -> Thresholds:
    """The run's own thresholds, or the defaults if the configuration has a damaged or unknown one."""
    try:
        return thresholds_of(config)
    except KeelError as error:
        notes.append(f"{rundir.CONFIG}: {error}; using the default thresholds")
        return load_thresholds()


def _shown(text: str | None, config: Record) -> str | None:
    """The configuration file's text, with secrets masked."""
    if text is None or masked(config) == config:
        return None if text is None else redact_text(text)
    import yaml

    return str(yaml.safe_dump(masked(config), sort_keys=False, allow_unicode=True))


def _mapping(value: Any) -> Record:
    return dict(value) if isinstance(value, Mapping) else {}


def _current(summary: Any, metrics: tuple[Record, ...], notes: list[str]) -> Record | None:
    """The summary, or None if the run has continued since it was written."""
    if not isinstance(summary, dict):
        return None
    summarized, done = number(summary.get("steps")), number(metrics[-1].get("step")) if metrics else None
    if summarized is not None and done is not None and summarized != done:
        notes.append(f"{rundir.SUMMARY} is of step {summarized:.0f}, but the run is at {done:.0f}: it was ignored")
        return None
    return summary


def _findings(value: Any) -> tuple[Record, ...] | None:
    """A list of findings, or an object that contains one; None if the doctor was not run."""
    if isinstance(value, Mapping):
        value = value.get("findings")
    if not isinstance(value, list):
        return None
    return tuple(item if isinstance(item, dict) else {"code": str(item)} for item in value)
