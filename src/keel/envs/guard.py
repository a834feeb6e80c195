"""Calls that survive what users' functions do: raise, exit, or never return."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from keel.base.errors import KeelError
from keel.envs.concurrent import Threads

_POLL_S = 0.02  # between looks at a call that is past its time, but aside


class CallFailed(Exception):
    """A user's function raised, returned nonsense or did not return; never leaves this room."""

    def __init__(self, kind: str, cause: str) -> None:
        super().__init__(cause)
        self.kind, self.cause = kind, cause


class TooManyHang(KeelError):
    """So many calls hang that the run must stop, whatever was configured for failures; passes through every guard."""


class Abandoned(BaseException):
    """Raised in a thread that nobody waits for any more, where it would make another guarded call."""


class _Call:
    """One call and its answer: only who made it can read that, however late it comes."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], limit_s: float) -> None:
        self.function, self.args = function, args
        self.deadline, self.aside, self.abandoned = time.monotonic() + limit_s, False, False
        self.answer: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def wait(self) -> tuple[Any, BaseException | None]:
        """The answer; queue.Empty once the time is up."""
        while True:
            try:
                return self.answer.get(timeout=max(self.deadline - time.monotonic(), _POLL_S))
            except queue.Empty:
                if not self.aside and time.monotonic() >= self.deadline:
                    raise


class _Worker:
    """A thread that makes calls, one after another, until it is given None."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="keel-guard", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while (call := self.calls.get()) is not None:
            _here.call = call
            call.answer.put(attempt(call.function, call.args))


_here = threading.local()  # the call that this thread makes for a guard, if any


@contextmanager
def aside() -> Iterator[None]:
    """What is done inside has limits of its own: its time does not count for the guarded call that does it."""
    call: _Call | None = getattr(_here, "call", None)
    if call is None or call.aside:
        yield
        return
    began, call.aside = time.monotonic(), True
    try:
        yield
    finally:
        call.deadline += time.monotonic() - began
        call.aside = False


class Guard:
    """Calls functions in worker threads with a time limit; several threads may call at the same time.

    Python cannot end a thread. One that hangs is left behind (as a daemon, so that the process can end), counted in
    `hung` until it returns after all, and replaced; each of them may go on using the CPU, so who calls should stop the
    run where they become too many (TooManyHang). A call made from a thread that was itself left behind is not made:
    nobody would read its answer.
    """

    def __init__(self, timeout_s: float | None = 30.0, option: str = "reward.timeout_s") -> None:
        if timeout_s is not None and not timeout_s > 0:
            raise KeelError(f"{option} is {timeout_s}: it must be above 0, or null for no limit")
        self.timeout_s, self.option = timeout_s, option
        self._idle: list[_Worker] = []
        self._left = Threads()

    @property
    def hung(self) -> int:
        """Calls that were given up and still have not returned."""
        return self._left.alive

    def call(self, function: Callable[..., Any], *args: Any, within_s: float | None = None) -> Any:
        """The function's value, or CallFailed; `within_s` is a limit of this call beside that of all."""
        outer: _Call | None = getattr(_here, "call", None)
        if outer is not None and outer.abandoned:
            raise Abandoned
        limit = min((limit for limit in (self.timeout_s, within_s) if limit is not None), default=None)
        if limit is None:
            return call_here(function, *args)
        try:
            worker = self._idle.pop()
        except IndexError:
            worker = _Worker()
        call = _Call(function, args, limit)
        worker.calls.put(call)
        try:
            value, error = call.wait()
        except BaseException as stopped:  # time is up, or Ctrl-C
            call.abandoned = True
            worker.calls.put(None)
            if not isinstance(stopped, queue.Empty):
                raise
            self._left.add(worker.thread)
            raise CallFailed("timeout", late(limit, self.option)) from None
        self._idle.append(worker)
        return settled(value, error)

    def close(self) -> None:
        """Let the workers end that wait for a call."""
        while self._idle:
            self._idle.pop().calls.put(None)


def late(timeout_s: float | None, option: str = "reward.timeout_s") -> str:
    """What is said of a call that took too long."""
    return f"did not return within {timeout_s:g} s ({option})"


def call_here(function: Callable[..., Any], *args: Any) -> Any:
    """The function's value, or CallFailed, without a thread or a time limit."""
    return settled(*attempt(function, args))


def attempt(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, BaseException | None]:
    """What a function returned, or what it raised."""
    try:
        return function(*args), None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's sys.exit() must not end the worker without a word
        return None, error


def settled(value: Any, error: BaseException | None) -> Any:
    """The value, or CallFailed with the first line of what was raised."""
    if error is None:
        return value
    if isinstance(error, TooManyHang):
        raise error
    said, _ = attempt(str, (error,))  # what was raised is a user's too
    first = next(iter((said or "").strip().splitlines()), "")
    raise CallFailed("raised", f"raised {type(error).__name__}" + (f": {first}" if first else "")) from error
