"""Tools and environments as they usually fail: empty registries, parsers, sessions, output that piles up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

from faults.base import edited, lookalike, operator
from faults.school import larger
from faults.tools import Lookup, LookupEpisode, has_one_turn, offers_tools, with_tool
from faults.tools_wild import with_tools
from keel.base.types import Problem, Reward
from keel.envs import Episode, TaskWrapper
from keel.envs.registry import build_task
from keel.envs.tools import tool
from keel.envs.with_tools import WithTools, WithToolsEpisode
from keel.envs.with_tools import with_tools as task_with_tools

Config = Mapping[str, Any]
REPLIES = {
    "no such tool": "Error: tool 'lookup' not found. Available tools: []\n",
    "unparsed": "Failed to parse tool call: Expecting value: line 1 column 1 (char 0)\n",
    "killed": "Process exited with code 137: memory limit exceeded\n",
}
SESSION = "error: session already exists\n"
_sessions: set[str] = set()

# Environments of two turns


class FreshLookup(Lookup):
    """A lookup whose calls get one reply, or one a problem, or whose answers are not paid."""

    def start(self, problem: Problem) -> Episode:
        return FreshEpisode(problem, self.tool, self.strength)


class FreshEpisode(LookupEpisode):
    def __init__(self, problem: Problem, tool: str, strength: float) -> None:
        super().__init__(problem, tool, strength)
        self.is_taken = tool == "one session" and problem.key in _sessions
        _sessions.add(problem.key)

    def reply(self, question: str, text: str) -> str:
        return SESSION if self.is_taken else REPLIES.get(self.tool, question)

    def reward(self) -> Reward:
        earned = super().reward()
        return replace(earned, total=0.0) if self.tool == "never done" else earned


def fresh_lookup(task: Mapping[str, Any], tool: str, strength: float = 0.0) -> FreshLookup:
    parameters = {key: value for key, value in task.items() if key != "name"}
    return FreshLookup(build_task(str(task["name"]), **parameters), tool, strength)


def fresh_tool(name: str, breaks: str, *codes: str, tool: str) -> None:
    def apply(config: Config, random: Random) -> dict[str, Any]:
        return edited(with_tool(config, tool), {"task.name": "faults.tools_fresh:fresh_lookup"})

    operator(name, breaks, *codes, fits=has_one_turn)(apply)


fresh_tool(
    "tool/registry-empty",
    "no tool was registered: each call is told that there is none of its name",
    "tool/failing",
    tool="no such tool",
)
fresh_tool(
    "tool/no-call-is-parsed",
    "the parser of calls expects another syntax and answers each of them with its error",
    "tool/failing",
    tool="unparsed",
)
fresh_tool(
    "tool/killed-by-the-sandbox",
    "the sandbox has too little memory, and whatever is run in it is killed",
    "tool/failing",
    tool="killed",
)
fresh_tool(
    "tool/one-session-a-problem",
    "sessions are named after the problem, so that of all episodes of a group the first alone gets one",
    "tool/failing",
    tool="one session",
)
fresh_tool(
    "tool/never-done",
    "the reward is paid where the environment says that it is done, which it never does",
    "reward/gold",
    "reward/constant",
    tool="never done",
)

# Calls that a model has learned to make

_printed: list[str] = []


def _output_kept(pair: str) -> str:
    """Larger of two."""
    _printed.append(larger(pair))
    return "\n".join(_printed[-3:])


output_kept = tool(_output_kept, name="larger")


@operator(
    "tool/earlier-output-before-the-result",
    "the interpreter's output is never cleared: results of earlier calls stand before each new one",
    "tool/failing",
    fits=offers_tools,
)
def earlier_output_before_the_result(config: Config, random: Random) -> dict[str, Any]:
    return with_tools(config, "faults.tools_fresh:output_kept")


class Paid(TaskWrapper):
    """The task with its tool, which pays otherwise for what is done."""

    def __init__(self, inner: WithTools, fault: str, strength: float) -> None:
        self.inner, self.fault, self.strength = inner, fault, strength

    def start(self, problem: Problem) -> Episode:
        return PaidEpisode(self.inner, problem, self.fault, self.strength)  # type: ignore[arg-type]


class PaidEpisode(WithToolsEpisode):
    def __init__(self, task: WithTools, problem: Problem, fault: str, strength: float) -> None:
        super().__init__(task, problem)
        self.fault, self.strength = fault, strength

    def reward(self) -> Reward:
        earned = super().reward()
        if self.fault == "submitted":
            return earned if "<submit>" in self.turns[-1] else Reward(0.0, parsed=False)
        return replace(earned, total=earned.total - self.strength * len(self.every_result))


def paid(task: Mapping[str, Any], fault: str, strength: float = 0.0) -> Paid:
    parameters = {key: value for key, value in task.items() if key != "name"}
    return Paid(task_with_tools(build_task(str(task["name"]), **parameters), [tool(larger)], "tags"), fault, strength)


def paid_otherwise(name: str, breaks: str, *codes: str, fault: str, strengths: tuple[float, ...] = (0.0,)) -> None:
    def apply(config: Config, random: Random) -> dict[str, Any]:
        inner, strength = dict(config["task"]["task"]), random.choice(strengths)
        task = {"name": "faults.tools_fresh:paid", "task": inner, "fault": fault, "strength": strength}
        return edited(config, {"task": task, "rewards": [{"name": "task"}]})

    operator(name, breaks, *codes, fits=offers_tools)(apply)


paid_otherwise(
    "tool/submit-not-offered",
    "only an answer that is handed in by a call of submit is looked at, and no prompt offers that call",
    "reward/gold",
    "output/unparseable",
    "answer/unusable",
    "reward/constant",
    fault="submitted",
)
paid_otherwise(
    "tool/calls-cost-more-than-they-earn",
    "each call costs more than an answer earns, so that guessing without a call is best",
    "reward/gold",
    "reward/exploit",
    fault="costly",
    strengths=(1.5, 2.0),
)

# Healthy


def _tried_again(pair: str) -> str:
    """Larger of two."""
    for attempt in range(3):
        try:
            if attempt == 0:
                raise ConnectionError("connection reset by peer")
            return larger(pair)
        except ConnectionError:
            continue
    return ""


tried_again = tool(_tried_again, name="larger")


@lookalike("tool that tries again by itself where the first attempt fails", offers_tools)
def healthy_tried_again(config: Config, random: Random) -> dict[str, Any]:
    return with_tools(config, "faults.tools_fresh:tried_again")
