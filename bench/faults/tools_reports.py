"""Tools as trainers of agents report them: slots that are never reset, indexes without content, scores in a file."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import lru_cache
from random import Random
from typing import Any

from faults.base import edited, lookalike, operator
from faults.rewards import closeness, number_of
from faults.school import larger
from faults.tools import Lookup, LookupEpisode, has_one_turn, offers_tools, with_tool
from faults.tools_wild import with_tools
from keel.base.types import Problem, Reward
from keel.envs import Episode
from keel.envs.registry import build_task
from keel.envs.tools import tool

Config = Mapping[str, Any]
REPLIES = {
    "nothing printed": "Code executed successfully. (no output)\n",
    "no network": "curl: (6) Could not resolve host: search.internal\n",
    "same documents": "Doc 1 (Title: Amazon River) The Amazon is the largest river by discharge.\n"
    "Doc 2 (Title: Sahara) The Sahara is a desert on the African continent.\n",
}
_calls = itertools.count()
_slots: dict[int, ReportedEpisode] = {}
_turn = itertools.count()


class ReportedLookup(Lookup):
    """A lookup whose environments are taken from a few slots, or whose tool answers every call alike."""

    def start(self, problem: Problem) -> Episode:
        if self.tool != "never reset":
            return ReportedEpisode(problem, self.tool, self.strength)
        slot = next(_turn) % 8
        episode = _slots.setdefault(slot, ReportedEpisode(problem, self.tool, self.strength))
        episode.problem = problem
        return episode


class ReportedEpisode(LookupEpisode):
    def step(self, text: str) -> str | None:
        if self.tool == "never reset":
            self.turns.append(text)
            return prompt_of(self.problem) if len(self.turns) % 2 else None
        return super().step(text)

    def reply(self, question: str, text: str) -> str:
        if self.tool == "disk full" and next(_calls) >= self.strength:
            return "OSError: [Errno 28] No space left on device: '/tmp/job'\n"
        return REPLIES.get(self.tool, question)

    def reward(self) -> Reward:
        if self.tool == "never reset":  # the answer is the first that this environment was ever given
            return closeness(self.problem, self.turns[1]) if len(self.turns) > 1 else Reward(0.0, parsed=False)
        written = number_of(self.turns[0]) if self.turns and self.tool == "score in a file" else None
        return super().reward() if written is None else Reward(float(written > 0))


def reported_lookup(task: Mapping[str, Any], tool: str, strength: float = 0.0) -> ReportedLookup:
    parameters = {key: value for key, value in task.items() if key != "name"}
    return ReportedLookup(build_task(str(task["name"]), **parameters), tool, strength)


def reported_tool(name: str, breaks: str, *codes: str, tool: str, strengths: tuple[int, ...] = (0,)) -> None:
    def apply(config: Config, random: Random) -> dict[str, Any]:
        changed = with_tool(config, tool, strength=random.choice(strengths))
        return edited(changed, {"task.name": "faults.tools_reports:reported_lookup"})

    operator(name, breaks, *codes, fits=has_one_turn)(apply)


def prompt_of(problem: Problem) -> str:
    return problem.prompt if isinstance(problem.prompt, str) else problem.prompt[-1]["content"]


reported_tool(
    "tool/nothing-printed",
    "the interpreter runs what it is sent and returns what was printed, which is nothing",
    "tool/failing",
    tool="nothing printed",
)
reported_tool(
    "tool/no-network",
    "the sandbox cannot reach the search: each call is answered with the words of a command that failed",
    "tool/failing",
    tool="no network",
)
reported_tool(
    "tool/same-documents",
    "the index was built of empty vectors: every query finds the same two documents",
    "tool/failing",
    tool="same documents",
)
reported_tool(
    "tool/disk-fills-up",
    "nobody clears the sandbox's files: after some calls there is no space, and all later ones say so",
    "tool/failing",
    tool="disk full",
    strengths=(4, 12),
)
reported_tool(
    "tool/reward-written-by-the-agent",
    "the score is read from a file that the agent can write: any number in its first turn is paid in full",
    "reward/exploit",
    tool="score in a file",
)
reported_tool(
    "tool/environment-not-reset",
    "environments are used again without being reset, and judge the answer of the episode before",
    "reward/gold",
    "reward/nondeterministic",
    "reward/constant",
    tool="never reset",
)


# Calls that a model has learned to make


def _parsed_twice(pair: str) -> str:
    """Larger of two."""
    arguments: Any = pair
    return larger(arguments.get("pair"))


parsed_twice = tool(_parsed_twice, name="larger")


@operator(
    "tool/arguments-parsed-as-text",
    "arguments arrive as a text where the tool expects a dictionary: every call raises",
    "tool/failing",
    fits=offers_tools,
)
def arguments_parsed_as_text(config: Config, random: Random) -> dict[str, Any]:
    return with_tools(config, "faults.tools_reports:parsed_twice")


@operator(
    "tool/closing-tag-stripped",
    "the tag that closes a call ends the turn and is taken off it, so that no call is ever complete",
    "tool/failing",
    "output/unparseable",
    "answer/unusable",
    fits=offers_tools,
)
def closing_tag_stripped(config: Config, random: Random) -> dict[str, Any]:
    return edited(config, {"rollout.stop": ["</larger>"]})


# Healthy


async def _awaited(pair: str) -> str:
    """Larger of two."""
    return larger(pair)


awaited = tool(_awaited, name="larger")


@lookalike("tool that is awaited", offers_tools)
def healthy_awaited(config: Config, random: Random) -> dict[str, Any]:
    return with_tools(config, "faults.tools_reports:awaited")


@lru_cache(maxsize=1024)
def _result(pair: str) -> str:
    return larger(pair)


def _kept(pair: str) -> str:
    """Larger of two."""
    return _result(pair)


kept = tool(_kept, name="larger")


@lookalike("tool that keeps its results by their arguments", offers_tools)
def healthy_kept(config: Config, random: Random) -> dict[str, Any]:
    return with_tools(config, "faults.tools_reports:kept")
