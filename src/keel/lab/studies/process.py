"""A run of a study as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from keel.lab.studies.folder import OUTCOME

CONFIG = "KEEL_STUDY_CONFIG"  # the variable that holds a run's configuration


@dataclass(frozen=True)
class Process:
    """A process to run: its configuration and other arguments, the file of its output, its threads."""

    arguments: tuple[str, ...]
    log: Path
    threads: int

    @property
    def started(self) -> Path:
        """The file that is there once the process runs: a cluster starts it some time after it was submitted."""
        return self.log.with_suffix(".started")


def run_process(process: Process, started: Callable[[subprocess.Popen[bytes]], None] | None = None) -> int:
    """Run to the end, output to the log; the process ends by itself when this one dies, since its stdin closes.

    The configuration, which may hold secrets, travels in the environment: a command line is for all to see.
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
