"""How several processes end together: the first failure is named once, by the process that had it, and ends them all.

A store (torchrun's own, or one that rank 0 opens) holds the first failure. One thread looks there every second. Another
waits for the next rank's goodbye: a connection that closes without one belonged to a process that has died.
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

ARRIVAL = timedelta(minutes=5)  # how long ranks may be apart at the start
FOREVER = timedelta(days=3650)
LOOK_S = 1.0  # between two looks at the store
CAUSE_S = 10.0  # in which the cause of a broken collective becomes known
GOODBYE = 20_001  # the message's tag
LOST = 137  # exit status where a process has died: that of kill -9
DIED = "has died (killed, crashed, or its machine is gone)"
FAILURE = "failure"
LAUNCH_FLAGS = "KEEL_LAUNCH_FLAGS"  # the variable that holds the flags under which a launcher was started

_openings = itertools.count()
_ending = threading.Lock()  # taken by the thread that ends this process


class FailedRank(NamedTuple):
    """Who failed first, and the exit status of all."""

    rank: int
    status: int


class PeerFailed(RuntimeError):
    """Another rank has failed, and names the cause itself."""


def process_rank() -> int:
    """This process's number among those started together."""
    return int(os.environ.get("RANK", "0"))


def process_count() -> int:
    """How many processes were started together, by torchrun or by what sets its variables."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def first_to_fail(status: int) -> bool:
    """Whether this process's failure is the one to be named; True where nobody can be asked."""
    if process_count() == 1 or not (_by_torchrun() or _client.cache_info().currsize):
        return True
    try:
        if process_rank() > 0 and _first_failure() is None:  # what all ranks run into is said by the first
            time.sleep(LOOK_S)
        return _claim(status).rank == process_rank()
    except (KeelError, RuntimeError):  # the store is gone
        return True


def end(status: int) -> NoReturn:
    """End this process at once, also where its main thread hangs in a collective."""
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def end_with_parent() -> NoReturn:
    """Wait until the process that holds the other end of stdin is gone, then end this one and what it has started."""
    while os.read(0, 1):  # not sys.stdin, whose lock would keep the interpreter from ending
        pass
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(LOST)


@contextmanager
def joined(resume: str = "") -> Iterator[Store]:
    """Together with the other ranks until the block ends: a failure anywhere ends all. Yields a store for the group.

    `resume` is what to type to go on after a failure.
    """
    from torch.distributed import PrefixStore

    opening, closing = next(_openings), threading.Event()
    _client()
    store = PrefixStore(f"keel/{_restart()}/{opening}", _connect(hosts=False))
    follower = threading.Thread(target=_follow_failures, args=(closing, resume), daemon=True)
    follower.start()
    try:
        with _sigterm_raises():
            _arrive(store)
            yield store
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        _fail(error, resume)
        raise
    finally:
        closing.set()
    follower.join()


@contextmanager
def watched(resume: str = "") -> Iterator[None]:
    """With an eye on the next rank, inside the open process group; the end is reached by all ranks together."""
    import torch
    import torch.distributed as dist

    rank, size = process_rank(), process_count()
    watcher = threading.Thread(target=_watch_neighbour, args=((rank + 1) % size, resume), daemon=True)
    watcher.start()
    yield
    dist.barrier()
    dist.send(torch.zeros(1), (rank - 1) % size, tag=GOODBYE)
    watcher.join()
    dist.barrier()  # rank 0 may hold the store: nobody still looks there


def _fail(error: BaseException, resume: str) -> None:
    """Return on the rank that failed first; end the process on all others."""
    with suppress(ValueError):  # torchrun's, to all ranks when one has failed; only the main thread may say so
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # the threads end this process meanwhile if the cause is elsewhere
    if _in_collective(error):
        time.sleep(CAUSE_S)
    elif process_rank() > 0 or isinstance(error, SystemExit):
        time.sleep(2 * LOOK_S)
    status = 2 if isinstance(error, KeelError) else 130 if isinstance(error, KeyboardInterrupt) else 1
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else 1
    first = _claim(status)
    if first.rank != process_rank():
        _end_after(first)
    error.add_note(f"This was rank {process_rank()} of {process_count()}; the others have ended{_go_on(resume)}.")
    if _hosts():
        time.sleep(2 * LOOK_S)  # until the others have seen it


def _go_on(resume: str) -> str:
    return f"; resume with: {resume}" if resume else ""


def _in_collective(error: BaseException) -> bool:
    """Whether another rank is the cause: said so, or most often, where torch.distributed raised it."""
    if isinstance(error, PeerFailed):
        return True
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and str(frames[-1][0].f_globals.get("__name__")).startswith("torch.distributed.")


