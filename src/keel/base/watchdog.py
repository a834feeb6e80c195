"""End all ranks when one fails. The rank that fails first reports the error; the others exit with its status.

A store (torchrun's, or one that rank 0 opens) holds the first failure. One thread polls it every second. Another thread
waits for the next rank's shutdown message. If the connection closes without it, that rank has died.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from keel.base.errors import KeelError

if TYPE_CHECKING:
    from torch.distributed import Store

RENDEZVOUS_TIMEOUT = timedelta(minutes=5)  # between the first rank's arrival and the last's
NO_TIMEOUT = timedelta(days=3650)
POLL_S = 1.0  # seconds between two reads of the store
ERROR_GRACE_S = 10.0  # wait after a broken collective, so that the rank that caused it reports first
SHUTDOWN_TAG = 20_001  # tag of the point-to-point message that ends a run
KILLED_STATUS = 137  # exit status after a process has died: that of kill -9
DIED_MESSAGE = "has died (killed, crashed, or its machine is gone)"
FAILURE_KEY = "failure"
LAUNCH_FLAGS = "KEEL_LAUNCH_FLAGS"  # environment variable: the flags that the launcher was started with

_rendezvous_ids = itertools.count()
_exiting = threading.Lock()  # held by the thread that reports the lost store, so that only one does


class FailedRank(NamedTuple):
    """The rank that failed first, and the exit status of all ranks."""

    rank: int
    status: int


class PeerFailed(RuntimeError):
    """Another rank has failed and reports the error."""


def process_rank() -> int:
    """The rank of this process (RANK); 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def process_count() -> int:
    """The number of processes (WORLD_SIZE), set by torchrun or another launcher; 1 if unset."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_failure(status: int) -> bool:
    """Whether this process failed first and reports its error; True if the store cannot be reached."""
    if process_count() == 1 or not (_uses_torchrun_store() or _client.cache_info().currsize):
        return True
    try:
        if process_rank() > 0 and _first_failure() is None:  # if all ranks have the error, rank 0 reports it
            time.sleep(POLL_S)
        return _claim_first_failure(status).rank == process_rank()
    except (KeelError, RuntimeError):  # the store is closed
        return True


def hard_exit(status: int) -> NoReturn:
    """Exit at once, even if the main thread hangs in a collective."""
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def exit_with_parent() -> NoReturn:
    """Wait until the parent closes this process's stdin, then kill this process and its children."""
    while os.read(0, 1):  # not sys.stdin: its lock would block the interpreter's exit
        pass
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(KILLED_STATUS)


@contextmanager
def rendezvous(resume: str = "") -> Iterator[Store]:
    """Wait for all ranks, and end all of them if one fails in the block. Yields a store for the process group.

    `resume` is the command that resumes the run; errors show it.
    """
    from torch.distributed import PrefixStore

    opening, closing = next(_rendezvous_ids), threading.Event()
    _client()
    store = PrefixStore(f"keel/{_restart_count()}/{opening}", _connect(hosts=False))
    follower = threading.Thread(target=_poll_failures, args=(closing, resume), daemon=True)
    follower.start()
    try:
        with _sigterm_raises():
            _wait_for_all_ranks(store)
            yield store
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        _handle_failure(error, resume)
        raise
    finally:
        closing.set()
    follower.join()


@contextmanager
def watch_next_rank(resume: str = "") -> Iterator[None]:
    """Watch the next rank while the process group is open. All ranks leave the block together."""
    import torch
    import torch.distributed as dist

    rank, size = process_rank(), process_count()
    watcher = threading.Thread(target=_watch_rank, args=((rank + 1) % size, resume), daemon=True)
    watcher.start()
    yield
    dist.barrier()
    dist.send(torch.zeros(1), (rank - 1) % size, tag=SHUTDOWN_TAG)
    watcher.join()
    dist.barrier()  # rank 0 may host the store: no rank polls it any more


def _handle_failure(error: BaseException, resume: str) -> None:
    """Return on the rank that failed first; exit on all others."""
    with suppress(ValueError):  # torchrun sends SIGTERM to all ranks when one fails; only the main thread may ignore it
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # meanwhile the watchdog threads exit this process if another rank failed first
    if _in_collective(error):
        time.sleep(ERROR_GRACE_S)
    elif process_rank() > 0 or isinstance(error, SystemExit):
        time.sleep(2 * POLL_S)
    status = 2 if isinstance(error, KeelError) else 130 if isinstance(error, KeyboardInterrupt) else 1
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else 1
    first = _claim_first_failure(status)
    if first.rank != process_rank():
        _exit_after(first)
    error.add_note(f"This was rank {process_rank()} of {process_count()}; the others exited{_resume_hint(resume)}.")
    if _hosts_store():
        time.sleep(2 * POLL_S)  # until the other ranks have read it


def _resume_hint(resume: str) -> str:
    return f"; resume with: {resume}" if resume else ""


def _in_collective(error: BaseException) -> bool:
    """Whether another rank is the likely cause: a PeerFailed error, or an error from torch.distributed."""
    if isinstance(error, PeerFailed):
        return True
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and str(frames[-1][0].f_globals.get("__name__")).startswith("torch.distributed.")


