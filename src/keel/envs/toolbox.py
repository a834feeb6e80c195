"""Episodes with tools: parse the calls of a turn, run them, reply with the results and count errors."""

from __future__ import annotations

import asyncio
import hashlib
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from keel.base.errors import unknown
from keel.base.types import Message, Problem
from keel.envs.calls import CallFailed, HungCalls, TooManyHungCalls, call, call_tool, suspended_deadline
from keel.envs.episode import Episode
from keel.envs.tool_calls import FORMATS, ToolCall, parse_calls
from keel.envs.tools import Tool

ERRORS = ("malformed", "unknown_tool", "bad_arguments", "failed", "timeout", "too_many")
KINDS = (*ERRORS, "too_long")
MAX_CALLS = 16  # per turn
TURN_S = 20.0  # time limit for all calls of a turn; raised to the largest limit of a tool
MAX_HUNG = 8  # maximum hanging calls of a tool, per concurrent call
NOTED_CHARACTERS = 80  # characters of an argument in the notes of a turn


@dataclass(frozen=True)
class ToolResult:
    """The result of one call: the text for the model, the function's own value, and the kind of error."""

    call: ToolCall
    content: str
    value: Any = None
    kind: str | None = None

    @property
    def is_error(self) -> bool:
        return self.kind in ERRORS


@dataclass(frozen=True)
class Toolbox:
    """The shared state of a task's episodes: `tools(problem)` are the tools of a new episode, `is_final(text)` is
    whether a turn ends the episode.

    Tool calls are limited by the tool's `timeout_s` and by `turn_s` for all calls of a turn (None: no limit), not by
    `reward.timeout_s`. A call that takes longer returns an error to the model, and the run continues. A tool's
    `at_once` limits its concurrent calls.
    """

    tools: Callable[[Problem], Sequence[Tool]]
    format: str = "json"
    is_final: Callable[[str], bool] = lambda text: False
    turn_s: float | None = TURN_S
    _hung: dict[str, HungCalls] = field(default_factory=dict, repr=False, compare=False)
    _gates: Any = field(default_factory=weakref.WeakKeyDictionary, repr=False, compare=False)  # by event loop

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise unknown("tool format", self.format, FORMATS)

    def hung(self, tool: Tool) -> HungCalls:
        """The hanging calls of a tool."""
        return self._hung.setdefault(tool.name, HungCalls())

    def gate(self, tool: Tool | None) -> AbstractAsyncContextManager[Any]:
        """The semaphore that limits concurrent calls of a tool."""
        if tool is None:
            return nullcontext()
        gates = self._gates.setdefault(asyncio.get_running_loop(), {})
        gate: asyncio.Semaphore = gates.setdefault(tool.name, asyncio.Semaphore(tool.at_once))
        return gate


