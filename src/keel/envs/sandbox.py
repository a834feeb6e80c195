"""The sandbox: run a model's programs without network, files or capabilities, in forks of a warm Python process."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from keel.base.errors import KeelError, unknown
from keel.envs.bubblewrap import confined, python_command, refused

WORKER = Path(__file__).with_name("sandbox_worker.py")
KINDS = ("auto", "bubblewrap", "none")
MIB = 2**20
LARGEST_MESSAGE = 4 * MIB
LONGEST_ERROR, LONGEST_KIND = 500, 80  # characters of a program's error to store
START_S = 30.0
TRIES = 4  # tries of a job that fails because the sandbox itself has ended
ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "MALLOC_ARENA_MAX": "1",  # each further arena reserves 64 MiB of addresses, which count towards the memory limit
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",  # a printed set has the same order in every run
}
FAULTS = {  # why a program sent no message
    "timeout": "ran out of time",
    "output": "printed too much",
    "ended": "ended before it was done",
}


@dataclass(frozen=True)
class SandboxLimits:
    """The limits of a program. `sandbox` is auto, bubblewrap, or none (the program has your own permissions)."""

    sandbox: str = "auto"
    timeout_s: float = 4.0  # wall time of one test
    memory_mb: int = 256
    disk_mb: int = 16  # of its own /tmp, which is deleted with it
    output_kb: int = 256
    workers: int = 0  # concurrent programs; 0 is one per core

    def __post_init__(self) -> None:
        if self.sandbox not in KINDS:
            raise unknown("sandbox", self.sandbox, KINDS)
        for name in ("timeout_s", "memory_mb", "disk_mb", "output_kb"):
            if not getattr(self, name) > 0:
                raise KeelError(f"sandbox {name} is {getattr(self, name)}: it must be above 0")
        if self.memory_mb < 64:
            raise KeelError(f"sandbox memory_mb is {self.memory_mb}: it must be at least 64, which Python needs")
        if self.workers < 0:
            raise KeelError(f"sandbox workers is {self.workers}: give a count, or 0 for one per core")

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Self:
        """Take the limits from the parameters of a task, a reward or a tool."""
        return cls(**{field.name: params[field.name] for field in fields(cls) if field.name in params})

    @property
    def at_once(self) -> int:
        """The number of concurrent programs."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return self.workers or cores or 1


@dataclass(frozen=True)
class ProgramAnswer:
    """The result of one request: the process's message, its output, and a fault of `FAULTS` if there is no message.

    Message and output come from the program: they are data of limited size, and never decide whether a test passes.
    """

    message: Mapping[str, Any]
    output: str
    errors: str = ""  # what it wrote to its standard error
    fault: str | None = None

    @property
    def ok(self) -> bool:
        """Whether code ran to its end, according to its process."""
        return self.message.get("ok") is True or self.message.get("exit") is True

    @property
    def error(self) -> str:
        """One line on why the code did not run to its end."""
        if self.fault is not None:
            return FAULTS[self.fault]
        text = "ended with an error status" if "exit" in self.message else str(self.message.get("error", ""))
        return next(iter(text[:LONGEST_ERROR].strip().splitlines()), "")

    @property
    def kind(self) -> str:
        """The fault, or the type of the error."""
        return self.fault or str(self.message.get("kind", ""))[:LONGEST_KIND]


