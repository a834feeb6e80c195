"""Processes of a study's runs, local or on a Ray cluster, and the pools that start them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from keel.lab.studies.folder import OUTCOME
from keel.run.cluster.placement import check_backend, connected

CONFIG = "KEEL_STUDY_CONFIG"  # the variable that holds a run's configuration
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
        """Tell all running processes to save and end."""
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
    """`local`; `ray` for the cluster that RAY_ADDRESS names or one started here; `ray:ADDRESS` for that cluster."""
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
