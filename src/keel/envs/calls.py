"""Calls that survive what users' functions do: raise, exit, or never return. Each has a deadline, on one event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import queue
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from keel.base.errors import KeelError

Outcome = tuple[Any, BaseException | None]  # what a call returned, or what it raised
_deadline: ContextVar[asyncio.Timeout | None] = ContextVar("deadline", default=None)  # of the call that runs here


class CallFailed(Exception):
    """A user's function raised, returned nonsense or did not return; `at` is the method that did, of an episode."""

    at = "step"

    def __init__(self, kind: str, cause: str) -> None:
        super().__init__(cause)
        self.kind, self.cause = kind, cause


class TooManyHungCalls(KeelError):
    """So many calls hang that the run must stop, whatever was configured for failures."""


class _Alive(Protocol):
    def is_alive(self) -> bool: ...


class HungCalls:
    """Calls that were given up, as long as they run: Python can end neither a thread nor a coroutine that refuses."""

    def __init__(self) -> None:
        self._running: list[_Alive] = []
        self._lock = threading.Lock()

    def add(self, running: _Alive) -> None:
        with self._lock:
            self._running.append(running)

    @property
    def alive(self) -> int:
        with self._lock:
            self._running = [call for call in self._running if call.is_alive()]
            return len(self._running)


def _timeout_message(timeout_s: float | None) -> str:
    return f"did not return within {timeout_s:g} s (reward.timeout_s)"


def is_async(function: Any) -> bool:
    """Whether a call gives a coroutine; also for a partial of one and an object whose `__call__` is one."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def call_here(function: Callable[..., Any], *args: Any) -> Any:
    """The function's value, or CallFailed, without a thread or a deadline: for code of our own."""
    try:
        return function(*args)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return _value_or_raise(None, error)


async def call(function: Callable[..., Any], *args: Any, timeout_s: float | None, hung: HungCalls) -> Any:
    """The function's value, or CallFailed; a coroutine function is awaited here, another is called in a thread.

    A call that is not over in time is given up: a coroutine is cancelled, a thread is left behind, and what still runs
    then is counted in `hung`. Time spent inside `suspended_deadline` does not count.
    """
    limit = asyncio.timeout(timeout_s)
    token = _deadline.set(limit)
    work = asyncio.ensure_future(_outcome(function, args, hung))
    _deadline.reset(token)
    try:
        async with limit:
            await asyncio.wait({work})
    except TimeoutError:
        work.cancel()
        # Half as long again is for those that clean up after themselves when their time is over.
        await asyncio.wait({work}, timeout=0.5 + (timeout_s or 0.0) / 2)
        if not work.done():
            hung.add(_UncancelledTask(work))
        raise CallFailed("timeout", _timeout_message(timeout_s)) from None
    except asyncio.CancelledError:
        work.cancel()
        raise
    return _value_or_raise(*work.result())


@asynccontextmanager
async def suspended_deadline() -> AsyncIterator[None]:
    """Stop the clock of the call that runs here: what is done inside has limits of its own."""
    limit = _deadline.get()
    until = None if limit is None else limit.when()
    if limit is None or until is None:
        yield
        return
    loop = asyncio.get_running_loop()
    remaining = until - loop.time()
    limit.reschedule(None)
    token = _deadline.set(None)
    try:
        yield
    finally:
        _deadline.reset(token)
        with suppress(RuntimeError):  # the call was given up meanwhile
            limit.reschedule(loop.time() + remaining)


async def _outcome(function: Callable[..., Any], args: tuple[Any, ...], hung: HungCalls) -> Outcome:
    try:
        value, error = (function(*args), None) if is_async(function) else await _in_thread(function, args, hung)
        return (await value if error is None and inspect.isawaitable(value) else value), error
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # a user's coroutine may raise anything, and an exit would end the loop
        return None, error


@dataclass(frozen=True)
class _UncancelledTask:
    """A coroutine that goes on although it was cancelled."""

    task: asyncio.Future[Any]

    def is_alive(self) -> bool:
        return not self.task.done()


class _Worker(threading.Thread):
    """A thread that makes calls, one after another, until it is given None; as a daemon, so that Python can end."""

    def __init__(self) -> None:
        super().__init__(name="keel-call", daemon=True)
        self.calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while (job := self.calls.get()) is not None:
            job()


_idle: list[_Worker] = []


