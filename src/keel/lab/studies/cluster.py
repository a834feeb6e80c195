"""A study's runs as tasks on a Ray cluster. Every node needs Keel, and the study's folder on a shared file system."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from keel.lab.studies.process import Process, run_process


class RayPool:
    """Tasks that each wait for one process; Ray schedules them by the threads that a run needs."""

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
        except Exception as error:  # a task that was cancelled, or a node that was lost
            future.set_result(130 if "Cancel" in type(error).__name__ else 1)

    def interrupt(self) -> None:
        for ref in self._refs:
            self._ray.cancel(ref, force=True)