def _follow_failures(closing: threading.Event, resume: str) -> None:
    while not closing.wait(LOOK_S):
        try:
            first = _first_failure()
        except RuntimeError:
            if not closing.is_set():
                _end_without_store(resume)
            return
        if first is not None:
            if first.rank != process_rank():
                _end_after(first)
            return


def _watch_neighbour(neighbour: int, resume: str) -> None:
    import torch
    import torch.distributed as dist

    try:
        message = dist.irecv(torch.zeros(1), src=neighbour, tag=GOODBYE)
        assert message is not None
        message.wait(FOREVER)
    except RuntimeError:
        try:
            first = _claim(LOST)
        except RuntimeError:
            _end_without_store(resume)
        if first.rank == process_rank():
            if first.status != LOST:  # this process has failed, and is about to say so
                return
            _say(f"rank {neighbour} of {process_count()} {DIED}{_go_on(resume)}")
        _end_after(first)


def _end_after(first: FailedRank) -> NoReturn:
    """End because of a failure, which has been named."""
    if _hosts():
        time.sleep(2 * LOOK_S)  # until the others have seen it too
    end(first.status)


def _end_without_store(resume: str) -> NoReturn:
    """End because whoever holds the store is gone: nobody can be asked who speaks, so the last rank does."""
    _ending.acquire()
    if process_rank() == process_count() - 1:
        lost = "the process that started this run" if _by_torchrun() else f"rank 0 of {process_count()}"
        _say(f"{lost} {DIED}{_go_on(resume)}")
    end(LOST)


def _say(line: str) -> None:
    sys.stderr.write(f"keel: error: {line}\n")


def _arrive(store: Store) -> None:
    """Until all ranks are here; those that are not are named."""
    rank, size = process_rank(), process_count()
    store.set(f"here/{rank}", "")
    if store.add("arrived", 1) == size:
        store.set("complete", "")
    try:
        store.wait(["complete"], ARRIVAL)
    except RuntimeError:
        missing = [str(other) for other in range(size) if not store.check([f"here/{other}"])]
        raise KeelError(
            f"{len(missing)} of {size} processes have not arrived after {ARRIVAL.seconds // 60} minutes "
            f"(rank {', '.join(missing[:8])}): see what they say, and start all {size} at the same time"
        ) from None


def _claim(status: int) -> FailedRank:
    """The first failure: this one, if there was none before."""
    return _read(_keys().compare_set(FAILURE, "", f"{process_rank()} {status}"))


def _first_failure() -> FailedRank | None:
    keys = _keys()
    return _read(keys.get(FAILURE)) if keys.check([FAILURE]) else None


def _read(text: bytes) -> FailedRank:
    rank, status = text.decode().split()
    return FailedRank(int(rank), int(status))


def _keys() -> Store:
    from torch.distributed import PrefixStore

    return PrefixStore(f"keel/{_restart()}", _client())


def _restart() -> str:
    """Torchrun's store outlives a restart of the processes: each has keys of its own."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _by_torchrun() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _hosts() -> bool:
    return process_rank() == 0 and not _by_torchrun()


@cache
def _client() -> Store:
    """This process's own line to the store, which rank 0 opens where torchrun has none."""
    return _connect(hosts=_hosts())


def _connect(*, hosts: bool) -> Store:
    from torch.distributed import TCPStore

    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not (host and port.isdecimal()):
        raise KeelError(
            f"WORLD_SIZE is {process_count()}, but MASTER_ADDR and MASTER_PORT do not say where rank 0 is: set both, "
            "or start the processes with keel train --nproc or torchrun"
        )
    try:
        return TCPStore(host, int(port), is_master=hosts, wait_for_workers=False, timeout=ARRIVAL)
    except RuntimeError as error:
        if hosts and "EADDRINUSE" in str(error):
            raise KeelError(f"port {port} is in use: set MASTER_PORT to a free one, the same on all ranks") from None
        where = f"{host}:{port} (MASTER_ADDR, MASTER_PORT)"
        if hosts:
            raise KeelError(f"rank 0 cannot listen on {where}: {str(error).splitlines()[0]}") from None
        raise KeelError(
            f"rank {process_rank()} does not reach rank 0 at {where} after {ARRIVAL.seconds // 60} minutes: "
            "check that rank 0 runs and that the address can be reached from here"
        ) from None


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM that nobody handles becomes an exception: torchrun sends it to all ranks when one has failed, and whose
    failure that was is to be named before the others are gone."""
    alone = threading.current_thread() is not threading.main_thread()
    if alone or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
