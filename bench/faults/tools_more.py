"""Environments that agents are trained in: users who hang up, graders that fail, state that episodes share."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from random import Random, SystemRandom
from typing import Any

from faults.base import edited, lookalike, operator, option
from faults.rewards import chance_of, closeness, prompt_of
from faults.tools import Lookup, LookupEpisode, has_one_turn, with_tool
from keel.base.types import Problem, Reward
from keel.envs import Episode
from keel.envs.registry import build_task

Config = Mapping[str, Any]
_calls, _steps = itertools.count(), itertools.count()
_seen: set[str] = set()
_first: list[Problem] = []
_last = [""]
_session = {"open": True}
_free: list[int] = [0, 1, 2, 3]


class MoreLookup(Lookup):
    """A lookup whose user, session or state is not this episode's own."""

    def start(self, problem: Problem) -> Episode:
        return MoreEpisode(problem, self.tool, self.strength)


class MoreEpisode(LookupEpisode):
    def __init__(self, problem: Problem, tool: str, strength: float) -> None:
        super().__init__(problem, tool, strength)
        _first.append(problem)
        self.judged = problem
        if tool == "always the first":
            self.judged = _first[0]
        elif tool == "hidden answer":
            self.judged = replace(problem, answer=str(SystemRandom().randrange(10)))

    def step(self, text: str) -> str | None:
        self.turns.append(text)
        _last[0] = text
        hangs_up = self.tool == "hanging up" and chance_of(f"{self.problem.key} {text}") < self.strength
        if hangs_up or (self.tool == "one budget" and next(_steps) >= self.strength):
            return None
        if len(self.turns) > 1:
            _session["open"] = False
            return None
        return self.told(prompt_of(self.judged))

    def told(self, question: str) -> str:
        if self.tool == "one session" and not _session["open"]:
            return "Error: target page, context or browser has been closed\n"
        if self.tool == "new results only":
            known = question in _seen
            _seen.add(question)
            return "No new results.\n" if known else question
        if self.tool == "slowing down" and next(_calls) % 3:
            return "You are sending requests too quickly. Please slow down.\n"
        if self.tool == "permission":
            return "Allow this command to run? [y/N] "
        if self.tool == "pool":
            session = _free.pop() if _free else -1
            if session >= 0:
                _free.append(session)
        return question

    def reward(self) -> Reward:
        if len(self.turns) < 2:
            return Reward(0.0, parsed=False)
        if self.tool == "grader failing" and SystemRandom().random() < self.strength:
            return Reward(0.0)
        return closeness(self.judged, _last[0] if self.tool == "one answer" else self.turns[-1])


def more_lookup(task: Mapping[str, Any], tool: str, strength: float = 0.0) -> MoreLookup:
    parameters = {key: value for key, value in task.items() if key != "name"}
    return MoreLookup(build_task(str(task["name"]), **parameters), tool, strength)


def with_more(config: Config, tool: str, strength: float = 0.0) -> dict[str, Any]:
    return edited(with_tool(config, tool, strength=strength), {"task.name": "faults.tools_more:more_lookup"})


def environment(
    name: str,
    breaks: str,
    *codes: str,
    tool: str,
    strengths: tuple[float, ...] = (0.0,),
) -> None:
    def apply(config: Config, random: Random) -> dict[str, Any]:
        return with_more(config, tool, random.choice(strengths))

    operator(name, breaks, *codes, fits=has_one_turn)(apply)


# Users and turns

environment(
    "tool/user-hangs-up-before-the-answer",
    "the simulated user ends most conversations after the first turn, before the answer",
    "answer/unusable",
    "output/unparseable",
    "reward/constant",
    tool="hanging up",
    strengths=(0.85, 0.95),
)
environment(
    "tool/turn-budget-of-all-episodes",
    "the turns of all episodes are counted together, and once they are spent each ends at its first",
    "answer/unusable",
    "output/unparseable",
    "reward/constant",
    tool="one budget",
    strengths=(12, 20),
)

# State that episodes share

environment(
    "tool/answer-of-whoever-was-last",
    "the final answer is kept for all episodes in one place: each is judged by the last one written",
    "reward/constant",
    "reward/nondeterministic",
    tool="one answer",
)
environment(
    "tool/closing-one-closes-all",
    "all episodes use one browser, and the first that ends closes it",
    "tool/failing",
    tool="one session",
)
environment(
    "tool/seen-results-left-out",
    "what any episode has been shown is left out of later results",
    "tool/failing",
    tool="new results only",
)
environment(
    "tool/every-episode-is-the-first",
    "each reset takes the same seed: every episode poses and judges the first one's question",
    "tool/failing",
    "reward/gold",
    "task/repeats",
    tool="always the first",
)
environment(
    "tool/each-episode-hides-another-answer",
    "each episode draws the answer that it judges by, so that those of a group are not of one problem",
    "reward/nondeterministic",
    "reward/gold",
    tool="hidden answer",
)

environment(
    "tool/grader-failure-is-zero",
    "the sandbox that runs the tests fails often, and each failure is scored as a wrong answer",
    "reward/nondeterministic",
    "reward/gold",
    tool="grader failing",
    strengths=(0.5, 0.7),
)

# Services

environment(
    "tool/slowed-down",
    "two calls of three are told to slow down, and none counts as an error",
    "tool/failing",
    tool="slowing down",
)
environment(
    "tool/asks-for-permission",
    "each call is answered with a question whether it may run",
    "tool/failing",
    tool="permission",
)


# Healthy


@lookalike(
    "environment that lends sessions from a pool",
    lambda c: has_one_turn(c) and option(c, "task.format", "plain") == "plain",
)
def healthy_pool(config: Config, random: Random) -> dict[str, Any]:
    return with_more(config, "pool")
