"""Progress of a study with the remaining time, from the files of its runs: bars on a terminal, otherwise lines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from keel.lab.studies.results import JobOutcome, StudyRun
from keel.loggers.rundir import METRICS, SUMMARY

Say = Callable[[str], None]
POLL_S = 1.0  # seconds between reads of the files
LINE_S = 60.0  # seconds between lines without a terminal
TAIL_BYTES = 1 << 17  # bytes read at the end of a file, more than any line of metrics


@dataclass
class Watched:
    """A watched process: its name, a file that exists once it runs, its steps, and whether it is a warm start.

    `done` is the number of finished steps, None until it has started; `before` is the number when it was resumed.
    """

    name: str
    started: Path
    lines: Path
    steps: int
    warmstart: bool = False
    summary: Path | None = None
    done: int | None = None
    before: int = 0

    def look(self) -> None:
        """Read the number of finished steps."""
        if self.started.exists():
            step = min(last_step(self.lines) or 0, self.steps)
            self.before = step if self.done is None else min(self.before, step)
            self.done = step

    @property
    def phase(self) -> str:
        """`starting`, `step 34/120`, `warm start, step 34/500` or `measuring the drift`."""
        if self.summary is not None and self.summary.exists():
            return "measuring the drift"
        phase = f"step {self.done}/{self.steps}" if self.done else "starting"
        return f"warm start, {phase}" if self.warmstart else phase


class Progress:
    """Progress from the files of all running processes."""

    def __init__(
        self,
        jobs: Sequence[StudyRun],
        outcomes: Mapping[str, JobOutcome],
        say: Say | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._count, self._finished, self._finished_before = len(jobs), set(outcomes), len(outcomes)
        self._say, self._clock = say, clock
        self._watched: dict[str, Watched] = {}
        self._done_steps = 0  # steps of ended runs in this study, without steps before a resume
        self._total_steps = sum(job.config.run.max_steps for job in jobs if job.label not in outcomes)
        self._polled_at = self._line_at = clock()
        self._training_since: float | None = None
        self._bar: Any = None
        self._rows: dict[str, Any] = {}

    def __enter__(self) -> Progress:
        if self._say is None and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[status]}"))
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._bar.start()
        if self._finished_before:
            self.say(f"{self._finished_before} of {self._count} runs are finished already")
        self._draw()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, line: str) -> None:
        if self._say is not None:
            self._say(line)
        elif self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def watch_job(self, job: StudyRun, started: Path) -> None:
        """Start watching a run; call it before the process is submitted."""
        if self._training_since is None:
            self._training_since = self._clock()
        steps, summary = job.config.run.max_steps, job.folder / SUMMARY
        self._watch(job.label, Watched(job.label, started, job.folder / METRICS, steps, summary=summary))

    def watch_warmstart(self, folder: Path, job: StudyRun, started: Path) -> None:
        """Start watching a warm start; all warm starts end before the first run begins."""
        steps = job.config.warmstart.steps if job.config.warmstart is not None else 0
        lines = supervised_lines(folder)
        self._watch(str(folder), Watched(f"seed={job.seed}", started, lines, steps, warmstart=True))

    def _watch(self, label: str, watched: Watched) -> None:
        watched.started.unlink(missing_ok=True)
        self._watched[label] = watched

    def finish_warmstart(self, folder: Path) -> None:
        """Record that a warm start's process has ended."""
        self._watched.pop(str(folder), None)

    def finish(self, label: str, outcome: JobOutcome) -> None:
        """Record that a run has ended or cannot start."""
        self._finished.add(label)
        ended = self._watched.pop(label, None)
        if ended is not None:  # a run stopped by a guard has no remaining steps
            self._done_steps += ended.steps - ended.before
            self._total_steps -= ended.before
        reason = f" ({outcome.reason})" if outcome.reason else ""
        left = f"; {self.time_left()}" if self.time_left() else ""
        self.say(f"{len(self._finished)}/{self._count} {label}: {outcome.state}{reason}{left}")
        self._line_at = self._clock()
        self._draw()

    def refresh(self) -> None:
        """Read the files, at most once per second."""
        now = self._clock()
        if now - self._polled_at < POLL_S:
            return
        self._polled_at = now
        for watched in self._watched.values():
            watched.look()
        self._draw()
        if self._bar is None and now - self._line_at >= LINE_S and self._watched:
            self._line_at = now
            self.say("; ".join([f"{len(self._finished)}/{self._count} runs", *self.phases(), self._left()]))

    def phases(self) -> list[str]:
        """The phase of each running process, such as `beta=0.1 seed=2: step 34/120`."""
        return [f"{watched.name}: {watched.phase}" for watched in self._running().values()]

    def _running(self) -> dict[str, Watched]:
        return {label: watched for label, watched in self._watched.items() if watched.done is not None}

    def _steps(self) -> tuple[int, int]:
        """(steps done since this start of the study, all steps to do)."""
        runs = [watched for watched in self._running().values() if not watched.warmstart]
        before = sum(run.before for run in runs)
        return self._done_steps + sum(run.done or 0 for run in runs) - before, self._total_steps - before

    def _left(self) -> str:
        return self.time_left() or ("estimating" if len(self._finished) < self._count else "")

    def time_left(self) -> str:
        """The remaining time estimated by the time per step (`about 12 min left`); empty before the first step."""
        done, steps = self._steps()
        if not done or self._training_since is None or len(self._finished) == self._count:
            return ""
        seconds = (self._clock() - self._training_since) * (steps - done) / done
        return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"

    def fraction(self) -> float:
        """The fraction of all runs that is done; a running one counts by its steps."""
        runs = [watched for watched in self._running().values() if not watched.warmstart]
        return (len(self._finished) + sum((run.done or 0) / max(1, run.steps) for run in runs)) / max(1, self._count)

    def _draw(self) -> None:
        """The bar of the study, and one for each running process."""
        if self._bar is None:
            return
        running = self._running()
        for label in [label for label in self._rows if label and label not in running]:
            self._bar.remove_task(self._rows.pop(label))
        summary = f"{len(self._finished)}/{self._count} runs; {self._left()}"
        shown = {"": ("study", self.fraction(), summary)}
        shown |= {k: (w.name, (w.done or 0) / max(1, w.steps), w.phase) for k, w in running.items()}
        for label, (name, share, status) in shown.items():
            if label not in self._rows:
                self._rows[label] = self._bar.add_task(name, total=1.0, status="")
            self._bar.update(self._rows[label], completed=share, status=status)


def supervised_lines(folder: Path) -> Path:
    """The log of a warm start, with one line per step, beside its folder (which exists only once it is complete)."""
    return folder.with_name(f"{folder.name}.jsonl")


def last_step(path: Path) -> int | None:
    """The step of a file's last complete line, or None."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
        return int(json.loads(lines[-1])["step"])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
