"""Call user functions, which may raise, exit or never return. Each call has a deadline; all share an event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import os
import queue
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, FIRST_EXCEPTION
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from keel.base.errors import KeelError

Outcome = tuple[Any, BaseException | None]  # the value or the exception of a call
_deadline: ContextVar[asyncio.Timeout | None] = ContextVar("deadline", default=None)  # of the current call


class CallFailed(Exception):
    """A user function raised, returned an invalid value or timed out; `at` is the method of an episode that failed."""

    at = "step"

    def __init__(self, kind: str, cause: str) -> None:
        super().__init__(cause)
        self.kind, self.cause = kind, cause


class TooManyHungCalls(KeelError):
    """Too many calls hang: the run must stop, even if reward.on_error is not stop."""


class _Alive(Protocol):
    def is_alive(self) -> bool: ...


class HungCalls:
    """Calls that timed out and still run. Python cannot kill a thread or a coroutine that ignores cancellation."""

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


def _patience(timeout_s: float | None) -> float | None:
    """Seconds for which a loop may be unresponsive: 1.5 times the limit of a call plus 0.5 s."""
    return None if timeout_s is None else min(0.5 + 1.5 * timeout_s, threading.TIMEOUT_MAX)


def is_async(function: Any) -> bool:
    """Whether a call returns a coroutine; also for partials and objects with an async `__call__`."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def call_inline(function: Callable[..., Any], *args: Any) -> Any:
    """Call trusted code in this thread without a deadline; raises CallFailed."""
    try:
        return function(*args)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return _value_or_raise(None, error)


async def call(
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float | None,
    hung: HungCalls,
    dropped: Callable[[Any], None] = lambda value: None,
) -> Any:
    """Call a function with a deadline and return its value, or raise CallFailed.

    A coroutine function is awaited on this loop, any other function runs in a thread. After the deadline a coroutine is
    cancelled and a thread is abandoned; calls that still run are counted in `hung`. Time inside `suspended_deadline`
    does not count. A value that arrives too late is passed to `dropped`.
    """
    limit = asyncio.timeout(timeout_s)
    token = _deadline.set(limit)
    work = asyncio.ensure_future(_outcome(function, args, hung, dropped))
    _deadline.reset(token)
    try:
        async with limit:
            await asyncio.wait({work})
    except (TimeoutError, asyncio.CancelledError) as given_up:
        work.cancel()
        work.add_done_callback(lambda work: None if work.cancelled() else _drop(work.result(), dropped))
        # extra time for coroutines that clean up after cancellation
        await asyncio.wait({work}, timeout=0.5 + (timeout_s or 0.0) / 2)
        if not work.done():
            hung.add(_UncancelledTask(work))
        if isinstance(given_up, asyncio.CancelledError):
            raise
        raise CallFailed("timeout", _timeout_message(timeout_s)) from None
    return _value_or_raise(*work.result())


@asynccontextmanager
async def suspended_deadline() -> AsyncIterator[None]:
    """Suspend the deadline of the current call around code that has its own limits."""
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
        with suppress(RuntimeError):  # the call has timed out
            limit.reschedule(loop.time() + remaining)


async def _outcome(
    function: Callable[..., Any], args: tuple[Any, ...], hung: HungCalls, dropped: Callable[[Any], None]
) -> Outcome:
    try:
        plain = not is_async(function)
        value, error = await _in_thread(function, args, hung, dropped) if plain else (function(*args), None)
        return (await value if error is None and inspect.isawaitable(value) else value), error
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # user code may raise anything; SystemExit would stop the loop
        return None, error


@dataclass(frozen=True)
class _UncancelledTask:
    """A coroutine that ignored its cancellation."""

    task: asyncio.Future[Any]

    def is_alive(self) -> bool:
        return not self.task.done()