def _poll_failures(closing: threading.Event, resume: str) -> None:
    while not closing.wait(POLL_S):
        try:
            first = _first_failure()
        except RuntimeError:
            if not closing.is_set():
                _exit_without_store(resume)
            return
        if first is not None:
            if first.rank != process_rank():
                _exit_after(first)
            return


def _watch_rank(neighbour: int, resume: str) -> None:
    import torch
    import torch.distributed as dist

    try:
        message = dist.irecv(torch.zeros(1), src=neighbour, tag=SHUTDOWN_TAG)
        assert message is not None
        message.wait(NO_TIMEOUT)
    except RuntimeError:
        try:
            first = _claim_first_failure(KILLED_STATUS)
        except RuntimeError:
            _exit_without_store(resume)
        if first.rank == process_rank():
            if first.status != KILLED_STATUS:  # this process has failed and reports it itself
                return
            _print_error(f"rank {neighbour} of {process_count()} {DIED_MESSAGE}{_resume_hint(resume)}")
        _exit_after(first)


def _exit_after(first: FailedRank) -> NoReturn:
    """Exit after a failure that another rank or thread has reported."""
    if _hosts_store():
        time.sleep(2 * POLL_S)  # until the other ranks have read it
    hard_exit(first.status)


def _exit_without_store(resume: str) -> NoReturn:
    """Exit because the process that hosts the store is gone. The last rank reports it."""
    _exiting.acquire()
    if process_rank() == process_count() - 1:
        lost = "the process that started this run" if _uses_torchrun_store() else f"rank 0 of {process_count()}"
        _print_error(f"{lost} {DIED_MESSAGE}{_resume_hint(resume)}")
    hard_exit(KILLED_STATUS)


def _print_error(line: str) -> None:
    sys.stderr.write(f"keel: error: {line}\n")


def _wait_for_all_ranks(store: Store) -> None:
    """Wait until all ranks have started; the error names the missing ones."""
    rank, size = process_rank(), process_count()
    store.set(f"here/{rank}", "")
    if store.add("arrived", 1) == size:
        store.set("complete", "")
    try:
        store.wait(["complete"], RENDEZVOUS_TIMEOUT)
    except RuntimeError:
        missing = [str(other) for other in range(size) if not store.check([f"here/{other}"])]
        raise KeelError(
            f"{len(missing)} of {size} processes have not started after {RENDEZVOUS_TIMEOUT.seconds // 60} minutes "
            f"(rank {', '.join(missing[:8])}): read their output, and start all {size} at the same time"
        ) from None


def _claim_first_failure(status: int) -> FailedRank:
    """Record this failure unless there is an earlier one; return the first."""
    return _parse_failure(_failure_store().compare_set(FAILURE_KEY, "", f"{process_rank()} {status}"))


def _first_failure() -> FailedRank | None:
    keys = _failure_store()
    return _parse_failure(keys.get(FAILURE_KEY)) if keys.check([FAILURE_KEY]) else None


def _parse_failure(text: bytes) -> FailedRank:
    rank, status = text.decode().split()
    return FailedRank(int(rank), int(status))


def _failure_store() -> Store:
    from torch.distributed import PrefixStore

    return PrefixStore(f"keel/{_restart_count()}", _client())


def _restart_count() -> str:
    """Torchrun's restart count, a prefix of keys, because its store outlives a restart of the processes."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _uses_torchrun_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _hosts_store() -> bool:
    return process_rank() == 0 and not _uses_torchrun_store()


@cache
def _client() -> Store:
    """This process's connection to the store; rank 0 opens the store if torchrun has none."""
    return _connect(hosts=_hosts_store())


def _connect(*, hosts: bool) -> Store:
    from torch.distributed import TCPStore

    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not (host and port.isdecimal()):
        raise KeelError(
            f"WORLD_SIZE is {process_count()}, but MASTER_ADDR or MASTER_PORT is missing: set both to the address "
            "of rank 0, or start the processes with keel train --nproc or torchrun"
        )
    try:
        return TCPStore(host, int(port), is_master=hosts, wait_for_workers=False, timeout=RENDEZVOUS_TIMEOUT)
    except RuntimeError as error:
        if hosts and "EADDRINUSE" in str(error):
            raise KeelError(f"port {port} is in use: set MASTER_PORT to a free one, the same on all ranks") from None
        where = f"{host}:{port} (MASTER_ADDR, MASTER_PORT)"
        if hosts:
            raise KeelError(f"rank 0 cannot listen on {where}: {str(error).splitlines()[0]}") from None
        raise KeelError(
            f"rank {process_rank()} cannot reach rank 0 at {where} after {RENDEZVOUS_TIMEOUT.seconds // 60} minutes: "
            "check that rank 0 runs and that the address can be reached from here"
        ) from None


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Raise an exception on an unhandled SIGTERM. Torchrun sends it to all ranks when one fails; the exception leaves
    time to report which one."""
    not_main = threading.current_thread() is not threading.main_thread()
    if not_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _raise_system_exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _raise_system_exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
