"""Watched runs: poll their files, examine their logs and render snapshots for the pages."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from keel.base.errors import KeelError
from keel.doctor.judge import describe_state, state
from keel.doctor.runs import Record, RunReader, RunRecord
from keel.lab.watch.page import RunView, Section, sections, title

ROLLOUT_BYTES = 2 * 2**20  # bytes of the start and of the end of rollouts.jsonl in memory
RENDER_SHARE = 0.1  # maximum average share of a core for rendering
EXAMINE_SHARE = 0.05  # and for the doctor's checks
PAGE_S = 15.0  # seconds after its last request when a page counts as closed


@dataclass(frozen=True)
class Snapshot:
    """The rendered sections at one time."""

    title: str
    sections: tuple[Section, ...]
    etag: str
    changed: float  # when a run last wrote something, by the watcher's clock


class FollowedRun:
    """One run directory; `record` is None while it is empty."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path = path
        self.gone = False
        self.record: RunRecord | None = None
        self._name = name
        self._reader = RunReader(path, ROLLOUT_BYTES)
        self._signature: tuple[object, ...] | None = None
        self._examined: RunRecord | None = None
        self._judged: tuple[tuple[Record, ...], tuple[Record, ...] | None] = (
            (),
            None,
        )  # (start of the run, findings)
        self._unread = self._unexamined = ""

    @property
    def kind(self) -> str:
        """completed, stopped, aborted, running or interrupted, as in the report; or waiting or gone."""
        if self.gone:
            return "gone"
        return "waiting" if self.record is None else state(self.record)[0]

    @property
    def state_text(self) -> str:
        """The same in words, after the worst finding."""
        if self.gone:
            return "deleted or moved"
        record = self.shown.record
        return "nothing has been written yet" if record is None else describe_state(record)

    @property
    def shown(self) -> RunView:
        """The run for the page; a running one has the findings of its log so far."""
        record, error = self.record, self._unread
        if record is not None and _unjudged(record):
            beginning, findings = self._judged
            record = replace(record, findings=findings if beginning == _beginning(record) else None)
            error = f"{error} {self._unexamined}".strip()
        return RunView(self._name or self.path.name, self.path, record, self.kind, error)

    def check(self) -> None:
        """Refuse a folder that does not exist or contains no run."""
        self._reader.read()

    def refresh(self) -> bool:
        """Read new data; returns whether there are any. After an error the old data stay, and the page shows it."""
        try:
            changed = self._refresh()
        except Exception as error:
            before, self._unread = self._unread, f"New data cannot be read: {type(error).__name__}: {error}."
            self._signature = None
            return self._unread != before
        if changed:
            self._unread = ""
        return changed

    def _refresh(self) -> bool:
        if not self.path.is_dir():
            newly = self.record is not None and not self.gone
            self.gone = self.record is not None
            return newly
        running = self._reader.running()
        signature = (running, *self._reader.signature())
        if signature == self._signature and not self.gone:
            return False
        self.gone, self._signature = False, signature
        try:
            record = self._reader.read(running)
        except KeelError:  # the folder is empty: a new run may start in it
            self.record = None
            return True
        if running:  # the summary is from before the run was resumed
            record = replace(record, summary=None)
        self.record = record if self._name is None else replace(record, name=self._name)
        return True

    def judge(self) -> bool:
        """Run the doctor's checks on the log so far; returns whether there were new data.

        After an error the old findings stay, and the page shows the error. The checks may take seconds, during which
        another run may start in the folder.
        """
        record = self.record
        if record is None or record is self._examined or not record.metrics or not _unjudged(record):
            return False
        self._examined = record
        try:
            from keel.doctor.examine import examine_run  # imported here because it is slow to load

            self._judged = (_beginning(record), tuple(examine_run(record).as_dict()["findings"]))
            self._unexamined = ""
        except Exception as error:
            self._unexamined = f"The doctor's check of the log so far failed: {type(error).__name__}: {error}."
        return True


def _beginning(record: RunRecord) -> tuple[Record, ...]:
    """The identity of a run in its folder: its first step, with times."""
    return record.metrics[:1]


def _unjudged(record: RunRecord) -> bool:
    """Whether there are no findings yet: the run is running, or findings.json is missing."""
    return record.running or record.findings is None


class Watcher:
    """Several runs on one page. All methods are thread-safe, because each request has its own thread."""

    def __init__(self, paths: Sequence[Path], clock: Callable[[], float] = time.monotonic) -> None:
        resolved = [path.resolve() for path in paths]
        for index, path in enumerate(resolved):
            if path in resolved[:index]:
                raise KeelError(f"{paths[index]} is named twice: name each run once")
        names = [path.name for path in resolved]
        self.runs = [
            FollowedRun(path, str(path) if names.count(name) > 1 else None)
            for path, name in zip(paths, names, strict=True)
        ]
        self.final = False  # pages stop polling after the final snapshot
        self.final_sent = False
        self._clock = clock
        self._lock = threading.Lock()
        self._snapshot: Snapshot | None = None
        self._draw_at = self._judge_at = self._changed = clock()
        self._outdated = True
        self._asked: float | None = None

    def refresh(self) -> None:
        """Read the files of every run."""
        with self._lock:
            self._refresh()

    def _refresh(self) -> None:
        changes = [run.refresh() for run in self.runs]
        if any(changes):
            self._outdated, self._changed = True, self._clock()

    def snapshot(self) -> Snapshot:
        """The current sections; changed ones are rendered again, unless that was done too recently."""
        with self._lock:
            now = self._asked = self._clock()
            if self._snapshot is not None and now < self._draw_at and not self.final:
                return self._snapshot
            self._refresh()
            if self._snapshot is None or self._outdated:
                self._outdated = False
                self._snapshot = self._draw()
                self._draw_at = self._clock() + (self._clock() - now) / RENDER_SHARE
            return self._snapshot

    def _draw(self) -> Snapshot:
        shown = [run.shown for run in self.runs]
        drawn = tuple(sections(shown))
        digest = hashlib.sha256("".join(section.digest for section in drawn).encode()).hexdigest()[:16]
        return Snapshot(title(shown), drawn, digest, self._changed)

    @property
    def seen(self) -> bool:
        """Whether a page is open, by the time of the last request."""
        return self._asked is not None and self._clock() - self._asked < PAGE_S

    def judge(self) -> None:
        """Run the doctor on new data if a page is open, at a limited share of time."""
        start = self._clock()
        if not self.seen or start < self._judge_at:
            return
        judged = [run.judge() for run in self.runs]
        if any(judged):
            with self._lock:
                self._outdated = True
            self._judge_at = self._clock() + (self._clock() - start) / EXAMINE_SHARE

    def age(self) -> float:
        """Seconds since a run last wrote something."""
        return self._clock() - self._changed