class ToolEpisode(Episode):
    """An episode with tool calls. It ends with a turn without a call or with a tool that `ends`.

    A task with tools returns a subclass from `start` that implements `reward`. `turns` are the model turns, `results`
    the tool results of each, and `is_over` is whether the episode has ended.
    """

    def __init__(self, toolbox: Toolbox, problem: Problem) -> None:
        self.toolbox, self.problem = toolbox, problem
        offered = toolbox.tools(problem)
        self.sessions = {tool.name: tool.session() for tool in offered if tool.session is not None}
        self.offered = {
            tool.name: replace(tool, function=self.sessions[tool.name]) if tool.name in self.sessions else tool
            for tool in offered
        }
        self.at_once = max((tool.at_once for tool in self.offered.values()), default=1)
        self.turns: list[str] = []
        self.results: list[tuple[ToolResult, ...]] = []
        self.is_over = False

    @property
    def every_result(self) -> tuple[ToolResult, ...]:
        """The results of all turns."""
        return tuple(result for turn in self.results for result in turn)

    async def step(self, text: str) -> str | list[Message] | None:
        """The results of a turn's calls as messages, or None if the episode is over."""
        calls = [] if self.toolbox.is_final(text) else self._calls(text)
        results = await self._run_all(calls)
        self.turns.append(text)
        self.results.append(results)
        last = self.offered.get(results[-1].call.name) if results and not results[-1].is_error else None
        self.is_over = not calls or (last is not None and last.ends)
        return None if self.is_over else self._reply(results)

    def counts(self) -> dict[str, float]:
        """The number of calls and of errors by kind."""
        results = self.every_result
        kinds = [result.kind for result in results]
        wrong = sum(result.is_error for result in results)
        totals = {"tool/calls": float(len(results)), "tool/errors": float(wrong)}
        return {**totals, **{f"tool/{kind}": float(kinds.count(kind)) for kind in KINDS}}

    def turn_notes(self) -> list[str]:
        """The parsed calls of each turn, with their errors."""
        return ["\n".join(map(_written, results)) for results in self.results]

    def close(self) -> None:
        """Close the sessions of this episode."""
        for session in self.sessions.values():
            session.close()

    def _calls(self, text: str) -> list[ToolCall]:
        return parse_calls(text, self.toolbox.format, tuple(self.offered.values()))

    def _reply(self, results: Sequence[ToolResult]) -> str | list[Message]:
        if self.toolbox.format == "tags":
            return "\n" + "".join(f"<result>\n{result.content}\n</result>\n" for result in results)
        return [
            {
                "role": "tool",
                "name": result.call.name or "unknown",
                "tool_call_id": result.call.id or _call_id(self.problem.key, len(self.turns), number),
                "content": result.content,
            }
            for number, result in enumerate(results)
        ]

    async def _run_all(self, calls: Sequence[ToolCall]) -> tuple[ToolResult, ...]:
        """Run the calls of a turn in order, up to one that ends the episode."""
        results: list[ToolResult] = []
        limit, spent = _turn_limit(self.toolbox.turn_s, self.offered.values()), 0.0
        for number, tool_call in enumerate(calls):
            if number >= MAX_CALLS:
                results.append(_error(tool_call, "too_many", f"only {MAX_CALLS} calls per turn are answered"))
                break
            tool = self.offered.get(tool_call.name)
            async with suspended_deadline(), self.toolbox.gate(tool):
                began = time.monotonic()
                result = await self._run(tool_call, tool, None if limit is None else limit - spent)
                spent += time.monotonic() - began
            results.append(result)
            if not result.is_error and tool is not None and tool.ends:
                break
        return tuple(results)

    async def _run(self, tool_call: ToolCall, tool: Tool | None, left_s: float | None) -> ToolResult:
        if tool_call.fault is not None:
            return _error(tool_call, "malformed", tool_call.fault)
        if tool is None:
            names = ", ".join(self.offered)
            return _error(tool_call, "unknown_tool", f"there is no tool {tool_call.name[:40]!r}; use {names}")
        try:
            arguments = tool.arguments(tool_call.arguments or {})
        except ValueError as error:
            return _error(tool_call, "bad_arguments", f"{tool.name}: {error}")
        if left_s is not None and left_s <= 0:
            return _error(tool_call, "timeout", f"{tool.name} was not called: this turn's calls took too long together")
        hung = self.toolbox.hung(tool)
        limit = min((limit for limit in (tool.timeout_s, left_s) if limit is not None), default=None)
        try:
            value, content = await _value(tool, arguments, limit, hung)
        except CallFailed as failure:
            if (count := hung.alive) > MAX_HUNG * tool.at_once:
                raise TooManyHungCalls(
                    f"tool {tool.name!r} hangs: {count} calls did not return and cannot be stopped; fix it"
                ) from failure
            kind = "timeout" if failure.kind == "timeout" else "failed"
            return _error(
                tool_call, kind, f"{tool.name} took too long" if kind == "timeout" else f"{tool.name} {failure}"
            )
        if len(content) <= tool.max_characters:
            return ToolResult(tool_call, content, value)
        cut = f"{content[: tool.max_characters]}\n[cut: {len(content) - tool.max_characters} characters more]"
        return ToolResult(tool_call, cut, value, "too_long")


async def _value(tool: Tool, arguments: dict[str, Any], limit: float | None, hung: HungCalls) -> tuple[Any, str]:
    """The value of a tool and its text within one time limit; `str` may run user code too."""
    began = time.monotonic()
    value = await call_tool(partial(tool.function, **arguments), timeout_s=limit, hung=hung)
    if value is None or type(value) is str:
        return value, value or ""
    remaining = None if limit is None else max(0.0, limit - (time.monotonic() - began))
    return value, await call(str, value, timeout_s=remaining, hung=hung)


def _turn_limit(turn_s: float | None, offered: Iterable[Tool]) -> float | None:
    """The time limit for the calls of one turn, at least that of each tool."""
    limits = [turn_s, *(tool.timeout_s for tool in offered)]
    return None if None in limits else max(limit for limit in limits if limit is not None)


def _written(result: ToolResult) -> str:
    """A call in one line, such as `→ search(query='x'): unknown tool`."""
    call, wrong = result.call, (result.kind or "").replace("_", " ")
    arguments = ", ".join(f"{name}={_shortened(repr(value))}" for name, value in (call.arguments or {}).items())
    return (
        f"→ {call.name}({arguments}){': ' * bool(wrong)}{wrong}" if call.fault is None else f"→ {wrong}: {call.fault}"
    )


def _shortened(text: str) -> str:
    return text if len(text) <= NOTED_CHARACTERS else f"{text[:NOTED_CHARACTERS]}…"


def _error(call: ToolCall, kind: str, reason: str) -> ToolResult:
    return ToolResult(call, f"error: {reason[:200]}", kind=kind)


def _call_id(*parts: object) -> str:
    """Nine alphanumeric characters, as Mistral's template requires."""
    text = "\x1f".join(map(str, parts))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()[:9]
