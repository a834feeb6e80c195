"""Progress over the whole grid: a bar on a terminal, lines elsewhere, and an estimate of the time that is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from keel.lab.studies.folder import Job, Outcome
from keel.loggers.rundir import METRICS

Say = Callable[[str], None]


class Progress:
    """Counts finished steps of all jobs; the estimate is by the steps of this session."""

    def __init__(self, jobs: Sequence[Job], outcomes: Mapping[str, Outcome], say: Say | None = None) -> None:
        self._jobs = {job.label: job for job in jobs}
        self._finished = set(outcomes)
        self._finished_before = len(outcomes)
        self._say = say
        self._began = time.monotonic()
        self._steps_before = self._steps()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if self._say is None and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[status]}"))
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._bar.start()
            self._task = self._bar.add_task("study", total=self._total(), status="")
        if self._finished_before:
            self.say(f"{self._finished_before} of {len(self._jobs)} runs are finished already")
        self.refresh()
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

    def finish(self, label: str, outcome: Outcome) -> None:
        self._finished.add(label)
        reason = f" ({outcome.reason})" if outcome.reason else ""
        left = self.time_left()
        left = f"; {left}" if left else ""
        self.say(f"{len(self._finished)}/{len(self._jobs)} {label}: {outcome.state}{reason}{left}")
        self.refresh()

    def refresh(self) -> None:
        if self._bar is not None:
            status = f"{len(self._finished)}/{len(self._jobs)} runs; {self.time_left() or 'estimating'}"
            self._bar.update(self._task, completed=self._steps(), status=status)

    def time_left(self) -> str:
        """`about 12 min left`, or nothing where nothing is known or left."""
        steps, elapsed = self._steps(), time.monotonic() - self._began
        steps_done, steps_left = steps - self._steps_before, self._total() - steps
        if len(self._finished) == len(self._jobs) or steps_done <= 0 or steps_left <= 0:
            return ""
        seconds = elapsed * steps_left / steps_done
        return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"

    def _total(self) -> int:
        return sum(job.config.run.max_steps for job in self._jobs.values())

    def _steps(self) -> int:
        """Finished steps; a finished run counts all of them, however early it ended."""
        return sum(
            job.config.run.max_steps if label in self._finished else _lines(job) for label, job in self._jobs.items()
        )


def _lines(job: Job) -> int:
    try:
        with (job.folder / METRICS).open("rb") as file:
            return min(sum(1 for _ in file), job.config.run.max_steps)
    except OSError:
        return 0
