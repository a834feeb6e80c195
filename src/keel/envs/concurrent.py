"""Many calls at a time: coroutines on one loop of their own, plain functions on a few threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import threading
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

Outcome = tuple[Any, BaseException | None]  # what a call returned, or what it raised
Call = tuple[Callable[..., Any], tuple[Any, ...]]


class Late(Exception):
    """A call did not end in time."""


class Threads:
    """Threads that were left behind, as long as they live."""

    def __init__(self) -> None:
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()

    def add(self, thread: threading.Thread) -> None:
        with self._lock:
            self._threads.add(thread)

    @property
    def alive(self) -> int:
        with self._lock:
            self._threads = {thread for thread in self._threads if thread.is_alive()}
            return len(self._threads)


class _Serving:
    """An event loop in a thread of its own, and how many wait for what runs on it."""

    def __init__(self) -> None:
        self.loop, self.waiting = asyncio.new_event_loop(), 0
        self.thread = threading.Thread(target=_serve, args=(self.loop,), name="keel-loop", daemon=True)
        self.thread.start()


class Loop:
    """An event loop in a thread, kept over calls: clients that a user's coroutine keeps open belong to one loop.

    Several threads may run calls at the same time.
    A coroutine that blocks its thread or will not be cancelled cannot be ended: the loop is then left behind and
    counted in `hung` as long as it runs. New calls get another loop; those under way on the old one go on there.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self._serving: _Serving | None = None
        self._lock = threading.Lock()
        self._left = Threads()

    @property
    def hung(self) -> int:
        """Loops that were given up and still run."""
        return self._left.alive

    def run(self, calls: Sequence[Call], within_s: float | None = None) -> list[Outcome]:
        """All calls together, each with its own time limit (or `within_s`, if less); their outcomes in order."""
        limit = min((limit for limit in (self.timeout_s, within_s) if limit is not None), default=None)
        with self._lock:  # also while the calls are handed over: a loop that is waited for is not stopped
            serving = self._serving = self._serving or _Serving()
            whole = asyncio.run_coroutine_threadsafe(_all(calls, limit), serving.loop)
            serving.waiting += 1
        try:
            # Half as long again is for those that clean up after themselves when their time is over.
            return whole.result(None if limit is None else 1.5 * limit + 0.5)
        except BaseException as stopped:  # blocked, or Ctrl-C
            whole.cancel()
            self._leave(serving)
            if not isinstance(stopped, concurrent.futures.TimeoutError | concurrent.futures.CancelledError):
                raise
            self._left.add(serving.thread)
            return [(None, Late())] * len(calls)
        finally:
            with self._lock:
                serving.waiting -= 1
                self._stop_if_unused(serving)

    def close(self) -> None:
        """Let the thread end, when it comes to it."""
        with self._lock:
            serving, self._serving = self._serving, None
            if serving is not None:
                self._stop_if_unused(serving)

    def _leave(self, serving: _Serving) -> None:
        """Give no new calls to a loop."""
        with self._lock:
            if self._serving is serving:
                self._serving = None

    def _stop_if_unused(self, serving: _Serving) -> None:
        """Stop a loop that was left, with the last of those that wait for it."""
        if self._serving is not serving and not serving.waiting:
            serving.loop.call_soon_threadsafe(serving.loop.stop)


def run_threads(calls: Sequence[Call], at_once: int, attempt: Callable[..., Outcome]) -> list[Outcome]:
    """Plain functions, `at_once` at a time; `attempt` turns what one raises into its outcome."""
    if not calls:
        return []
    with concurrent.futures.ThreadPoolExecutor(min(at_once, len(calls)), "keel-judge") as pool:
        return list(pool.map(lambda call: attempt(*call), calls))


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped, then let go of what it still holds."""
    loop.run_forever()
    if left := asyncio.all_tasks(loop):
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    loop.close()


def is_async(function: Any) -> bool:
    """Whether a call gives a coroutine; also for a partial of one and an object whose `__call__` is one."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


async def _all(calls: Sequence[Call], timeout_s: float | None) -> list[Outcome]:
    return list(await asyncio.gather(*(_one(call, timeout_s) for call in calls)))


async def _one(call: Call, timeout_s: float | None) -> Outcome:
    function, arguments = call
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            made: Coroutine[Any, Any, Any] = function(*arguments)
            return await made, None
    except BaseException as error:  # a user's coroutine may raise anything
        return None, Late() if limit.expired() else error