class _Worker(threading.Thread):
    """A daemon thread that runs calls one after another until it gets None."""

    def __init__(self) -> None:
        super().__init__(name="keel-call", daemon=True)
        self.calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.start()

    def run(self) -> None:
        while (job := self.calls.get()) is not None:
            job()


_idle: list[_Worker] = []


def _drop(outcome: Outcome, dropped: Callable[[Any], None]) -> None:
    value, error = outcome
    if error is None:
        dropped(value)


async def _in_thread(
    function: Callable[..., Any], args: tuple[Any, ...], hung: HungCalls, dropped: Callable[[Any], None]
) -> Outcome:
    """Run a plain function in a thread. If the caller is cancelled, the thread is abandoned."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[Outcome] = loop.create_future()

    def settle(outcome: Outcome) -> None:
        if answer.done():
            _drop(outcome, dropped)
        else:
            answer.set_result(outcome)

    def make() -> None:
        try:
            outcome: Outcome = function(*args), None
        except BaseException as error:  # sys.exit() in user code must not kill the worker silently
            outcome = None, error
        try:
            loop.call_soon_threadsafe(settle, outcome)
        except RuntimeError:  # the loop was abandoned
            _drop(outcome, dropped)

    worker = _idle.pop() if _idle else _Worker()
    worker.calls.put(make)
    try:
        outcome = await answer
    except asyncio.CancelledError:
        worker.calls.put(None)
        hung.add(worker)
        if not answer.cancelled():  # the value arrived at the time of the cancellation
            _drop(answer.result(), dropped)
        raise
    _idle.append(worker)
    return outcome


def _value_or_raise(value: Any, error: BaseException | None) -> Any:
    """Return the value, or raise CallFailed with the first line of the exception."""
    if error is None:
        return value
    if isinstance(error, TooManyHungCalls | CallFailed):
        raise error
    try:
        text = str(error)  # __str__ is user code too
    except Exception:
        text = ""
    first = next(iter(text.strip().splitlines()), "")
    raise CallFailed("raised", f"raised {type(error).__name__}" + (f": {first}" if first else "")) from error


class _LoopThread(threading.Thread):
    """An event loop in its own thread."""

    def __init__(self) -> None:
        super().__init__(name="keel-loop", daemon=True)
        self.loop = asyncio.new_event_loop()
        self.blocked_by: str | None = None
        self.start()

    def run(self) -> None:
        self.loop.run_forever()
        if unfinished := asyncio.all_tasks(self.loop):  # already cancelled
            self.loop.run_until_complete(asyncio.gather(*unfinished, return_exceptions=True))
        self.loop.close()

    def running(self) -> str | None:
        """The name of the coroutine that is running now."""
        frame = sys._current_frames().get(self.ident or 0)
        while frame is not None and not frame.f_code.co_flags & inspect.CO_COROUTINE:
            frame = frame.f_back
        return None if frame is None else frame.f_code.co_qualname

    def responds(self, within_s: float) -> bool:
        """Whether the loop responds within this time; otherwise a coroutine blocks it."""
        beat = threading.Event()
        self.loop.call_soon_threadsafe(beat.set)
        return beat.wait(within_s)


@dataclass(frozen=True, eq=False)
class Pending:
    """A coroutine submitted to the loop."""

    future: concurrent.futures.Future[Any]
    thread: _LoopThread

    def result(self, timeout_s: float | None) -> Any:
        """The result of finished work; raises CallFailed if its loop was blocked and abandoned."""
        try:
            return self.future.result()
        except concurrent.futures.CancelledError:
            culprit = self.thread.blocked_by
            blocked = f": {culprit} blocks the event loop; use await in it" if culprit else ""
            raise CallFailed("timeout", _timeout_message(timeout_s) + blocked) from None


def raised(future: concurrent.futures.Future[Any]) -> bool:
    """Whether the work has failed."""
    return future.done() and not future.cancelled() and future.exception() is not None


class Loop:
    """The event loop that all calls share, so that coroutines can keep a client open across calls.

    If a coroutine blocks its thread, the loop is abandoned together with its work, and new work gets a new loop.
    """

    def __init__(self) -> None:
        self._thread: _LoopThread | None = None
        self._lock = threading.Lock()

    def submit(self, work: Coroutine[Any, Any, Any]) -> Pending:
        with self._lock:
            thread = self._thread = self._thread or _LoopThread()
            return Pending(asyncio.run_coroutine_threadsafe(work, thread.loop), thread)

    def wait(
        self, pending: Sequence[Pending], timeout_s: float | None, hung: HungCalls, until: str = ALL_COMPLETED
    ) -> None:
        """Like `concurrent.futures.wait`. A blocked loop (see `_patience`) is abandoned and counted in `hung`."""
        if any(item.thread is threading.current_thread() for item in pending):
            raise RuntimeError("a coroutine cannot wait for its own event loop: make it a plain function")
        patience = _patience(timeout_s)
        while True:
            done, unfinished = concurrent.futures.wait([item.future for item in pending], patience, until)
            if (
                not unfinished
                or (until == FIRST_COMPLETED and done)
                or (until == FIRST_EXCEPTION and any(map(raised, done)))
            ):
                return
            thread = next(item.thread for item in pending if item.future in unfinished)
            if patience is not None and not thread.responds(patience):
                self.abandon(thread, hung)
                for item in pending:
                    item.future.cancel()
                return

    def run(self, work: Sequence[Coroutine[Any, Any, Any]], timeout_s: float | None, hung: HungCalls) -> list[Outcome]:
        """Run all coroutines concurrently and return their outcomes in order."""
        pending = [self.submit(item) for item in work]
        try:
            self.wait(pending, timeout_s, hung)
        except BaseException:  # Ctrl-C
            for item in pending:
                item.future.cancel()
            raise
        outcomes: list[Outcome] = []
        for item in pending:
            try:
                outcomes.append((item.result(timeout_s), None))
            except Exception as error:
                outcomes.append((None, error))
        return outcomes

    def abandon(self, thread: _LoopThread, hung: HungCalls) -> None:
        """Stop using a loop that a coroutine blocks."""
        thread.blocked_by = thread.running()
        with self._lock:
            if self._thread is thread:
                self._thread = None
        hung.add(thread)
        thread.loop.call_soon_threadsafe(thread.loop.stop)


LOOP = Loop()
TOOL_LOOP = Loop()  # separate, so that a tool that blocks its loop does not block episodes


def _forget_threads() -> None:
    """After a fork the parent's threads do not exist in the child: start new ones."""
    LOOP.__init__()  # type: ignore[misc]
    TOOL_LOOP.__init__()  # type: ignore[misc]
    _idle.clear()


os.register_at_fork(after_in_child=_forget_threads)


async def call_tool(function: Callable[..., Any], *, timeout_s: float | None, hung: HungCalls) -> Any:
    """Like `call`, but coroutine functions run on the tools' loop."""
    if not is_async(function):
        return await call(function, timeout_s=timeout_s, hung=hung)
    pending = TOOL_LOOP.submit(call(function, timeout_s=timeout_s, hung=hung))
    answer = asyncio.wrap_future(pending.future)
    patience = _patience(timeout_s)
    try:
        while not (await asyncio.wait({answer}, timeout=patience))[0]:
            if patience is not None and not await asyncio.to_thread(pending.thread.responds, patience):
                TOOL_LOOP.abandon(pending.thread, hung)
                break
    finally:
        pending.future.cancel()
    return answer.result() if answer.done() and not answer.cancelled() else pending.result(timeout_s)


def call_sync(function: Callable[..., Any], *args: Any, timeout_s: float | None, hung: HungCalls) -> Any:
    """Synchronous `call`."""
    ((value, error),) = LOOP.run([call(function, *args, timeout_s=timeout_s, hung=hung)], timeout_s, hung)
    if error is not None:
        raise error
    return value
