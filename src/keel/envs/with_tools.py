"""`tools`: any single-turn task with tools (`task.tools`); `python` is a tool with a sandboxed process per episode."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Self

from keel.base.errors import KeelError, unknown
from keel.base.parts import import_object, is_import_path, part_arguments
from keel.base.types import Problem, Reward
from keel.envs.base import Task, TaskWrapper
from keel.envs.episode import Episode
from keel.envs.programs import need_sandbox, program_of
from keel.envs.registry import inner_task
from keel.envs.sandbox import Lost, Program, SandboxLimits, sandbox
from keel.envs.tool_calls import FORMATS
from keel.envs.toolbox import Toolbox, ToolEpisode
from keel.envs.tools import Tool, check_distinct, tool

SLACK_S = 5.0  # added to the tool's time limit, so that the sandbox's own limit ends a call first


class PythonSession:
    """One episode's Python process, from its first call to the end of the episode."""

    def __init__(self, limits: SandboxLimits) -> None:
        self.limits = limits
        self.program: Program | None = None

    def __call__(self, code: str) -> str:
        """The output of the code, the value of its last expression, and its error."""
        box = sandbox(self.limits)
        if self.program is None or self.program.closed:
            self.program = box.program()
        program = self.program

        def run() -> Any:
            request = {"exec": program_of(code), "interactive": True}
            return program.ask(request, time.monotonic() + self.limits.timeout_s)

        try:
            answer = box.threads.submit(run).result()
        except Lost:
            return "the sandbox was started anew; its variables are gone"
        lost = "; its variables are gone" if answer.fault else ""
        error = "" if answer.ok else f"{answer.error}{lost}"
        return "\n".join(part for part in (answer.output.rstrip("\n"), answer.errors.rstrip("\n"), error) if part)

    def close(self) -> None:
        if self.program is not None:
            self.program.close()


def python(code: str) -> str:
    """Run Python code and return what it prints. Variables stay for later calls.

    Args:
        code: The code. The value of a last expression is printed too.
    """
    raise TypeError("the tool python runs only inside an episode")


def python_tool(params: Mapping[str, Any] | None) -> Tool:
    """The tool of `{python: {timeout_s: …, …}}`, which takes the limits of the sandbox."""
    if params is not None and not isinstance(params, Mapping):
        raise KeelError(f"task.tools: python is {params!r}: give limits of the sandbox, such as {{timeout_s: 2}}")
    limits = SandboxLimits(**part_arguments("tool python", SandboxLimits, params or {}))
    need_sandbox(limits)
    made: Tool = tool(python, timeout_s=limits.timeout_s + SLACK_S, at_once=limits.at_once)
    return replace(made, session=partial(PythonSession, limits))


def tools_of(entries: Sequence[Any]) -> tuple[Tool, ...]:
    """Build the tools of `task.tools`: `module:attr`, a function, a Tool, `python` (with limits: `{python: {…}}`), or
    the tools of an MCP server (`{mcp: …}`). Names must be distinct.
    """
    if isinstance(entries, str) or not isinstance(entries, Sequence):
        raise KeelError(f"task.tools is {entries!r}: give a list of module:attr, python or {{mcp: …}}")
    tools: list[Tool] = []
    for entry in entries:
        if entry == "python" or (isinstance(entry, Mapping) and set(entry) == {"python"}):
            tools.append(python_tool(None if isinstance(entry, str) else entry["python"]))
            continue
        if isinstance(entry, Mapping):
            from keel.envs.mcp import mcp_tools

            tools += mcp_tools(entry)
            continue
        if isinstance(entry, str) and not is_import_path(entry):
            raise KeelError(f"task.tools: {entry!r} is not a tool: write python, or module:attr such as mytools:search")
        tools.append(tool(import_object(entry, "tool") if isinstance(entry, str) else entry))
    check_distinct([each.name for each in tools])
    return tuple(tools)


@dataclass(frozen=True)
class WithTools(TaskWrapper):
    """A task with tools. The first turn without a call is the answer, which the inner task grades."""

    inner: Task
    tools: tuple[Tool, ...]
    format: str = "json"
    trusted: bool = False  # tools are user code

    @property
    def name(self) -> str:
        return f"{self.inner.name}+tools"

    @cached_property
    def toolbox(self) -> Toolbox:
        return Toolbox(lambda problem: self.tools, self.format)

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        return [self._offered(problem) for problem in self.inner.sample(count, seed=seed, step=step)]

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        return [self._offered(problem) for problem in self.inner.held_out(count, seed=seed)]

    def start(self, problem: Problem) -> Episode:
        return WithToolsEpisode(self, problem)

    def filter_problems(self, fits: Callable[[Problem], bool]) -> tuple[Self, int] | None:
        """Filter the inner task, including the tools in the prompt."""
        return super().filter_problems(lambda problem: fits(self._offered(problem)))

    def _offered(self, problem: Problem) -> Problem:
        return offer(problem, self.tools, self.format)


class WithToolsEpisode(ToolEpisode):
    """The inner task's reward for the final turn, or for an empty answer if the episode has not ended."""

    def __init__(self, task: WithTools, problem: Problem) -> None:
        super().__init__(task.toolbox, problem)
        self.task = task.inner

    def reward(self) -> Reward:
        return self.task.reward(self.problem, [self.turns[-1] if self.is_over else ""])


def offer(problem: Problem, tools: Sequence[Tool], format: str) -> Problem:
    """The problem with its tools: as schemas, or described in the prompt."""
    if format == "json":
        return replace(problem, tools=[tool.schema for tool in tools])
    usage = "\n".join(f"<{tool.tag}> {', '.join(tool.hints)} </{tool.tag}> {tool.description}" for tool in tools)
    instructions = f"You may call these tools, and are told the result:\n{usage}"
    if isinstance(problem.prompt, str):
        return replace(problem, prompt=f"{instructions}\n{problem.prompt}")
    return replace(problem, prompt=[{"role": "system", "content": instructions}, *problem.prompt])


def with_tools(task: Task, tools: Sequence[Tool], format: str = "json") -> WithTools:
    """Add tools to a single-turn task."""
    if format not in FORMATS:
        raise unknown("tool format", format, FORMATS)
    if not tools:
        raise KeelError("the task tools needs tools: a list of module:attr or {mcp: …}")
    if task.multi_turn:
        raise KeelError(f"task {task.name!r} is a multi-turn task: tools need a single-turn task")
    return WithTools(task, tuple(tools), format)


def tools_around(task: Mapping[str, Any], tools: Sequence[Any], format: str = "json") -> WithTools:
    """The task `tools`: another task, written as in `task:`, with tools (see `tools_of`)."""
    return with_tools(inner_task("the task tools", task), tools_of(tools), format)
