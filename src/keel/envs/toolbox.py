"""Episodes with tools: which calls a turn makes, what the model is told about each, and how that is counted."""

from __future__ import annotations

import hashlib
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from keel.base.errors import unknown
from keel.base.types import Message, Problem
from keel.envs.concurrent import Late, Loop
from keel.envs.guard import CallFailed, Guard, TooManyHang, aside, late, settled
from keel.envs.tool_calls import FORMATS, ToolCall, parse_calls
from keel.envs.tools import Tool

ERRORS = ("malformed", "unknown_tool", "bad_arguments", "failed", "timeout", "too_many")
KINDS = (*ERRORS, "too_long")
MOST_CALLS = 16  # in one turn
TURN_S = 20.0  # for all calls of a turn together, or as long as the longest limit of one tool
MOST_HUNG = 8  # of one tool at a time, for each call that it may run at once
_KEPT = 4096  # turns whose results are kept beside those of a rollout under way


_Said = tuple[str, tuple[str, ...]]  # a problem's key and the turns on it


@dataclass(frozen=True)
class Result:
    """What came of one call: the text for the model, the function's own value, and the kind of what went wrong."""

    call: ToolCall
    content: str
    value: Any = None
    kind: str | None = None

    @property
    def is_error(self) -> bool:
        return self.kind in ERRORS


@dataclass(frozen=True)
class Played:
    """An episode so far: the results of each turn's calls, and whether it is over."""

    turns: tuple[tuple[Result, ...], ...] = ()
    over: bool = False

    @property
    def results(self) -> tuple[Result, ...]:
        return tuple(result for turn in self.turns for result in turn)


class _Rollouts:
    """Which rollouts are under way, by number; a plain count, since their episodes are played in many threads."""

    def __init__(self) -> None:
        self.last, self.open, self.lock = 0, set[int](), threading.Lock()

    def is_needed(self, number: int) -> bool:
        """Whether a rollout is under way that may have seen what was played while `number` was the last."""
        with self.lock:
            return bool(self.open) and number >= min(self.open)


_rollouts = _Rollouts()


@contextmanager
def keeping() -> Iterator[None]:
    """A rollout and its judgement: what is played inside is kept to the end, so that an episode is judged by what the
    model was told, and no call runs twice.
    """
    with _rollouts.lock:
        number = _rollouts.last = _rollouts.last + 1
        _rollouts.open.add(number)
    try:
        yield
    finally:
        with _rollouts.lock:
            _rollouts.open.discard(number)


