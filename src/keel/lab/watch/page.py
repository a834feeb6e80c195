"""The watched runs, followed by their files, and the sections of the live page."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path

from keel.base.errors import KeelError
from keel.doctor.judge import describe_state, guard_stop, state
from keel.doctor.runs import Record, RunReader, RunRecord
from keel.lab.report import samples
from keel.lab.report import sections as tables
from keel.lab.report.html import block, charts, data_element, document, per_run, resource, verdict
from keel.loggers.console import duration

RECENT = 50  # number of last steps averaged for the remaining time
ENDED_KINDS = ("completed", "stopped", "aborted", "interrupted", "gone")  # states of runs that write no more data


@dataclass(frozen=True)
class RunView:
    """A run on the page; `record` is None while its folder is empty, `error` explains outdated parts."""

    name: str
    path: Path
    record: RunRecord | None
    kind: str
    error: str = ""


@dataclass(frozen=True)
class Section:
    """A part of the page: its element's id, its HTML, and a digest to detect changes."""

    name: str
    html: str
    digest: str


def title(runs: Sequence[RunView]) -> str:
    """The run's name, or all of them."""
    return ", ".join(run.name for run in runs)


def sections(runs: Sequence[RunView]) -> Iterator[Section]:
    """All sections, in the order of the page."""
    records = [run.record for run in runs if run.record is not None]
    makers: dict[str, Callable[[], str]] = {
        "state": lambda: states(runs),
        "curves": lambda: curves(records),
        "findings": lambda: block("Findings", findings(records)),
        "rollouts": lambda: block("Latest rollouts", side_by_side([samples.latest(record) for record in records])),
        "timeline": lambda: block("Timeline", per_run(records, tables.timeline, opened=False, folded=True)),
        "options": lambda: options(records),
    }
    for name, make in makers.items():
        html = make()
        yield Section(name, html, hashlib.sha256(html.encode("utf-8", "replace")).hexdigest()[:16])


def whole_page(runs_title: str, drawn: Sequence[Section], refresh_s: float) -> str:
    """The page with all sections, and the script that fetches them again."""
    places = "".join(f"<div id='{part.name}' data-digest='{part.digest}'>{part.html}</div>" for part in drawn)
    body = (
        f"<header><p class='muted'>Keel watch</p><h1>{escape(runs_title)}</h1>"
        f"<p id='live' class='muted' role='status' data-refresh='{refresh_s:g}'></p></header>{places}"
    )
    script = resource("watch.js", "keel.lab.watch")
    return document(runs_title, body, None, script=script, sources="; connect-src 'self'")


def states(runs: Sequence[RunView]) -> str:
    """A table of all runs: progress, main figures, verdict."""
    return side_by_side([_state(run, index, len(runs)) for index, run in enumerate(runs)])


def _state(run: RunView, index: int, count: int) -> str:
    error = f"<p class='gone'>{escape(run.error)}</p>" if run.error else ""
    if run.record is None:
        text = f"Nothing has been written to {run.path} yet."
        content = f"<p class='muted'>{escape(text)}</p>{error}"
        return f"<section class='verdict'><h2>{escape(run.name)}</h2>{content}</section>"
    if run.kind == "gone":
        text = f"{run.path} was deleted or moved; the data below were read before."
        return verdict(replace(run.record, running=False), index, count, f"<p class='gone'>{escape(text)}</p>")
    return verdict(run.record, index, count, progress(run.record, run.kind) + error)


def progress(run: RunRecord, kind: str) -> str:
    """A progress bar, the step, and the remaining time or the reason why the run ended."""
    total = run.max_steps
    bar = f"<progress max='{total}' value='{min(run.steps, total)}'></progress>" if total else ""
    text = f"step {run.steps} of {total}" if total else f"step {run.steps}"
    left = seconds_left(run)
    if kind == "running" and left is not None:
        text += f" · about {duration(left)} left (without evaluations)"
    elif kind != "running":
        text += f" · {kind}"
    warmups = [str(event.get("message")) for event in run.events if event.get("kind") == "warmstart"]
    if warmups and not run.steps:
        text += f" · warm start: {warmups[-1]}"
    reason = why_ended(run, kind)
    return f"{bar}<p class='progress'>{escape(text)}</p>" + (f"<p class='why'>{escape(reason)}</p>" if reason else "")


def seconds_left(run: RunRecord) -> float | None:
    """The mean time of the last steps times the number of remaining steps; None if either is unknown."""
    times = [value for _, value in run.series("time/total_s")[-RECENT:] if value is not None]
    if not times or run.max_steps is None:
        return None
    return sum(times) / len(times) * max(0, run.max_steps - run.steps)


def why_ended(run: RunRecord, kind: str) -> str:
    """Why a run ended before its last step, from its events."""
    if kind in ("running", "completed"):
        return ""
    guard = guard_stop(run)
    if guard is not None:
        return f"Stopped by a guard: {guard}."
    kinds = ("interrupted", "out-of-memory", "resume")
    endings = [event for event in run.events if event.get("kind") in kinds]
    if endings and endings[-1].get("kind") != "resume":
        return str(endings[-1].get("message", ""))
    if kind == "interrupted":
        return f"Killed or failed; resume with: keel train --resume {run.path}"
    return ""


def findings(runs: Sequence[RunRecord]) -> str:
    """The doctor's findings for each run, or a note that the run has not been examined yet."""

    def articles(run: RunRecord) -> str:
        if run.findings is None:
            return "<p class='muted'>Not examined yet.</p>"
        return tables.findings(run) or "<p class='muted'>None so far.</p>"

    return per_run(runs, articles, opened=True)


def curves(runs: Sequence[RunRecord]) -> str:
    """The report's curves, with all runs in the same charts, and their numbers for the pointer."""
    shown, data = charts(runs)
    return block("Curves", shown) + data_element(data)


def options(runs: Sequence[RunRecord]) -> str:
    """The options in which the runs differ, and every run's configuration."""
    differing = block("Options that differ", tables.differences(runs) or "<p class='muted'>None.</p>")
    whole = block("Configuration", per_run(runs, tables.configuration, opened=False, folded=True))
    return (differing if len(runs) > 1 else "") + whole


def side_by_side(parts: Sequence[str]) -> str:
    """Parts side by side, or below each other on a narrow screen."""
    return f"<div class='beside'>{''.join(f'<div>{part}</div>' for part in parts)}</div>"


ROLLOUT_BYTES = 2 * 2**20  # bytes of the start and of the end of rollouts.jsonl in memory
RENDER_SHARE = 0.1  # maximum average share of a core for rendering
EXAMINE_SHARE = 0.05  # the same for the doctor's checks
PAGE_S = 15.0  # seconds without a request after which a page counts as closed


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
        """The state in words, after the worst finding."""
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
        """Read new data; returns whether there are any. After an error the page shows the error and the old data."""
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
