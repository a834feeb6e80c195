"""One process on a node of the cluster, as an actor starts, follows and signals it. It ends when the actor does."""

from __future__ import annotations

import codecs
import os
import queue
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

CHILD = "keel.run.cluster.child"
LOOK_S = 0.2
DRAIN_S = 2.0  # for the last lines of a process that has ended; what it started may hold its pipes


class Output(NamedTuple):
    """What a process wrote to a stream ("stdout" or "stderr")."""

    stream: str
    text: str


class ProcessActor:
    """Runs `keel ARGUMENTS` on its node; what is written goes to Ray's own logs of this actor too.

    What the node's environment lacks is taken from `defaults`; `folder` is where the process starts.
    """

    def __init__(self, defaults: Mapping[str, str], folder: str) -> None:
        self._environment = {**defaults, **os.environ, "PYTHONUNBUFFERED": "1"}
        self._cwd = folder

    def free_port(self, host: str) -> int:
        """A port of this node that nobody listens on."""
        with socket.socket() as listener:
            listener.bind((host, 0))
            return int(listener.getsockname()[1])

    def devices(self) -> str:
        """The GPUs that Ray has given to this actor, as CUDA_VISIBLE_DEVICES."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def write(self, name: str, text: str) -> str:
        """A file on this node that only its owner reads, and that goes with the actor; returns its path."""
        self._folder = tempfile.TemporaryDirectory(prefix="keel-ray-")
        path = Path(self._folder.name) / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    def start(self, python: str | None, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the process, in a session of its own: a Ctrl-C of the terminal is not for it."""
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
        """What comes next, once there is something: output, or at the end the exit status (-9 of kill -9)."""
        return self._events.get()

    def serving(self, host: str, port: int) -> bool:
        """Wait until the process listens; False where it has ended before."""
        while self._process.poll() is None:
            with suppress(OSError), socket.create_connection((host, port), timeout=LOOK_S):
                return True
            time.sleep(LOOK_S)
        return False

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it still runs."""
        if self._process.poll() is None:
            self._process.send_signal(number)


def _watch(process: subprocess.Popen[bytes], events: queue.Queue[Output | int]) -> None:
    """Pass on what a process writes, then its status; what it has left behind is ended with it."""
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