@dataclass(frozen=True)
class Toolbox:
    """Plays episodes: `tools(problem)` are those of a problem, `is_final(text)` says that a turn needs no answer.

    A turn without a call ends the episode, as does a tool that `ends`. What was played is kept (see `keeping`), so that
    each call runs once although it is asked about again after every later turn and by the reward; equal turns on one
    problem share their results. The time that tools take is limited by each tool's `timeout_s` and by `turn_s` for all
    calls of a turn (None: no limit), never by `reward.timeout_s`: what takes longer is told to the model, and the run
    goes on. Episodes may be played in several threads; a tool is then called by as many of them at a time as its
    `at_once` says.
    """

    tools: Callable[[Problem], Sequence[Tool]]
    format: str = "json"
    is_final: Callable[[str], bool] = lambda text: False
    turn_s: float | None = TURN_S
    _kept: dict[_Said, tuple[int, Played]] = field(default_factory=dict, repr=False, compare=False)
    _lock: Any = field(default_factory=threading.Lock, repr=False, compare=False)
    _guards: dict[str, Guard] = field(default_factory=dict, repr=False, compare=False)
    _gates: dict[str, threading.Semaphore] = field(default_factory=dict, repr=False, compare=False)
    _loop: Loop = field(default_factory=lambda: Loop(None), repr=False, compare=False)  # of coroutines

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise unknown("tool format", self.format, FORMATS)

    def play(self, problem: Problem, turns: Sequence[str]) -> Played:
        """The episode after these turns of the model."""
        said = tuple(turns)
        played, known = Played(), 0
        for number in range(len(said), 0, -1):
            if (found := self._kept.get((problem.key, said[:number]))) is not None:
                played, known = found[1], number
                self._keep((problem.key, said[:number]), played)  # again, as the newest
                break
        for number in range(known, len(said)):
            if not played.over:
                played = self._after(played, problem, said[number])
            self._keep((problem.key, said[: number + 1]), played)
        return played

    def _keep(self, key: _Said, played: Played) -> None:
        """Keep what was played as the newest, and let go of the oldest that is too much and no longer needed."""
        with self._lock:
            self._kept.pop(key, None)
            self._kept[key] = _rollouts.last, played
            while len(self._kept) > _KEPT and not _rollouts.is_needed(next(iter(self._kept.values()))[0]):
                self._kept.pop(next(iter(self._kept)))

    def respond(self, problem: Problem, turns: Sequence[str]) -> str | list[Message] | None:
        """The results of the last turn's calls as messages, or None where the episode is over."""
        played = self.play(problem, turns)
        if played.over:
            return None
        last = played.turns[-1]
        if self.format == "tags":
            return "\n" + "".join(f"<result>\n{result.content}\n</result>\n" for result in last)
        return [
            {
                "role": "tool",
                "name": result.call.name or "unknown",
                "tool_call_id": result.call.id or _call_id(problem.key, len(played.turns), place),
                "content": result.content,
            }
            for place, result in enumerate(last)
        ]

    def counts(self, problem: Problem, turns: Sequence[str]) -> dict[str, float]:
        """How many calls an episode made, and how many went wrong in which way."""
        results = self.play(problem, turns).results
        kinds = [result.kind for result in results]
        wrong = sum(result.is_error for result in results)
        found = {"tool/calls": float(len(results)), "tool/errors": float(wrong)}
        return {**found, **{f"tool/{kind}": float(kinds.count(kind)) for kind in KINDS}}

    def _after(self, played: Played, problem: Problem, text: str) -> Played:
        offered = {tool.name: tool for tool in self.tools(problem)}
        calls = [] if self.is_final(text) else parse_calls(text, self.format, tuple(offered.values()))
        results: list[Result] = []
        limit, spent = self._turn_limit(offered.values()), 0.0
        for number, call in enumerate(calls):
            if number >= MOST_CALLS:
                results.append(_error(call, "too_many", f"only {MOST_CALLS} calls a turn are answered"))
                break
            with aside(), self._gate(offered.get(call.name)):
                began = time.monotonic()
                result = self._run(call, offered, None if limit is None else limit - spent)
                spent += time.monotonic() - began
            results.append(result)
            if not result.is_error and offered[call.name].ends:
                return Played((*played.turns, tuple(results)), over=True)
        return Played((*played.turns, tuple(results)), over=not calls)

    def at_once(self, problem: Problem) -> int:
        """How many episodes it helps to play at a time: as many as the tool of a problem allows that allows most."""
        return max((tool.at_once for tool in self.tools(problem)), default=1)

    def _gate(self, tool: Tool | None) -> AbstractContextManager[Any]:
        return nullcontext() if tool is None else self._gates.setdefault(tool.name, threading.Semaphore(tool.at_once))

    def _turn_limit(self, offered: Iterable[Tool]) -> float | None:
        """Seconds for the calls of one turn: no less than any one of them may take."""
        limits = [self.turn_s, *(tool.timeout_s for tool in offered)]
        return None if None in limits else max(limit for limit in limits if limit is not None)

    def _run(self, call: ToolCall, offered: Mapping[str, Tool], left_s: float | None) -> Result:
        if call.fault is not None:
            return _error(call, "malformed", call.fault)
        if call.name not in offered:
            return _error(call, "unknown_tool", f"there is no tool {call.name[:40]!r}; use {', '.join(offered)}")
        tool = offered[call.name]
        try:
            arguments = tool.arguments(call.arguments or {})
        except ValueError as error:
            return _error(call, "bad_arguments", f"{tool.name}: {error}")
        if left_s is not None and left_s <= 0:
            return _error(call, "timeout", f"{tool.name} was not called: this turn's calls took too long together")
        guard = self._guards.setdefault(tool.name, Guard(tool.timeout_s, option=f"timeout_s of the tool {tool.name}"))
        try:
            value, content = self._value(guard, lambda: tool.function(**arguments), left_s)
        except CallFailed as failure:
            if (hung := guard.hung + self._loop.hung) > MOST_HUNG * tool.at_once:
                raise TooManyHang(
                    f"tool {tool.name!r} hangs: {hung} calls did not return and cannot be ended; mend it"
                ) from failure
            kind = "timeout" if failure.kind == "timeout" else "failed"
            said = f"{tool.name} took too long" if kind == "timeout" else f"{tool.name} {failure.cause}"
            return _error(call, kind, said)
        if len(content) <= tool.max_characters:
            return Result(call, content, value)
        cut = f"{content[: tool.max_characters]}\n[cut: {len(content) - tool.max_characters} characters more]"
        return Result(call, cut, value, "too_long")

    def _value(self, guard: Guard, function: Callable[[], Any], left_s: float | None) -> tuple[Any, str]:
        """What a tool returned, awaited where it is to be, and as text, all within one limit; CallFailed where any of
        that failed.
        """
        limit = min((limit for limit in (guard.timeout_s, left_s) if limit is not None), default=None)
        began = time.monotonic()

        def left() -> float | None:
            return None if limit is None else max(0.0, limit - (time.monotonic() - began))

        value = guard.call(function, within_s=limit)
        if inspect.isawaitable(value):
            ((value, error),) = self._loop.run([(_awaited, (value,))], left())
            if isinstance(error, Late):
                raise CallFailed("timeout", late(limit, guard.option))
            value = settled(value, error)
        if value is None or type(value) is str:
            return value, value or ""
        return value, guard.call(str, value, within_s=left())


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


def _error(call: ToolCall, kind: str, said: str) -> Result:
    return Result(call, f"error: {said[:200]}", kind=kind)


def _call_id(*parts: object) -> str:
    """Nine letters and digits, as the strictest templates want them."""
    text = "\x1f".join(map(str, parts))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()[:9]
