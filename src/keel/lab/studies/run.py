"""Run a study's jobs on this machine, one or several at a time, or as tasks on a Ray cluster."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from keel.config import Config
from keel.lab.studies.folder import (
    FAILED,
    INTERRUPTED,
    LOG,
    WARMSTARTS,
    JobOutcome,
    StudyRun,
    finished_outcome,
    jobs,
    open_folder,
    read_outcome,
)
from keel.lab.studies.grid import Measurements, Study
from keel.lab.studies.process import Pool, Process, cores, open_pool
from keel.lab.studies.progress import Progress
from keel.run.cluster.placement import check_backend

POLL_S = 0.3
RELEASE_S = 10.0  # for a killed run to release its folder


def run_study(
    study: Study, path: Path, *, parallel: int = 1, on: str = "local", say: Callable[[str], None] | None = None
) -> dict[str, JobOutcome]:
    """Run all unfinished jobs and return the outcomes by label. After an interruption, call it again."""
    check_backend(on)
    path = path.resolve()
    with open_folder(path, study, max(1, cores() // parallel)) as threads:
        all_jobs = jobs(path, study)
        outcomes = {job.label: result for job in all_jobs if (result := finished_outcome(job)) is not None}
        waiting = [job for job in all_jobs if job.label not in outcomes]
        with Progress(all_jobs, outcomes, say) as progress, open_pool(on, parallel) as pool, sigterm_as_interrupt():
            try:
                failures = _make_warmstarts(waiting, path / WARMSTARTS, threads, pool, progress)
                ready = [job for job in waiting if job.label not in failures]
                for label, reason in failures.items():
                    outcomes[label] = JobOutcome(FAILED, reason)
                    progress.finish(label, outcomes[label])
                for job in ready:
                    wait_until_free(job.folder)
                futures = {}
                for job in ready:
                    process = _job_process(job, study.measure, path / WARMSTARTS, threads)
                    progress.watch_job(job, process.started)
                    futures[pool.submit(process)] = job
                for future in _as_completed(futures, progress):
                    job = futures[future]
                    outcomes[job.label] = _job_outcome(job, future)
                    progress.finish(job.label, outcomes[job.label])
            except KeyboardInterrupt:
                pool.interrupt()
                raise
    return outcomes


def _as_completed(futures: Iterable[Future[int]], progress: Progress) -> Iterator[Future[int]]:
    left = set(futures)
    while left:
        done, left = wait(left, timeout=POLL_S, return_when=FIRST_COMPLETED)
        progress.refresh()
        yield from done


def _make_warmstarts(
    waiting: Sequence[StudyRun], shared: Path, threads: int, pool: Pool, progress: Progress
) -> dict[str, str]:
    """Train each shared warm start once; returns the reason by label for each job whose warm start failed."""
    from keel.lab.studies.point import shared_warmstart
    from keel.run.warmstart import is_complete
    from keel.trainer.integrity import find_damage

    by_folder: dict[Path, list[StudyRun]] = {}
    for job in waiting:
        if job.config.warmstart is not None:
            by_folder.setdefault(shared_warmstart(shared, job.config), []).append(job)
    pending: dict[Future[int], tuple[Path, Path, list[StudyRun]]] = {}
    for folder, sharers in by_folder.items():
        if not is_complete(folder) or find_damage(folder):
            command = (_config_json(sharers[0].config), "--shared", str(shared))
            process = Process(command, shared / f"{folder.name}.log", threads)
            progress.say(f"warm start for seed {sharers[0].seed}, shared by {len(sharers)} points")
            progress.watch_warmstart(folder, sharers[0], process.started)
            pending[pool.submit(process)] = (folder, process.log, sharers)
    failures: dict[str, str] = {}
    for future in _as_completed(pending, progress):
        folder, log, sharers = pending[future]
        progress.finish_warmstart(folder)
        if future.result():
            reason = f"the warm start failed: {last_line(log)}"
            failures.update({job.label: reason for job in sharers})
    return failures


def _job_process(job: StudyRun, measure: Measurements, shared: Path, threads: int) -> Process:
    command = (_config_json(job.config), "--shared", str(shared), "--measure", json.dumps(asdict(measure)))
    return Process(command, job.folder / LOG, threads)


def _config_json(config: Config) -> str:
    return json.dumps(config.to_dict())


def _job_outcome(job: StudyRun, future: Future[int]) -> JobOutcome:
    """The outcome that the run wrote; if it died before, one from its exit status and the last line of its log."""
    status = future.result()
    if status in (130, 143):
        return JobOutcome(INTERRUPTED)
    outcome = read_outcome(job.folder)
    if outcome is not None:
        return outcome
    how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
    return JobOutcome(FAILED, f"{how}: {last_line(job.folder / LOG)}")


def last_line(log: Path) -> str:
    """The last line of a log that is not blank."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return "no log"
    last = next((line.strip() for line in reversed(lines) if line.strip()), "the log is empty")
    return last.removeprefix("keel: error: ")


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, so that the runs can save."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, previous)


def wait_until_free(folder: Path) -> None:
    """Wait for a run of a study that was just killed to release its folder."""
    from keel.base.lock import is_locked

    deadline = time.monotonic() + RELEASE_S
    while is_locked(folder / ".lock") and time.monotonic() < deadline:
        time.sleep(0.1)
