"""A Ray actor that starts, follows and signals one process on its node. The process ends with the actor.

`python -m keel.run.cluster.actor ARGUMENTS` is that process: it runs `keel ARGUMENTS`.
"""

from __future__ import annotations

import codecs
import os
import queue
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from keel.base.watchdog import exit_with_parent

CHILD = "keel.run.cluster.actor"
POLL_S = 0.2
DRAIN_S = 2.0  # seconds to read the last lines of an ended process; its children may keep the pipes open


class Output(NamedTuple):
    """Output of a process on a stream ("stdout" or "stderr")."""

    stream: str
    text: str


class ProcessActor:
    """Runs `keel ARGUMENTS` on its node; output also goes to Ray's log of this actor.

    `defaults` are environment variables used if the node does not set them; `folder` is the working directory.
    """

    def __init__(self, defaults: Mapping[str, str], folder: str) -> None:
        self._environment = {**defaults, **os.environ, "PYTHONUNBUFFERED": "1"}
        self._cwd = folder

    def free_port(self, host: str) -> int:
        """A free port of this node."""
        with socket.socket() as listener:
            listener.bind((host, 0))
            return int(listener.getsockname()[1])

    def devices(self) -> str:
        """The GPUs of this actor, as CUDA_VISIBLE_DEVICES."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def write(self, name: str, text: str) -> str:
        """Write a private file on this node, removed with the actor; returns its path."""
        self._folder = tempfile.TemporaryDirectory(prefix="keel-ray-")
        path = Path(self._folder.name) / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    def start(self, python: str | None, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the process in its own session, so that Ctrl-C in a terminal does not reach it."""
        self._process = subprocess.Popen(
            [python or sys.executable, "-m", CHILD, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**self._environment, **environment},
            cwd=self._cwd,
            start_new_session=True,
        )
        self._events: queue.Queue[Output | int] = queue.Queue()
        threading.Thread(target=_watch, args=(self._process, self._events), daemon=True).start()

    def follow(self) -> Output | int:
        """Wait for the next output, or at the end the exit status (-9 after kill -9)."""
        return self._events.get()

    def serving(self, host: str, port: int) -> bool:
        """Wait until the process listens; False if it ended before."""
        while self._process.poll() is None:
            with suppress(OSError), socket.create_connection((host, port), timeout=POLL_S):
                return True
            time.sleep(POLL_S)
        return False

    def signal(self, number: int) -> None:
        """Send a signal to the process if it is running."""
        if self._process.poll() is None:
            self._process.send_signal(number)


def _watch(process: subprocess.Popen[bytes], events: queue.Queue[Output | int]) -> None:
    """Queue a process's output, then its exit status; kill its remaining children."""
    assert process.stdout is not None
    assert process.stderr is not None
    streams = {"stdout": (process.stdout, sys.stdout), "stderr": (process.stderr, sys.stderr)}
    readers = [
        threading.Thread(target=_read, args=(name, *pair, events), daemon=True) for name, pair in streams.items()
    ]
    for reader in readers:
        reader.start()
    status = process.wait()
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    for reader in readers:
        reader.join(DRAIN_S)
    events.put(status)


def _read(name: str, source: IO[bytes], log: IO[str], events: queue.Queue[Output | int]) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while chunk := os.read(source.fileno(), 2**16):
        if text := decoder.decode(chunk):
            log.write(text)
            log.flush()
            events.put(Output(name, text))


def main() -> None:
    """Watch the actor, then run keel. SIGINT is unblocked, because Ray's workers block it."""
    threading.Thread(target=exit_with_parent, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    runpy.run_module("keel", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
