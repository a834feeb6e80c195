"""Many calls at a time: coroutines on one loop of their own, plain functions on a few threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

Outcome = tuple[Any, BaseException | None]  # what a call returned, or what it raised
Call = tuple[Callable[..., Any], tuple[Any, ...]]


class Late(Exception):
    """A call did not end in time."""


class Loop:
    """An event loop in a thread, kept over calls: clients that a user's coroutine keeps open belong to one loop.

    A coroutine that blocks its thread cannot be ended: the loop is then left behind and counted in `hung`.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s, self.hung = timeout_s, 0
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, calls: Sequence[Call]) -> list[Outcome]:
        """All calls together, each with its own time limit; their outcomes in order."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_serve, args=(self._loop,), name="keel-reward-loop", daemon=True).start()
        whole = asyncio.run_coroutine_threadsafe(_all(calls, self.timeout_s), self._loop)
        try:
            # Half as long again is for those that clean up after themselves when their time is over.
            return whole.result(None if self.timeout_s is None else 1.5 * self.timeout_s + 0.5)
        except BaseException as stopped:  # blocked, or Ctrl-C
            whole.cancel()
            self.close()
            if not isinstance(stopped, concurrent.futures.TimeoutError):
                raise
            self.hung += 1
            return [(None, Late())] * len(calls)

    def close(self) -> None:
        """Let the thread end, when it comes to it."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None


def run_threads(calls: Sequence[Call], at_once: int, attempt: Callable[..., Outcome]) -> list[Outcome]:
    """Plain functions, `at_once` at a time; `attempt` turns what one raises into its outcome."""
    if not calls:
        return []
    with concurrent.futures.ThreadPoolExecutor(min(at_once, len(calls)), "keel-judge") as pool:
        return list(pool.map(lambda call: attempt(*call), calls))


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped, then let go of what it still holds."""
    loop.run_forever()
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    loop.close()


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