async def _in_thread(function: Callable[..., Any], args: tuple[Any, ...], hung: HungCalls) -> Outcome:
    """What a plain function returns or raises, in a thread that is left behind where nobody waits any more."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Outcome] = loop.create_future()

    def settle(outcome: Outcome) -> None:
        if not answer.done():
            answer.set_result(outcome)

    def make() -> None:
        try:
            outcome: Outcome = function(*args), None
        except BaseException as error:  # a user's sys.exit() must not end the worker without a word
            outcome = None, error
        with suppress(RuntimeError):  # the loop was given up meanwhile
            loop.call_soon_threadsafe(settle, outcome)

    worker = _idle.pop() if _idle else _Worker()
    worker.calls.put(make)
    try:
        outcome = await answer
    except asyncio.CancelledError:
        worker.calls.put(None)
        hung.add(worker)
        raise
    _idle.append(worker)
    return outcome


def _value_or_raise(value: Any, error: BaseException | None) -> Any:
    """The value, or CallFailed with the first line of what was raised."""
    if error is None:
        return value
    if isinstance(error, TooManyHungCalls | CallFailed):
        raise error
    try:
        text = str(error)  # what was raised is a user's too
    except Exception:
        text = ""
    first = next(iter(text.strip().splitlines()), "")
    raise CallFailed("raised", f"raised {type(error).__name__}" + (f": {first}" if first else "")) from error


class _LoopThread(threading.Thread):
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        super().__init__(name="keel-loop", daemon=True)
        self.loop = asyncio.new_event_loop()
        self.start()

    def run(self) -> None:
        self.loop.run_forever()
        if unfinished := asyncio.all_tasks(self.loop):
            for task in unfinished:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*unfinished, return_exceptions=True))
        self.loop.close()

    def responds(self, within_s: float) -> bool:
        """Whether the loop still runs what it is given; one that a coroutine blocks does not."""
        beat = threading.Event()
        self.loop.call_soon_threadsafe(beat.set)
        return beat.wait(within_s)


@dataclass(frozen=True, eq=False)
class Pending:
    """Work that was handed to the loop."""

    future: concurrent.futures.Future[Any]
    thread: _LoopThread

    def result(self, timeout_s: float | None) -> Any:
        """What came of work that is over; CallFailed where the loop, blocked by some coroutine, was left behind."""
        try:
            return self.future.result()
        except concurrent.futures.CancelledError:
            raise CallFailed("timeout", _timeout_message(timeout_s)) from None


class Loop:
    """The event loop that all calls share, so that clients which users' coroutines keep open belong to one loop.

    A coroutine that blocks its thread stops everything beside it: the loop is then left behind with what it was doing,
    and new work gets another.
    """

    def __init__(self) -> None:
        self._thread: _LoopThread | None = None
        self._lock = threading.Lock()

    def submit(self, work: Coroutine[Any, Any, Any]) -> Pending:
        """Begin some work."""
        with self._lock:
            thread = self._thread = self._thread or _LoopThread()
            return Pending(asyncio.run_coroutine_threadsafe(work, thread.loop), thread)

    def wait(
        self, pending: Sequence[Pending], timeout_s: float | None, hung: HungCalls, *, first: bool = False
    ) -> None:
        """Wait until all is over, or the first; a loop that does not move for `timeout_s` is counted in `hung`."""
        if any(item.thread is threading.current_thread() for item in pending):
            raise RuntimeError("a coroutine cannot wait for the event loop that it runs on: make it a plain function")
        when = concurrent.futures.FIRST_COMPLETED if first else concurrent.futures.ALL_COMPLETED
        patience = None if timeout_s is None else 0.5 + 1.5 * timeout_s
        try:
            while True:
                done, unfinished = concurrent.futures.wait([item.future for item in pending], patience, when)
                if not unfinished or (first and done):
                    return
                thread = next(item.thread for item in pending if item.future in unfinished)
                if patience is not None and not thread.responds(patience):
                    self._abandon(thread, hung)
                    for item in pending:
                        item.future.cancel()
                    return
        except BaseException:  # Ctrl-C
            for item in pending:
                item.future.cancel()
            raise

    def run(self, work: Sequence[Coroutine[Any, Any, Any]], timeout_s: float | None, hung: HungCalls) -> list[Outcome]:
        """All work together; what each returned or raised, in order."""
        pending = [self.submit(item) for item in work]
        self.wait(pending, timeout_s, hung)
        outcomes: list[Outcome] = []
        for item in pending:
            try:
                outcomes.append((item.result(timeout_s), None))
            except Exception as error:
                outcomes.append((None, error))
        return outcomes

    def _abandon(self, thread: _LoopThread, hung: HungCalls) -> None:
        with self._lock:
            if self._thread is thread:
                self._thread = None
        hung.add(thread)
        thread.loop.call_soon_threadsafe(thread.loop.stop)


LOOP = Loop()


def call_now(function: Callable[..., Any], *args: Any, timeout_s: float | None, hung: HungCalls) -> Any:
    """`call` from plain code: waits for it."""
    ((value, error),) = LOOP.run([call(function, *args, timeout_s=timeout_s, hung=hung)], timeout_s, hung)
    if error is not None:
        raise error
    return value
