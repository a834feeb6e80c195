"""Run a study's jobs in processes on this machine, one or several at a time, or as tasks on a Ray cluster."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from keel.config import Config
from keel.lab.studies.grid import Measurements, Study
from keel.lab.studies.progress import Progress
from keel.lab.studies.results import (
    CONFIG,
    FAILED,
    INTERRUPTED,
    LOG,
    OUTCOME,
    WARMSTARTS,
    JobOutcome,
    StudyRun,
    finished_outcome,
    jobs,
    open_folder,
    read_outcome,
)
from keel.run.cluster.placement import check_backend, connected

GRACE_S = 30.0  # seconds for a run to finish its step and save


@dataclass(frozen=True)
class Process:
    """A process to run: its configuration and other arguments, the file of its output, its threads."""

    arguments: tuple[str, ...]
    log: Path
    threads: int

    @property
    def started(self) -> Path:
        """A file that exists once the process runs; a cluster starts it some time after its submission."""
        return self.log.with_suffix(".started")


def run_process(process: Process, started: Callable[[subprocess.Popen[bytes]], None] | None = None) -> int:
    """Run a process to its end, with output to the log. It exits if this process dies, because its stdin closes.

    The configuration may contain secrets, so it is passed in the environment: command lines are visible to all users.
    """
    process.log.parent.mkdir(parents=True, exist_ok=True)
    (process.log.parent / OUTCOME).unlink(missing_ok=True)
    process.started.touch()
    config, *others = process.arguments
    environment = {**os.environ, "OMP_NUM_THREADS": str(process.threads), "PYTHONUNBUFFERED": "1", CONFIG: config}
    command = [sys.executable, "-m", "keel.lab.studies.child", *others]
    with process.log.open("ab") as log:
        running = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        if started is not None:
            started(running)
        return running.wait()


class Pool(Protocol):
    """The interface of pools: `submit` starts a process when there is room; the future is its exit status."""

    def submit(self, process: Process) -> Future[int]: ...

    def interrupt(self) -> None:
        """Make all running processes save and exit."""
        ...


class LocalPool:
    """Threads that each wait for one process at a time."""

    def __init__(self, parallel: int) -> None:
        self._threads = ThreadPoolExecutor(parallel)
        self._running: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        self._signal: signal.Signals | None = None  # the last signal sent to all

    def submit(self, process: Process) -> Future[int]:
        return self._threads.submit(self._run, process)

    def _run(self, process: Process) -> int:
        return 130 if self._signal is not None else run_process(process, self._started)

    def _started(self, running: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._running.append(running)
            if self._signal is not None:
                running.send_signal(self._signal)

    def interrupt(self) -> None:
        """Send SIGTERM, a second one (training then ends at once), then SIGKILL: no run outlives its study."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        try:
            for signum in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
                self._signal_all(signum)
                deadline = time.monotonic() + GRACE_S
                while self._alive() and time.monotonic() < deadline:
                    time.sleep(0.05)
        finally:  # a second Ctrl-C kills at once
            self._signal_all(signal.SIGKILL)
            self._threads.shutdown(wait=True)

    def _signal_all(self, signum: signal.Signals) -> None:
        """Send a signal to all running processes, and to those that are being started."""
        with self._lock:
            self._signal = signum
            for process in self._alive():
                process.send_signal(signum)

    def _alive(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in list(self._running) if process.poll() is None]

    def close(self) -> None:
        self._threads.shutdown(wait=True)


class RayPool:
    """Tasks on a Ray cluster that each wait for one process; Ray schedules them by the threads that a run needs.

    Every node needs Keel, and the study's folder on a shared file system.
    """

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._has_gpu = ray.cluster_resources().get("GPU", 0) >= 1
        self._refs: list[Any] = []

    def submit(self, process: Process) -> Future[int]:
        resources: dict[str, Any] = {"num_cpus": process.threads, "max_retries": 0}
        if self._has_gpu:
            resources["num_gpus"] = 1
        ref = self._ray.remote(run_process).options(**resources).remote(process)
        self._refs.append(ref)
        future: Future[int] = Future()
        threading.Thread(target=self._fetch, args=(ref, future), daemon=True).start()
        return future

    def _fetch(self, ref: Any, future: Future[int]) -> None:
        try:
            future.set_result(int(self._ray.get(ref)))
        except Exception as error:  # a cancelled task, or a lost node
            future.set_result(130 if "Cancel" in type(error).__name__ else 1)

    def interrupt(self) -> None:
        for ref in self._refs:
            self._ray.cancel(ref, force=True)


@contextmanager
def open_pool(on: str, parallel: int) -> Iterator[Pool]:
    """Open a pool: `local`, `ray` (the cluster of RAY_ADDRESS, or one started here) or `ray:ADDRESS`."""
    check_backend(on)
    if on == "local":
        pool = LocalPool(parallel)
        try:
            yield pool
        finally:
            pool.close()
    else:
        with connected(on, max(cores(), parallel)) as ray:
            yield RayPool(ray)


def cores() -> int:
    """The cores of this machine that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


POLL_S = 0.3
RELEASE_S = 10.0  # seconds to wait for a killed run to release its folder


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
    """The outcome that the run wrote, else one from its exit status and the last line of its log."""
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
    from keel.loggers.rundir import is_locked

    deadline = time.monotonic() + RELEASE_S
    while is_locked(folder / ".lock") and time.monotonic() < deadline:
        time.sleep(0.1)