class Program:
    """One process in the sandbox. `close` kills it and everything that it started."""

    def __init__(self, sandbox: Sandbox) -> None:
        self.limits, self._sandbox, self._owner = sandbox.limits, sandbox, os.getpid()
        self._start = sandbox.starts
        self._asked = threading.Lock()
        self._received, self.closed = b"", False
        self._channel, channel = socket.socketpair()
        pipes: list[int] = []
        try:
            for _ in range(2):
                pipes += os.pipe()
            self._pipes = {pipes[0]: bytearray(), pipes[2]: bytearray()}  # its output and its errors
            for pipe in self._pipes:
                os.set_blocking(pipe, False)
            self._channel.setblocking(False)
            sandbox.fork(channel.fileno(), pipes[1], pipes[3])
        except OSError:
            self._channel.close()
            for pipe in pipes[::2]:
                os.close(pipe)
            raise
        finally:
            channel.close()
            for pipe in pipes[1::2]:
                os.close(pipe)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process: the warm process kills it when the connection is shut down."""
        if not self.closed:
            self.closed = True
            if os.getpid() == self._owner:
                with contextlib.suppress(OSError):
                    self._channel.shutdown(socket.SHUT_RDWR)
            self._channel.close()
            for pipe in self._pipes:
                os.close(pipe)

    def started(self) -> bool:
        """Wait until the process is confined. It has received no program yet, so its message can be trusted."""
        try:
            message, _ = self._exchange(b"", time.monotonic() + START_S)
        except _SandboxFault:
            message = {}
        if message.get("ready") is True:
            return True
        self.close()
        if "unconfined" in message:
            why = "".join(c if c.isprintable() else " " for c in str(message["unconfined"]))
            raise KeelError(f"the sandbox could not be set up: {why[:200]}")
        return False

    def ask(
        self,
        request: Mapping[str, Any],
        until: float,
        answer: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
    ) -> ProgramAnswer:
        """Send a request and wait for its message; `answer` serves calls that the process makes meanwhile.

        `until` is a deadline of `time.monotonic`. After a request with `stdin` the process must end by itself. After a
        fault the program is closed. Raises `Lost` if the sandbox ended, not the program.
        """
        if not self._asked.acquire(blocking=False):
            raise RuntimeError("the program is still answering another request: wait for its answer")
        try:
            for read in self._pipes.values():
                read.clear()
            pending, message, fault = _line(request), dict[str, Any](), None
            try:
                message, pending = self._exchange(pending, until)
                while "call" in message and answer is not None:
                    message, pending = self._exchange(_line(answer(message)), until)
                if "stdin" in request:
                    self._end(until)
            except _SandboxFault as error:
                fault = str(error)
            except RecursionError:  # the data is nested too deeply
                fault = "ended"
            if fault is None:
                self._drain()
            elif fault == "ended" and (self._start != self._sandbox.starts or not self._sandbox.alive):
                self.close()
                raise Lost
            else:
                message = {}
                self.close()
            output, errors = (text.decode("utf-8", "replace") for text in self._cut())
            return ProgramAnswer(message, output, errors, fault)
        finally:
            self._asked.release()

    def _end(self, until: float) -> None:
        """Wait for the end of the process, since its message does not prove that it has ended."""
        try:
            self._exchange(b"", until)
        except _SandboxFault as fault:
            if str(fault) == "ended" and not self._received:
                return
            raise
        raise _SandboxFault("ended")

    def _cut(self) -> list[bytes]:
        """Output and errors, which share one limit."""
        left, texts = self.limits.output_kb * 1024, []
        for read in self._pipes.values():
            texts.append(bytes(read[:left]))
            left -= len(texts[-1])
        return texts

    def _exchange(self, pending: bytes, until: float) -> tuple[dict[str, Any], bytes]:
        """Send pending data, and return the next message."""
        with selectors.DefaultSelector() as selector:
            for pipe in self._pipes:
                selector.register(pipe, selectors.EVENT_READ)
            selector.register(self._channel, selectors.EVENT_READ | (selectors.EVENT_WRITE if pending else 0))
            while b"\n" not in self._received:
                events = selector.select(max(0.0, until - time.monotonic()))
                if time.monotonic() >= until:
                    raise _SandboxFault("timeout")
                for key, event in events:
                    if key.fd in self._pipes:
                        if not self._read(key.fd):
                            selector.unregister(key.fd)
                        continue
                    if event & selectors.EVENT_WRITE and pending:
                        pending = self._send(pending)
                        if not pending:
                            selector.modify(self._channel, selectors.EVENT_READ)
                    if event & selectors.EVENT_READ:
                        self._receive()
        line, _, self._received = self._received.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            raise _SandboxFault("ended") from None
        if not isinstance(message, dict):
            raise _SandboxFault("ended")
        return message, pending

    def _send(self, pending: bytes) -> bytes:
        try:
            return pending[self._channel.send(pending) :]
        except BlockingIOError:
            return pending
        except OSError:
            raise _SandboxFault("ended") from None

    def _receive(self) -> None:
        try:
            data = self._channel.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            raise _SandboxFault("ended")
        self._received += data
        if len(self._received) > LARGEST_MESSAGE:
            raise _SandboxFault("output")

    def _read(self, pipe: int) -> bool:
        """Read available data; False at the end of the stream."""
        try:
            data = os.read(pipe, 1 << 16)
        except BlockingIOError:
            return True
        self._pipes[pipe] += data
        if sum(map(len, self._pipes.values())) > self.limits.output_kb * 1024:
            raise _SandboxFault("output")
        return bool(data)

    def _drain(self) -> None:
        """Read what was printed before the message, which is already in the pipes."""
        for pipe, read in self._pipes.items():
            with contextlib.suppress(BlockingIOError):
                while len(read) <= self.limits.output_kb * 1024 and (data := os.read(pipe, 1 << 16)):
                    read += data


class _SandboxFault(Exception):
    """The reason for a missing message: a name of `FAULTS`."""


class Lost(Exception):
    """The sandbox itself ended while a program ran: run the program again."""


class Sandbox:
    """A warm process, and the programs forked from it; some are forked ahead, which saves their start-up time."""

    def __init__(self, limits: SandboxLimits) -> None:
        self.limits = limits
        self.threads = ThreadPoolExecutor(limits.at_once, "keel-sandbox")
        self._lock = threading.Lock()
        self._ready: deque[Program] = deque()
        self._folder: str | None = None
        self.starts = 0  # number of the warm process; a program belongs to one
        self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def program(self) -> Program:
        """A confined process that has run nothing yet."""
        why = "its process ends immediately"
        for attempt in range(TRIES):
            time.sleep(0.1 * attempt)
            with self._lock:
                if not self.alive:
                    self.close()
                    self._start()
                try:
                    while len(self._ready) <= self.limits.at_once:
                        self._ready.append(Program(self))
                except OSError as error:  # the warm process has just ended, or there is no free descriptor
                    why = str(error)
                    if not self._ready:
                        continue
                program = self._ready.popleft()
            if program.started():
                return program
        raise KeelError(f"the sandbox cannot start a program: {why}; free memory, processes or file descriptors")

    def fork(self, *descriptors: int) -> None:
        """Send these file descriptors to the warm process, which forks a child with them."""
        socket.send_fds(self._control, [b"f"], descriptors)

    @property
    def alive(self) -> bool:
        """Whether the warm process runs. When it ends, its connection closes before those of its programs."""
        try:
            return not self._exited() and self._control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def _exited(self) -> bool:
        """Whether bubblewrap has ended. It is not reaped here, so that its pid still identifies its process group."""
        if self._process.returncode is not None or not hasattr(os, "waitid"):  # missing in older Pythons on macOS
            return self._process.poll() is not None
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # another thread has waited for it, or this process is a fork of Keel's
            return True

    def close(self) -> None:
        """End the warm process and all programs; in a fork of Keel's process, only drop the references to them."""
        for program in self._ready:
            program.close()
        self._ready.clear()
        self._control.close()
        if os.getpid() != self._owner:
            return
        until = time.monotonic() + 5
        while not self._exited() and time.monotonic() < until:
            time.sleep(0.002)
        if self._process.returncode is None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _start(self) -> None:
        limits, isolated = self.limits, self.limits.sandbox != "none"
        folder = "/tmp"
        if not isolated:
            folder = self._folder = tempfile.mkdtemp(prefix="keel-programs-")
        self._control, theirs = socket.socketpair()
        settings = {
            "control": theirs.fileno(),  # above 2, because bubblewrap itself holds a copy of 0 to 2
            "isolated": isolated,
            "folder": folder,
            "memory": limits.memory_mb * MIB,
            "disk": limits.disk_mb * MIB,
            # CPU time of all calls of an episode; each call also has a limit of wall time
            "cpu_s": 16 * int(limits.timeout_s + 1),
        }
        python = [*python_command(WORKER.read_text(encoding="utf-8")), json.dumps(settings)]
        self._owner = os.getpid()
        self.starts += 1
        with theirs, tempfile.TemporaryFile() as errors:
            start = confined if isolated else subprocess.Popen
            self._process = start(
                python,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env=ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
            theirs.close()
            self._control.settimeout(START_S)
            try:
                started = self._control.recv(1)
            except OSError:
                started = b""
            self._control.settimeout(None)
            if started:
                return
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self.close()
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines() or ["it did not answer"]
            raise refused(f"bubblewrap does not work here ({lines[-1][:200]})" if isolated else lines[-1][:200])


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


@lru_cache(maxsize=8)
def sandbox(limits: SandboxLimits) -> Sandbox:
    """The sandbox with these limits, started once per process."""
    started = Sandbox(limits)
    atexit.register(started.close)
    return started


os.register_at_fork(after_in_child=sandbox.cache_clear)
