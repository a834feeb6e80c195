"""Running a study's jobs: here, one after another or several at a time, or as tasks on a Ray cluster."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from keel.base.errors import KeelError
from keel.config import Config
from keel.lab.studies.folder import (
    FAILED,
    INTERRUPTED,
    LOG,
    STARTS,
    Job,
    Outcome,
    jobs,
    open_folder,
    outcome,
    read_outcome,
)
from keel.lab.studies.grid import Measure, Study
from keel.lab.studies.process import Process, run_process
from keel.lab.studies.progress import Progress

POLL_S = 0.3
GRACE_S = 30.0  # for a run to finish its step and save


class Pool(Protocol):
    """Where processes run: `submit` starts one as soon as there is room; the future is its exit status."""

    def submit(self, process: Process) -> Future[int]: ...

    def interrupt(self) -> None:
        """Ask all that run to save and end."""
        ...


def run_study(
    study: Study, path: Path, *, parallel: int = 1, on: str = "local", say: Callable[[str], None] | None = None
) -> dict[str, Outcome]:
    """Run what is not finished yet; how each job ended, by its label. Killed at any time, it can be started again."""
    check_place(on)
    path = path.resolve()
    with open_folder(path, study, max(1, _cores() // parallel)) as threads:
        todo = jobs(path, study)
        ended = {job.label: found for job in todo if (found := outcome(job)) is not None}
        waiting = [job for job in todo if job.label not in ended]
        with Progress(todo, ended, say) as progress, open_pool(on, parallel) as pool, terminated_like_interrupted():
            try:
                broken = _starts(waiting, path / STARTS, threads, pool, progress)
                ready = [job for job in waiting if job.label not in broken]
                for label, reason in broken.items():
                    ended[label] = Outcome(FAILED, reason)
                    progress.ended(label, ended[label])
                for job in ready:
                    wait_until_free(job.folder)
                futures = {pool.submit(_process(job, study.measure, path / STARTS, threads)): job for job in ready}
                for future in _as_they_end(futures, progress):
                    job = futures[future]
                    ended[job.label] = _outcome(job, future)
                    progress.ended(job.label, ended[job.label])
            except KeyboardInterrupt:
                pool.interrupt()
                raise
    return ended


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _as_they_end(futures: Sequence[Future[int]] | dict[Future[int], Any], progress: Progress) -> Iterator[Future[int]]:
    left = set(futures)
    while left:
        done, left = wait(left, timeout=POLL_S, return_when=FIRST_COMPLETED)
        progress.look()
        yield from done


def _starts(waiting: Sequence[Job], shared: Path, threads: int, pool: Pool, progress: Progress) -> dict[str, str]:
    """Make every warm start that jobs share, once; the reason for each job whose warm start failed, by label."""
    from keel.lab.studies.point import start_place
    from keel.run.warmstart import is_complete
    from keel.trainer.integrity import damages

    wanted: dict[Path, list[Job]] = {}
    for job in waiting:
        if job.config.warmstart is not None:
            wanted.setdefault(start_place(shared, job.config), []).append(job)
    made: dict[Future[int], tuple[Path, list[Job]]] = {}
    for place, sharing in wanted.items():
        if not is_complete(place) or damages(place):
            log = shared / f"{place.name}.log"
            command = (_plain(sharing[0].config), "--shared", str(shared))
            made[pool.submit(Process(command, log, threads))] = (log, sharing)
            progress.say(f"warm start for seed {sharing[0].seed}, shared by {len(sharing)} points")
    broken: dict[str, str] = {}
    for future in _as_they_end(made, progress):
        log, sharing = made[future]
        if future.result():
            reason = f"the warm start failed: {last_line(log)}"
            broken.update({job.label: reason for job in sharing})
    return broken


def _process(job: Job, measure: Measure, shared: Path, threads: int) -> Process:
    command = (_plain(job.config), "--shared", str(shared), "--measure", json.dumps(asdict(measure)))
    return Process(command, job.folder / LOG, threads)


def _plain(config: Config) -> str:
    return json.dumps(config.to_dict())


def _outcome(job: Job, future: Future[int]) -> Outcome:
    """What the run wrote; or, of one that died before it could, its exit status and its last line."""
    status = future.result()
    if status in (130, 143):
        return Outcome(INTERRUPTED)
    written = read_outcome(job.folder)
    if written is not None:
        return written
    how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
    return Outcome(FAILED, f"{how}: {last_line(job.folder / LOG)}")


def last_line(log: Path) -> str:
    """The last line of a log that says something."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return "no log"
    return next((line.strip() for line in reversed(lines) if line.strip()), "nothing was said").removeprefix(
        "keel: error: "
    )


# ------------------------------------------------------------------------------------------------- pools


class Local:
    """Threads that each wait for one process at a time."""

    def __init__(self, parallel: int) -> None:
        self._threads = ThreadPoolExecutor(parallel)
        self._running: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        self._asked: signal.Signals | None = None  # the last signal that was sent to all

    def submit(self, process: Process) -> Future[int]:
        return self._threads.submit(self._run, process)

    def _run(self, process: Process) -> int:
        return 130 if self._asked is not None else run_process(process, self._started)

    def _started(self, running: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._running.append(running)
            if self._asked is not None:
                running.send_signal(self._asked)

    def interrupt(self) -> None:
        """Ask, ask again (training then ends at once), kill: no run outlives its study."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        try:
            for ask in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
                self._ask(ask)
                until = time.monotonic() + GRACE_S
                while self._alive() and time.monotonic() < until:
                    time.sleep(0.05)
        finally:  # a second Ctrl-C waits no longer
            self._ask(signal.SIGKILL)
            self._threads.shutdown(wait=True)

    def _ask(self, number: signal.Signals) -> None:
        """Send a signal to all that run, and to those that are just being started as soon as they are known."""
        with self._lock:
            self._asked = number
            for one in self._alive():
                one.send_signal(number)

    def _alive(self) -> list[subprocess.Popen[bytes]]:
        return [one for one in list(self._running) if one.poll() is None]

    def close(self) -> None:
        self._threads.shutdown(wait=True)


def check_place(on: str) -> None:
    """Refuse a place that runs cannot take place in, before there is a folder."""
    kind, _, address = on.partition(":")
    if kind != "ray" and (kind != "local" or address):
        raise KeelError(f"--on {on} is not known: use local, ray or ray:ADDRESS")


@contextmanager
def open_pool(on: str, parallel: int) -> Iterator[Pool]:
    """`local`; `ray` for the cluster that RAY_ADDRESS names or one started here; `ray:ADDRESS` for that cluster."""
    check_place(on)
    kind, _, address = on.partition(":")
    if kind == "local":
        pool = Local(parallel)
        try:
            yield pool
        finally:
            pool.close()
    else:
        from keel.lab.studies.cluster import ray_pool

        with ray_pool(address or None, max(_cores(), parallel)) as cluster:
            yield cluster


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM does what Ctrl-C does, so that the runs are asked to save."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGTERM, before)


def wait_until_free(folder: Path, limit_s: float = 10.0) -> None:
    """A run of a study that was just killed may still be letting go of its folder."""
    from keel.base.lock import in_use

    until = time.monotonic() + limit_s
    while in_use(folder / ".lock") and time.monotonic() < until:
        time.sleep(0.1)
