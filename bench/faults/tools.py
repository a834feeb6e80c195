"""Environments of several turns (`task.name`) whose tool fails, says nothing, says too much, or never ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from faults.base import edited, lookalike, operator, option
from faults.rewards import chance_of, closeness, prompt_of
from faults.scorers import is_scored_natively
from keel.base.types import Problem, Reward
from keel.envs import Episode, Task, TaskWrapper
from keel.envs.registry import build_task

Config = Mapping[str, Any]
_calls = itertools.count()


def has_one_turn(config: Config) -> bool:
    """Whether the task is one of one turn with plain prompts, around which a tool may be put."""
    plain = (
        option(config, "rollout.engine", "native") == "native" and option(config, "model.scorer", "native") == "native"
    )
    return plain and option(config, "task.name") == "arithmetic" and option(config, "rollout.max_turns", 1) == 1


def with_tool(config: Config, tool: str, changes: Mapping[str, Any] = {}, **parameters: Any) -> dict[str, Any]:
    """The configuration with a tool between the question and the answer."""
    task = {"name": "faults.tools:lookup", "task": dict(config["task"]), "tool": tool, **parameters}
    rewards = [{"name": "task"}]
    turns = {"rollout.max_turns": 2, "rollout.max_completion_length": 160}
    return edited(config, {"task": task, "rewards": rewards, **turns, **changes})


def tool_fault(
    name: str,
    breaks: str,
    *codes: str,
    tool: str,
    also: Mapping[str, Sequence[Any]] = {},
    fits: Callable[[Any], bool] = has_one_turn,
    **parameters: Sequence[Any],
) -> None:
    def apply(config: Config, random: Random) -> dict[str, Any]:
        drawn = {parameter: random.choice(values) for parameter, values in parameters.items()}
        return with_tool(config, tool, {path: random.choice(values) for path, values in also.items()}, **drawn)

    operator(name, breaks, *codes, fits=fits)(apply)


class Lookup(TaskWrapper):
    """Another task whose first turn is a call of a tool: it repeats the question, and the second turn is the answer."""

    name = "lookup"

    def __init__(self, inner: Task, tool: str, strength: float) -> None:
        self.inner, self.tool, self.strength = inner, tool, strength

    def start(self, problem: Problem) -> Episode:
        return LookupEpisode(problem, self.tool, self.strength)

    def gold_turns(self, problem: Problem) -> list[str]:
        return [self.gold(problem), self.gold(problem)]


def lookup(task: Mapping[str, Any], tool: str = "right", strength: float = 0.0) -> Lookup:
    parameters = {key: value for key, value in task.items() if key != "name"}
    return Lookup(build_task(str(task["name"]), **parameters), tool, strength)


class LookupEpisode(Episode):
    def __init__(self, problem: Problem, tool: str, strength: float) -> None:
        self.problem, self.tool, self.strength = problem, tool, strength
        self.turns, self.errors = list[str](), 0

    def step(self, text: str) -> str | None:
        self.turns.append(text)
        if (len(self.turns) > 1 and self.tool != "endless") or self.tool == "ending at once":
            return None
        return self.reply(prompt_of(self.problem), text)

    def reply(self, question: str, text: str) -> str:
        if self.tool == "raising":
            raise ConnectionError("the search service does not answer")
        if self.tool == "empty":
            return "\n"
        if self.tool == "silently failing":
            return "error: timed out\n"
        if self.tool == "behind a gateway":
            return "<html><title>502 Bad Gateway</title><center>nginx</center></html>\n"
        if self.tool == "returning nothing":
            return "None\n"
        if self.tool == "returning a number":
            return len(question)  # type: ignore[return-value]
        if self.tool == "rationed" and next(_calls) >= self.strength:
            self.errors += 1
            return "error: 429 Too Many Requests\n"
        if self.tool == "long":
            return int(self.strength) * question
        if self.tool == "failing" and chance_of(f"{self.problem.key} {text} {len(self.turns)}") < self.strength:
            self.errors += 1
            return "error: failed\n"
        return question

    def reward(self) -> Reward:
        answered = len(self.turns) > 1
        return closeness(self.problem, self.turns[-1]) if answered else Reward(0.0, parsed=False)

    def counts(self) -> dict[str, float]:
        calls = float(len(self.turns) if self.tool == "endless" else min(1, len(self.turns)))
        return {"tool/calls": calls, "tool/errors": float(self.errors), "tool/failed": float(self.errors)}


tool_fault("tool/always-fails", "every call is answered with an error", "tool/failing", tool="failing", strength=(1.0,))
tool_fault(
    "tool/mostly-fails", "most calls are answered with an error", "tool/failing", tool="failing", strength=(0.7, 0.85)
)
tool_fault(
    "tool/error-called-success",
    "every call is answered with the text of an error, and none is counted",
    "tool/failing",
    tool="silently failing",
)
tool_fault("tool/empty", "every call is answered with nothing", "tool/failing", tool="empty")
tool_fault(
    "tool/too-long",
    "results are so long that no room is left for the answer",
    "output/truncated",
    tool="long",
    strength=(30, 60),
)
tool_fault(
    "tool/one-turn-too-few",
    "the answer comes in the second turn and one is allowed",
    "output/truncated",
    "answer/unusable",
    tool="right",
    also={"rollout.max_turns": (1,)},
)
tool_fault(
    "tool/never-ends",
    "the environment goes on asking until the turns are used up",
    "output/truncated",
    tool="endless",
    also={"rollout.max_turns": (3, 4), "rollout.max_completion_length": (200,)},
)
tool_fault("tool/raises", "the environment raises where it should answer", "reward/failed", tool="raising")
tool_fault(
    "tool/result-hidden",
    "the training pass does not see what the tool said",
    "mask/attention",
    tool="right",
    also={"model.scorer": ("faults.scorers:tools_hidden",)},
    fits=lambda config: has_one_turn(config) and is_scored_natively(config),
)

tool_fault(
    "tool/gateway-page",
    "every call is answered with a server's page of an error, and none is counted",
    "tool/failing",
    tool="behind a gateway",
)
tool_fault(
    "tool/returns-none",
    "the tool forgets to return its result: every call is answered with the word None",
    "tool/failing",
    tool="returning nothing",
)
tool_fault(
    "tool/quota",
    "the first calls are answered, and all later ones with an error of too many requests",
    "tool/failing",
    tool="rationed",
    strength=(3, 8),
)
tool_fault(
    "tool/ends-at-once",
    "the environment ends with the first call, so that no answer is ever heard",
    "reward/gold",
    "output/unparseable",
    tool="ending at once",
)
tool_fault(
    "tool/reply-is-a-number",
    "the environment answers with a number where a text should be",
    "reward/failed",
    tool="returning a number",
)
tool_fault(
    "tool/earlier-turn-stripped",
    "the second turn is sampled without what the model wrote in the first, and trained with it",
    "sampler/other-prompt",
    "sampler/mismatch",
    tool="right",
    also={"rollout.engine": ({"name": "faults.engines_serving:EarlierTurnStripped"},)},
)
tool_fault(
    "tool/reply-cut-in-the-engine",
    "the second turn is sampled without the end of the tool's reply, and trained with it",
    "sampler/other-prompt",
    tool="right",
    also={"rollout.engine": ({"name": "faults.engines_serving:ReplyLost"},)},
)


# Calls that a model has learned to make


def offers_tools(config: Config) -> bool:
    return option(config, "task.name") == "tools"


@operator(
    "tool/call-cut-by-stop",
    "a stop text cuts every call before it is made",
    "output/unparseable",
    "answer/unusable",
    fits=offers_tools,
)
def call_cut_by_stop(config: Config, random: Random) -> dict[str, Any]:
    return edited(config, {"rollout.stop": ["<larger>"]})


@lookalike("environment of two turns", lambda c: has_one_turn(c) and option(c, "task.format", "plain") == "plain")
def healthy_lookup(config: Config, random: Random) -> dict[str, Any]:
    return with_tool(config, "right")


@lookalike("tool that fails now and then", has_one_turn)
def healthy_flaky_tool(config: Config, random: Random) -> dict[str, Any]:
    return with_tool(config, "failing", strength=0.05)
