"""Tools as agents meet them: pages in place of results, results of other calls, calls in another form."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from faults.base import edited, operator
from faults.tools import Lookup, LookupEpisode, has_one_turn, offers_tools, with_tool
from keel.base.types import Problem
from keel.envs import Episode
from keel.envs.registry import build_task
from keel.envs.tools import tool

Config = Mapping[str, Any]
REPLIES = {
    "login page": "Please sign in to continue. Your session has expired.\n",
    "usage text": "usage: lookup [-h] [--limit N] QUERY\nlookup: the following arguments are required: QUERY\n",
    "null result": '{"status": "ok", "result": null}\n',
    "still loading": "The tool is still being loaded, try again later.\n",
}
_asked: list[str] = []


class WildLookup(Lookup):
    """A lookup whose tool answers each call alike, with what it was told, or with what another call asked."""

    def start(self, problem: Problem) -> Episode:
        return WildEpisode(problem, self.tool, self.strength)


class WildEpisode(LookupEpisode):
    def reply(self, question: str, text: str) -> str:
        if self.tool == "echo":
            return f"{text}\n"
        if self.tool == "another call":
            _asked.append(question)
            return next((other for other in reversed(_asked) if other != question), "\n")
        return REPLIES[self.tool]


def wild_lookup(task: Mapping[str, Any], tool: str, strength: float = 0.0) -> WildLookup:
    parameters = {key: value for key, value in task.items() if key != "name"}
    return WildLookup(build_task(str(task["name"]), **parameters), tool, strength)


def wild_tool(name: str, breaks: str, *codes: str, tool: str) -> None:
    def apply(config: Config, random: Random) -> dict[str, Any]:
        return edited(with_tool(config, tool), {"task.name": "faults.tools_wild:wild_lookup"})

    operator(name, breaks, *codes, fits=has_one_turn)(apply)


wild_tool(
    "tool/result-of-another-call",
    "each call is answered with what another episode asked for",
    "tool/failing",
    tool="another call",
)
wild_tool("tool/echoes", "each call is answered with its own text", "tool/failing", tool="echo")
wild_tool(
    "tool/login-page", "each call is answered with a page that asks to sign in", "tool/failing", tool="login page"
)
wild_tool("tool/usage-text", "each call is answered with how to call the tool", "tool/failing", tool="usage text")
wild_tool("tool/null-result", "each call succeeds with a result of null", "tool/failing", tool="null result")
wild_tool("tool/still-loading", "each call is told to come back later", "tool/failing", tool="still loading")


# Calls that a model has learned to make


def larger(pair: str) -> str:
    """Larger of two."""
    _late.append(str(max(map(int, pair.split()))))
    return _late[-2] if len(_late) > 1 else "0"


_late: list[str] = []


def with_tools(config: Config, tool: str) -> dict[str, Any]:
    return edited(config, {"task.tools": [tool]})


@operator("tool/one-call-late", "each call gets the result of the call before it", "tool/failing", fits=offers_tools)
def one_call_late(config: Config, random: Random) -> dict[str, Any]:
    return with_tools(config, "faults.tools_wild:larger")


@tool(name="larger")
def larger_of_one(pair: int) -> str:
    """Larger of two."""
    return str(pair)


@operator(
    "tool/argument-of-another-type",
    "the tool takes a number where the model gives two in a text, so that every call is refused",
    "tool/failing",
    "output/unparseable",
    fits=offers_tools,
)
def argument_of_another_type(config: Config, random: Random) -> dict[str, Any]:
    return with_tools(config, "faults.tools_wild:larger_of_one")


@operator(
    "tool/calls-in-another-form",
    "calls are read as JSON where the model has learned to write tags",
    "output/unparseable",
    "prompt/format",
    "answer/unusable",
    fits=offers_tools,
)
def calls_in_another_form(config: Config, random: Random) -> dict[str, Any]:
    return edited(config, {"task.format": "json"})


@operator(
    "tool/budget-spent-by-the-call",
    "the limit of an episode is used up by the call and its result, and no answer fits",
    "output/truncated",
    "answer/unusable",
    fits=offers_tools,
)
def budget_spent_by_the_call(config: Config, random: Random) -> dict[str, Any]:
    return edited(config, {"rollout.max_completion_length": random.choice((24, 26)), "rollout.max_turn_length": 24})
