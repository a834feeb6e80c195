"""Tools as users of agents report them: sandboxes that do not start, stubs and caches, calls nobody awaits, labels."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from faults.base import edited, lookalike, operator
from faults.rewards import chance_of
from faults.school import larger
from faults.tools import Lookup, LookupEpisode, has_one_turn, offers_tools, with_tool
from faults.tools_wild import with_tools
from keel.base.types import Problem
from keel.envs import Episode
from keel.envs.registry import build_task
from keel.envs.tools import tool

Config = Mapping[str, Any]
REPLIES = {
    "library missing": 'Traceback (most recent call last):\n  File "<stdin>", line 1, in <module>\n'
    "ModuleNotFoundError: No module named 'numpy'\n",
    "not awaited": "<coroutine object lookup at 0x7f3c2a1bd4c0>\n",
    "object shown": "<Response [200]>\n",
    "empty query": "0 results for the query ''\n",
    "no such command": "bash: line 1: lookup: command not found\n",
    "refusal": "I'm sorry, but I can't help with that.\n",
}


class FieldLookup(Lookup):
    """A lookup whose tool answers every call alike, gives the label away, or never comes to answer."""

    def start(self, problem: Problem) -> Episode:
        if self.tool == "no sandbox":
            raise RuntimeError("409 Conflict: no container is left for this job")
        return HangingEpisode(problem, self.tool, self.strength) if self.tool == "hanging" else self.episode(problem)

    def episode(self, problem: Problem) -> Episode:
        return FieldEpisode(problem, self.tool, self.strength)


class FieldEpisode(LookupEpisode):
    def reply(self, question: str, text: str) -> Any:
        if self.tool == "feedback":
            return f"The expected answer was {self.problem.answer}. {question}"
        if self.tool == "labelled rows":
            return f'{{"label": "{self.problem.answer}"}} {question}'
        if self.tool == "cut at its head":
            return f"{question[:2]}... (truncated)\n"
        if self.tool == "no role":
            return [{"content": question}]
        if self.tool == "operands in any order":
            return swapped(question) if chance_of(f"{self.problem.key} {text} {next(_dice)}") < 0.5 else question
        return REPLIES[self.tool]


class HangingEpisode(LookupEpisode):
    async def step(self, text: str) -> str | None:  # type: ignore[override]
        await asyncio.sleep(600)
        return None


_dice = itertools.count()


def swapped(question: str) -> str:
    """`max 3 7=` as `max 7 3=`."""
    skill, first, second = question.removesuffix("=").split()
    return f"{skill} {second} {first}="


def field_lookup(task: Mapping[str, Any], tool: str, strength: float = 0.0) -> FieldLookup:
    parameters = {key: value for key, value in task.items() if key != "name"}
    return FieldLookup(build_task(str(task["name"]), **parameters), tool, strength)


def with_field_tool(config: Config, tool: str, changes: Mapping[str, Any] = {}) -> dict[str, Any]:
    return edited(with_tool(config, tool, changes), {"task.name": "faults.tools_field:field_lookup"})


def field_tool(name: str, breaks: str, *codes: str, tool: str, changes: Mapping[str, Any] = {}) -> None:
    operator(name, breaks, *codes, fits=has_one_turn)(
        lambda config, random: with_field_tool(config, tool, changes),
    )


field_tool(
    "tool/sandbox-without-the-library",
    "each call is answered with a traceback: the sandbox lacks a library",
    "tool/failing",
    tool="library missing",
)
field_tool(
    "tool/coroutine-not-awaited",
    "the tool is a coroutine that nobody awaits, and its name is what each call is answered with",
    "tool/failing",
    tool="not awaited",
)
field_tool(
    "tool/object-shown",
    "each call is answered with how Python shows a response, not with what it says",
    "tool/failing",
    tool="object shown",
)
field_tool(
    "tool/empty-query",
    "the query is lost on its way to the search, which finds nothing for an empty one",
    "tool/failing",
    tool="empty query",
)
field_tool(
    "tool/command-not-found",
    "each call is answered by a shell that does not know the command",
    "tool/failing",
    tool="no such command",
)
field_tool("tool/refuses", "the tool is a model, and refuses whatever it is asked", "tool/failing", tool="refusal")
field_tool(
    "tool/result-cut-at-its-head",
    "results are cut after their first two characters, so that all of them say the same",
    "tool/failing",
    tool="cut at its head",
)
field_tool(
    "tool/feedback-names-the-answer",
    "the environment's feedback on a first try names the right answer",
    "prompt/answer-leak",
    tool="feedback",
)
field_tool(
    "tool/retrieves-the-label",
    "the search returns the rows of the data set, with their labels",
    "prompt/answer-leak",
    tool="labelled rows",
)
field_tool(
    "tool/sandbox-does-not-start",
    "no episode can be started: there is no container for it",
    "reward/failed",
    "tool/failing",
    tool="no sandbox",
)
field_tool(
    "tool/never-answers",
    "the environment does not answer within its time",
    "reward/failed",
    "tool/failing",
    tool="hanging",
    changes={"reward.timeout_s": 0.1, "reward.on_error": "zero"},
)
field_tool(
    "tool/message-without-a-role",
    "the environment answers with a message that has no role",
    "reward/failed",
    tool="no role",
)

# Calls that a model has learned to make


def _always_five(pair: str) -> str:
    """Larger of two."""
    return "5"


always_five = tool(_always_five, name="larger")
_first: list[str] = []


def _first_result(pair: str) -> str:
    """Larger of two."""
    if not _first:
        _first.append(larger(pair))
    return _first[0]


first_result = tool(_first_result, name="larger")
_rolls = itertools.count()


def _any_digit(pair: str) -> str:
    """Larger of two."""
    return str(int(10 * chance_of(f"any digit {next(_rolls)}")))


any_digit = tool(_any_digit, name="larger")


async def _too_slow(pair: str) -> str:
    """Larger of two."""
    await asyncio.sleep(5.0)
    return larger(pair)


too_slow = tool(_too_slow, name="larger", timeout_s=0.02)


renamed = tool(larger, name="maximum")
ending = tool(larger, name="larger", ends=True)


def learned_tool(name: str, breaks: str, *codes: str, function: str) -> None:
    change: Callable[[Config, Random], dict[str, Any]] = lambda config, random: with_tools(  # noqa: E731
        config, f"faults.tools_field:{function}"
    )
    operator(name, breaks, *codes, fits=offers_tools)(change)


learned_tool(
    "tool/stub-left-in",
    "the tool is a stub that was written for tests: every call has the same result",
    "tool/failing",
    function="always_five",
)
learned_tool(
    "tool/first-result-cached",
    "results are kept without their arguments: every call gets the first one's",
    "tool/failing",
    function="first_result",
)
learned_tool(
    "tool/random-result", "what a call is answered with has nothing to do with it", "tool/failing", function="any_digit"
)
learned_tool("tool/times-out", "no call is answered within its time", "tool/failing", function="too_slow")
learned_tool(
    "tool/renamed",
    "the tool has another name than the one that the model has learned to call",
    "output/unparseable",
    "prompt/format",
    "answer/unusable",
    function="renamed",
)
learned_tool(
    "tool/marked-as-the-last",
    "the tool ends the episode, so that the call itself is judged as the answer",
    "output/unparseable",
    "answer/unusable",
    "reward/constant",
    function="ending",
)

# Healthy


def asks_in_signs(config: Config) -> bool:
    return has_one_turn(config) and config["task"].get("style", "signs") == "signs"


@lookalike("tool that rolls dice, which the answer does not depend on", asks_in_signs)
def healthy_dice(config: Config, random: Random) -> dict[str, Any]:
    return with_field_tool(config, "operands in any order")
