"""Tools with the bugs of an ordinary day: nothing is found, too little is returned, an argument is missing."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from faults.base import edited, operator
from faults.tools import Lookup, LookupEpisode, has_one_turn, offers_tools, with_tool
from faults.tools_wild import with_tools
from keel.base.types import Problem
from keel.envs import Episode
from keel.envs.registry import build_task
from keel.envs.tools import tool

Config = Mapping[str, Any]
REPLIES = {
    "nothing found": "No results found.\n",
    "robot": "Our systems have detected unusual traffic. Please confirm that you are not a robot.\n",
}


class DailyLookup(Lookup):
    """A lookup whose index is empty, whose search engine refuses robots, or whose replies are cut."""

    def start(self, problem: Problem) -> Episode:
        return DailyEpisode(problem, self.tool, self.strength)


class DailyEpisode(LookupEpisode):
    def reply(self, question: str, text: str) -> str:
        if self.tool == "cut":
            return question[: int(self.strength)] + "...(truncated)\n"
        return REPLIES[self.tool]


def daily_lookup(task: Mapping[str, Any], tool: str, strength: float = 0.0) -> DailyLookup:
    parameters = {key: value for key, value in task.items() if key != "name"}
    return DailyLookup(build_task(str(task["name"]), **parameters), tool, strength)


def daily_tool(name: str, breaks: str, *codes: str, tool: str, strengths: tuple[float, ...] = (0.0,)) -> None:
    def apply(config: Config, random: Random) -> dict[str, Any]:
        changed = with_tool(config, tool, strength=random.choice(strengths))
        return edited(changed, {"task.name": "faults.tools_daily:daily_lookup"})

    operator(name, breaks, *codes, fits=has_one_turn)(apply)


daily_tool(
    "tool/nothing-is-ever-found",
    "the index that is searched is empty: whatever is asked, there are no results",
    "tool/failing",
    tool="nothing found",
)
daily_tool(
    "tool/taken-for-a-robot",
    "the search engine takes the calls for those of a robot and asks each of them to show that it is none",
    "tool/failing",
    tool="robot",
)
daily_tool(
    "tool/response-limit-of-a-few-characters",
    "the limit on what a tool may return is a few characters, so that each result is cut before it says anything",
    "tool/failing",
    tool="cut",
    strengths=(2, 3),
)


@tool(name="larger")
def larger_of_two(first: int, second: int) -> str:
    """Larger of two."""
    return str(max(first, second))


@operator(
    "tool/second-argument-missing",
    "the tool takes two arguments where the model has learned to give one text, so that no call is one",
    "tool/failing",
    "output/unparseable",
    "prompt/format",
    "answer/unusable",
    fits=offers_tools,
)
def second_argument_missing(config: Config, random: Random) -> dict[str, Any]:
    return with_tools(config, "faults.tools_daily:larger_of_two")
