"""Calls that survive what users' functions do: raise, exit, or never return."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from keel.errors import KeelError


class CallFailed(Exception):
    """A user's function raised, returned nonsense or did not return; never leaves this room."""

    def __init__(self, kind: str, cause: str) -> None:
        super().__init__(cause)
        self.kind, self.cause = kind, cause


class Guard:
    """Calls functions in one worker thread with a time limit.

    Python cannot end a thread. One that hangs is left behind (as a daemon, so that the process can end), counted, and
    replaced; each of them may go on using the CPU, so after `max_hung` the run stops whatever was configured.
    """

    def __init__(self, timeout_s: float | None = 30.0, max_hung: int = 8, option: str = "reward.timeout_s") -> None:
        if timeout_s is not None and not timeout_s > 0:
            raise KeelError(f"{option} is {timeout_s}: it must be above 0, or null for no limit")
        self.timeout_s, self.max_hung, self.hung, self.option = timeout_s, max_hung, 0, option
        self._jobs: queue.SimpleQueue[Any] | None = None
        self._done: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """The function's value, or CallFailed."""
        if self.timeout_s is None:
            return call_here(function, *args)
        if self._jobs is None:
            self._jobs, self._done = queue.SimpleQueue(), queue.SimpleQueue()
            threading.Thread(target=_work, args=(self._jobs, self._done), name="keel-reward", daemon=True).start()
        self._jobs.put((function, args))
        try:
            value, error = self._done.get(timeout=self.timeout_s)
        except BaseException as stopped:  # time is up, or Ctrl-C: a later answer must not be taken for the next call's
            self.close()
            if not isinstance(stopped, queue.Empty):
                raise
            self.hung += 1
            raise CallFailed("timeout", late(self.timeout_s, self.option)) from None
        return settled(value, error)

    def close(self) -> None:
        """Let the worker end, when it returns; whatever it still answers goes to a queue that nobody reads."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None


def late(timeout_s: float | None, option: str = "reward.timeout_s") -> str:
    """What is said of a call that took too long."""
    return f"did not return within {timeout_s:g} s ({option})"


def call_here(function: Callable[..., Any], *args: Any) -> Any:
    """The function's value, or CallFailed, without a thread or a time limit."""
    return settled(*attempt(function, args))


def _work(jobs: queue.SimpleQueue[Any], done: queue.SimpleQueue[Any]) -> None:
    while (job := jobs.get()) is not None:
        done.put(attempt(*job))


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
    first = next(iter(str(error).strip().splitlines()), "")
    raise CallFailed("raised", f"raised {type(error).__name__}" + (f": {first}" if first else "")) from error
