"""The tool `python`: code in the sandbox, with state within an episode and none across episodes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from keel.base.errors import KeelError
from keel.base.parts import part_arguments
from keel.envs.programs import need_sandbox, program_of
from keel.envs.sandbox import Lost, Program, SandboxLimits, sandbox
from keel.envs.tools import Tool, tool

SLACK_S = 5.0  # seconds after the time limit of a call, which therefore ends first


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
