"""Episodes, each the stateful environment of one completion, and their concurrent execution."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION
from dataclasses import dataclass, field
from typing import Any

from keel.base.types import Message, Problem, Reward
from keel.envs.calls import LOOP, CallFailed, HungCalls, Pending, call, call_sync, is_async, raised

Reply = str | Sequence[Message]
Key = tuple[int, int]  # index of the problem in a rollout, and of its completion
ASYNC_AT_ONCE = 16  # default concurrency of coroutine steps


class Episode:
    """The environment of one completion, such as a game or a sandbox.

    `step` gets each model turn, in order; then `reward`, `counts` and `turn_notes` are called, and `close` last, also
    after a failure. `step` and `close` may be coroutine functions. `at_once` is the maximum number of concurrent steps
    of different episodes (None: 1, or 16 if `step` is a coroutine function).
    """

    at_once: int | None = None

    def step(self, text: str) -> Any:
        """Reply to a model turn with a text or messages (role such as tool); None ends the episode."""
        raise NotImplementedError

    def reward(self) -> Any:
        """The reward of the episode so far: a number, a dict of parts, or a Reward."""
        raise NotImplementedError

    def counts(self) -> Mapping[str, float]:
        """Logged counts of the episode, such as `tool/calls`."""
        return {}

    def turn_notes(self) -> Sequence[str]:
        """One text per turn for `keel show` and the report, such as its calls, its reward or the state after it."""
        return ()

    def close(self) -> Any:
        """Release the resources of the episode."""


@dataclass(frozen=True)
class PlayedEpisode(Episode):
    """A finished episode that called the model through an endpoint.

    `branches` are its contexts as (tokens, mask of sampled tokens). If its program rewrote the history, there are
    several; the last one is the final context. `text` is the text after the prompt of the final context, and `turns`
    are its model turns. `stop` is `turns` if the turn limit ended the episode. `failure` is the reason for a missing
    reward.
    """

    branches: Sequence[tuple[Sequence[int], Sequence[bool]]] = ()
    text: str = ""
    turns: Sequence[str] = ()
    stop: str | None = None
    earned: Reward = field(default_factory=lambda: Reward(0.0))
    figures: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None

    def reward(self) -> Reward:
        return self.earned

    def counts(self) -> Mapping[str, float]:
        return self.figures


class SingleTurn(Episode):
    """An episode without replies."""

    at_once = ASYNC_AT_ONCE

    def __init__(self, judge: Callable[[Sequence[str]], Reward]) -> None:
        self.judge, self.turns = judge, list[str]()

    async def step(self, text: str) -> None:
        self.turns.append(text)

    def reward(self) -> Reward:
        return self.judge(self.turns)


class Transcript(tuple[str, ...]):
    """The model turns, with their `episode` (None for single-turn tasks)."""

    episode: Episode | None = None

    @classmethod
    def of(cls, turns: Iterable[str], episode: Episode | None) -> Transcript:
        transcript = cls(turns)
        transcript.episode = episode
        return transcript


class EpisodeRunner:
    """Start, step and close the episodes of a rollout concurrently, each call with the limit `timeout_s`.

    Failures are returned as CallFailed with the failed method in `at`. If `is_fatal` returns True after a failure, the
    runner does not wait for other episodes.
    """

    def __init__(
        self,
        start: Callable[[Problem], Episode],
        timeout_s: float | None,
        hung: HungCalls,
        is_fatal: Callable[[], bool] = lambda: False,
    ) -> None:
        self.start, self.timeout_s, self.hung, self.is_fatal = start, timeout_s, hung, is_fatal
        self.episodes: dict[Key, Episode] = {}
        self._pending: dict[Key, Pending] = {}
        self._answering: dict[Key, asyncio.Task[Any] | None] = {}  # latest task per episode
        self._late: list[Pending] = []  # pending calls that close episodes started too late
        self._closing = False
        self._gates: dict[tuple[asyncio.AbstractEventLoop, int], asyncio.Semaphore] = {}

    def submit(self, turns: Iterable[tuple[Key, Problem, str]]) -> None:
        """Submit model turns; the first turn of a key starts its episode."""
        for key, problem, text in turns:
            self._pending[key] = LOOP.submit(self._answer(key, problem, text))

    def ready(self, count: int | None = None) -> dict[Key, Reply | CallFailed | None]:
        """Wait for the replies to the `count` oldest turns (None: all) and return them in order."""
        oldest = list(self._pending)[:count]
        self._wait_for([self._pending[key] for key in oldest])
        return {key: self._result(self._pending.pop(key)) for key in oldest if self._pending[key].future.done()}

    @property
    def waiting(self) -> bool:
        """Whether some turns have no reply yet."""
        return bool(self._pending)

    def close(self) -> list[tuple[Key, CallFailed]]:
        """Cancel running steps and close all episodes. Returns the failures of `close`."""
        self._closing = True
        for key, pending in self._pending.items():
            # wait for a running start, so that the episode can be closed
            if key in self.episodes or self.timeout_s is None:
                pending.future.cancel()
        LOOP.wait(list(self._pending.values()), self.timeout_s, self.hung)
        LOOP.wait(self._late, self.timeout_s, self.hung)
        self._pending.clear()
        closable = {key: episode for key, episode in self.episodes.items() if _has_close(episode)}
        self.episodes.clear()
        closing = [self._close(episode, self._answering[key]) for key, episode in closable.items()]
        outcomes = LOOP.run(closing, self.timeout_s, self.hung)
        return [(key, e) for key, (_, e) in zip(closable, outcomes, strict=True) if isinstance(e, CallFailed)]

    def _wait_for(self, unfinished: list[Pending]) -> None:
        while unfinished:
            LOOP.wait(unfinished, self.timeout_s, self.hung, FIRST_EXCEPTION)
            failures = [item.future.exception() for item in unfinished if raised(item.future)]
            if any(not isinstance(failure, CallFailed) or self.is_fatal() for failure in failures):
                return
            unfinished = [item for item in unfinished if not item.future.done()]

    def _result(self, pending: Pending) -> Reply | CallFailed | None:
        try:
            reply: Reply | None = pending.result(self.timeout_s)
        except CallFailed as failure:
            return failure
        return reply

    async def _answer(self, key: Key, problem: Problem, text: str) -> Reply | None:
        self._answering[key] = asyncio.current_task()
        if key not in self.episodes:
            at_once = ASYNC_AT_ONCE if is_async(self.start) else 1
            started = await self._call("start", at_once, self.start, problem, dropped=self._drop)
            if not isinstance(started, Episode):
                raise _failure("start", f"returned a {type(started).__name__}, not a keel.envs.Episode")
            if self._closing:
                self._drop(started)
                raise asyncio.CancelledError
            self.episodes[key] = started
        episode = self.episodes[key]
        return _checked(await self._call("step", _at_once(episode, episode.step), episode.step, text))

    async def _close(self, episode: Episode, answering: asyncio.Task[Any] | None = None) -> None:
        if answering is not None and answering.get_loop() is asyncio.get_running_loop():
            await asyncio.wait({answering})  # a cancelled step may still be cleaning up
        await self._call("close", _at_once(episode, episode.close), episode.close)

    def _drop(self, started: Any) -> None:
        """Close an episode that started too late."""
        if isinstance(started, Episode) and _has_close(started):
            self._late.append(LOOP.submit(self._close(started)))

    async def _call(
        self,
        at: str,
        at_once: int,
        function: Callable[..., Any],
        *args: Any,
        dropped: Callable[[Any], None] = lambda value: None,
    ) -> Any:
        """Make one call. At most `at_once` calls with this limit run concurrently, in order of submission."""
        loop = asyncio.get_running_loop()
        async with self._gates.setdefault((loop, at_once), asyncio.Semaphore(at_once)):
            if self._closing and at != "close":
                raise asyncio.CancelledError
            try:
                return await call(function, *args, timeout_s=self.timeout_s, hung=self.hung, dropped=dropped)
            except CallFailed as failure:
                failure.at = at
                raise


def start_sync(start: Callable[[Problem], Episode], problem: Problem) -> Episode:
    """Start an episode synchronously, without a time limit."""
    episode: Episode = run_sync(start, problem)
    return episode


def step_sync(episode: Episode, text: str) -> Reply | None:
    """Step an episode synchronously, without a time limit."""
    return _checked(run_sync(episode.step, text))


def close_sync(episode: Episode) -> None:
    """Close an episode synchronously."""
    run_sync(episode.close)


def run_sync(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function or a coroutine function, without a time limit."""
    if not is_async(function):
        return function(*args)
    try:
        return call_sync(function, *args, timeout_s=None, hung=HungCalls())
    except CallFailed as failure:
        raise failure.__cause__ or failure from None  # the original exception


def _at_once(episode: Episode, function: Callable[..., Any]) -> int:
    return episode.at_once or (ASYNC_AT_ONCE if is_async(function) else 1)


def _has_close(episode: Episode) -> bool:
    return getattr(episode.close, "__func__", None) is not Episode.close


def _checked(reply: Any) -> Reply | None:
    """Validate a reply: text, None, or messages with role and content."""
    if reply is None or isinstance(reply, str):
        return reply
    if not isinstance(reply, Sequence):
        raise _failure("step", f"returned a {type(reply).__name__}, not a string or None")
    fine = all(
        isinstance(m, Mapping) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in reply
    )
    if not fine or not reply:
        raise _failure("step", "returned messages that do not each have a role and a content")
    return [dict(message) for message in reply]


def _failure(at: str, cause: str) -> CallFailed:
    failure = CallFailed("invalid", cause)
    failure.at = at
    return failure
