"""Progress of a study: bars on a terminal, else lines, with an estimate of the remaining time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from keel.lab.studies.folder import Outcome, StudyRun
from keel.lab.studies.pace import Event, Pace, WorkList, observe, remaining_s, warmstart_plan
from keel.lab.studies.position import job_phase, job_pieces, job_plan, warmstart_phase, warmstart_pieces

Say = Callable[[str], None]
POLL_S = 1.0  # interval between reads of the files
LINE_S = 60.0  # interval between lines without a terminal


@dataclass(frozen=True)
class Watched:
    """A watched process: its name, whether it runs, the finished pieces, its phase in words."""

    name: str
    started: Path
    pieces: Callable[[WorkList], int]
    phase: Callable[[WorkList, int], str]


class Progress:
    """Reads the files of all running processes, and keeps the observations as a `Pace`."""

    def __init__(
        self,
        jobs: Sequence[StudyRun],
        outcomes: Mapping[str, Outcome],
        say: Say | None = None,
        workers: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._count = len(jobs)
        self._finished = set(outcomes)
        self._finished_before = len(outcomes)
        self._say = say
        self._workers = workers
        self._clock = clock
        self._pace = Pace({job.label: job_plan(job) for job in jobs if job.label not in outcomes})
        self._watched: dict[str, Watched] = {}
        self._looked_at = self._line_at = clock()
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
        """Look at a run from now on; call it before the process is submitted."""
        started.unlink(missing_ok=True)
        self._watched[job.label] = Watched(job.label, started, lambda plan: job_pieces(job, plan), job_phase)

    def watch_warmstart(self, folder: Path, job: StudyRun, started: Path) -> None:
        """Look at a warm start; all of them come before the first run."""
        started.unlink(missing_ok=True)
        steps = job.config.warmstart.steps if job.config.warmstart is not None else 0
        self._pace = replace(self._pace, plans={str(folder): WorkList("", warmstart_plan(steps)), **self._pace.plans})
        name = f"seed={job.seed}"
        self._watched[str(folder)] = Watched(name, started, lambda p: warmstart_pieces(folder, p), warmstart_phase)

    def finish_warmstart(self, folder: Path) -> None:
        """A warm start's process has ended."""
        self._end(str(folder))

    def finish(self, label: str, outcome: Outcome) -> None:
        """A run has ended, or cannot begin."""
        self._finished.add(label)
        self._end(label)
        reason = f" ({outcome.reason})" if outcome.reason else ""
        left = self.time_left()
        left = f"; {left}" if left else ""
        self.say(f"{len(self._finished)}/{self._count} {label}: {outcome.state}{reason}{left}")
        self._line_at = self._clock()
        self._draw()

    def _end(self, label: str) -> None:
        self._watched.pop(label, None)
        self._pace = observe(self._pace, Event(self._clock(), label, len(self._pace.plans[label].pieces)))

    def refresh(self) -> None:
        """Look at the files again, at most once a second."""
        now = self._clock()
        if now - self._looked_at < POLL_S:
            return
        self._looked_at = now
        for label, watched in self._watched.items():
            if watched.started.exists():
                done = watched.pieces(self._pace.plans[label])
                if self._pace.done.get(label) != done:
                    self._pace = observe(self._pace, Event(now, label, done))
        self._draw()
        if self._bar is None and now - self._line_at >= LINE_S and self._watched:
            self._line_at = now
            self.say(
                "; ".join([f"{len(self._finished)}/{self._count} runs", *self.phases(), self._left_or_estimating()])
            )

    def phases(self) -> list[str]:
        """What each process that runs is doing: `beta=0.1 seed=2: step 34/120`."""
        return [f"{self._watched[label].name}: {self._phase(label)}" for label in self._running()]

    def _running(self) -> list[str]:
        return [label for label in self._pace.done if label in self._watched]

    def _phase(self, label: str) -> str:
        return self._watched[label].phase(self._pace.plans[label], self._pace.done[label])

    def _left_or_estimating(self) -> str:
        return self.time_left() or ("estimating" if len(self._finished) < self._count else "")

    def time_left(self) -> str:
        """`about 12 min left`, or nothing where nothing is known or left."""
        seconds = None if len(self._finished) == self._count else remaining_s(self._pace, self._clock(), self._workers)
        if seconds is None:
            return ""
        return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"

    def fraction(self) -> float:
        """The share of all processes that is done, a running one by its pieces."""
        plans = self._pace.plans
        shares = [self._pace.done.get(label, 0) / len(plan.pieces) for label, plan in plans.items()]
        return (self._finished_before + sum(shares)) / max(1, self._finished_before + len(shares))

    def _draw(self) -> None:
        """The bar of the study, and one below it for each process that runs."""
        if self._bar is None:
            return
        running = self._running()
        for label in [label for label in self._rows if label and label not in running]:
            self._bar.remove_task(self._rows.pop(label))
        for label in ("", *running):
            if label not in self._rows:
                name = self._watched[label].name if label else "study"
                self._rows[label] = self._bar.add_task(name, total=1.0, status="")
            plan, done = self._pace.plans.get(label), self._pace.done.get(label, 0)
            share = self.fraction() if plan is None else done / len(plan.pieces)
            status = f"{len(self._finished)}/{self._count} runs; {self._left_or_estimating()}" if plan is None else None
            self._bar.update(self._rows[label], completed=share, status=status or self._phase(label))
