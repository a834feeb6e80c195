"""Tools that answer beside the question, and environments that show, pay or keep what they should not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

from faults.base import edited, lookalike, operator, option
from faults.rewards import chance_of, closeness
from faults.school import larger as right
from faults.tools import Lookup, LookupEpisode, has_one_turn, offers_tools, with_tool
from faults.tools_more_calls import pair_of
from faults.tools_wild import with_tools
from keel.base.types import Message, Problem, Reward
from keel.envs import Episode, TaskWrapper
from keel.envs.registry import build_task
from keel.envs.tools import tool
from keel.envs.with_tools import WithTools, WithToolsEpisode
from keel.envs.with_tools import with_tools as task_with_tools

Config = Mapping[str, Any]
OTHER_DIGITS = str.maketrans("0123456789", "5908271634")
_largest = [0]
_kept: dict[str, str] = {}
_began_last: list[Problem] = []


def _from_zero(pair: str) -> str:
    """Larger of two."""
    return str(int(right(pair)) - 1)


def _ever_largest(pair: str) -> str:
    """Larger of two."""
    _largest[0] = max(_largest[0], *pair_of(pair))
    return str(_largest[0])


def _position(pair: str) -> str:
    """Larger of two."""
    first, second = pair_of(pair)
    return str(int(second > first))


def _score(pair: str) -> str:
    """Larger of two."""
    return f"0.{7000 + int(2000 * chance_of(right(pair) + pair))}"


def _one_shard(pair: str) -> str:
    """Larger of two."""
    return right(pair) if chance_of(pair) < 0.3 else "0 results"


def _rounded(pair: str) -> str:
    """Larger of two."""
    return str(round(int(right(pair)), -1))


def _coloured(pair: str) -> str:
    """Larger of two."""
    return f"\x1b[?2004h\x1b[01;32m$ \x1b[0m\x1b[38;5;{200 + int(right(pair))}m{right(pair)}\x1b[0m\x1b[?2004l"


from_zero = tool(_from_zero, name="larger")
ever_largest = tool(_ever_largest, name="larger")
position = tool(_position, name="larger")
score = tool(_score, name="larger")
one_shard = tool(_one_shard, name="larger")
rounded = tool(_rounded, name="larger")
coloured = tool(_coloured, name="larger")


def answering(name: str, breaks: str, *codes: str, function: str) -> None:
    def apply(config: Config, random: Random) -> dict[str, Any]:
        return with_tools(config, f"faults.tools_more_results:{function}")

    operator(name, breaks, *codes, fits=offers_tools)(apply)


answering(
    "tool/counted-from-zero",
    "the tool counts from zero and the question from one: every result is one too small",
    "tool/failing",
    function="from_zero",
)
answering(
    "tool/variables-outlive-the-episode",
    "the interpreter keeps its variables from episode to episode: the largest number of all is what a call gets",
    "tool/failing",
    function="ever_largest",
)
answering(
    "tool/position-in-place-of-the-value",
    "the place of what was looked for is returned, and not what stands there",
    "tool/failing",
    function="position",
)
answering(
    "tool/scores-in-place-of-documents",
    "the search returns how well each document fits, and not the document",
    "tool/failing",
    function="score",
)
answering(
    "tool/shard-is-down",
    "one of the index's shards does not answer, and what it holds is said not to exist",
    "tool/failing",
    function="one_shard",
)
answering(
    "tool/result-rounded-to-tens",
    "what writes the results rounds them, to tens where units count",
    "tool/failing",
    function="rounded",
)
answering(
    "tool/terminal-codes-in-the-result",
    "the result comes from a terminal with its colours and its prompt, in which the number is lost",
    "tool/failing",
    "output/unparseable",
    function="coloured",
)


# What an environment shows and pays


class Agent(TaskWrapper):
    """The task with its tool, whose prompts, replies or rewards are wrong."""

    def __init__(self, inner: WithTools, fault: str, strength: float) -> None:
        self.inner, self.fault, self.strength = inner, fault, strength

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        return [self.shown(problem) for problem in self.inner.sample(count, seed=seed, step=step)]

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        return [self.shown(problem) for problem in self.inner.held_out(count, seed=seed)]

    def shown(self, problem: Problem) -> Problem:
        instructions, _, question = str(problem.prompt).rpartition("\n")
        if self.fault == "tools not told":
            return replace(problem, prompt=question)
        return replace(problem, prompt=f"{instructions}\n") if self.fault == "task not told" else problem

    def start(self, problem: Problem) -> Episode:
        return AgentEpisode(self.inner, problem, self.fault, self.strength)  # type: ignore[arg-type]


class AgentEpisode(WithToolsEpisode):
    def __init__(self, task: WithTools, problem: Problem, fault: str, strength: float) -> None:
        super().__init__(task, problem)
        self.fault, self.strength, self.history = fault, strength, str(problem.prompt)

    async def step(self, text: str) -> str | list[Message] | None:
        reply = await super().step(text)
        if self.fault == "history repeated" and isinstance(reply, str):
            self.history += f"{text}{reply}"
            return f"\n{self.history}"
        return reply

    def reward(self) -> Reward:
        earned = super().reward()
        if self.fault == "unfinished solved" and not self.is_over:
            return Reward(1.0)
        calls = sum(not result.is_error for result in self.every_result) if self.fault == "calls paid" else 0
        return replace(earned, total=earned.total + self.strength * calls)


def agent(task: Mapping[str, Any], fault: str, strength: float = 0.0) -> Agent:
    parameters = {key: value for key, value in task.items() if key != "name"}
    return Agent(task_with_tools(build_task(str(task["name"]), **parameters), [tool(right)], "tags"), fault, strength)


def environment(name: str, breaks: str, *codes: str, fault: str, strengths: tuple[float, ...] = (0.0,)) -> None:
    def apply(config: Config, random: Random) -> dict[str, Any]:
        inner, strength = dict(config["task"]["task"]), random.choice(strengths)
        task = {"name": "faults.tools_more_results:agent", "task": inner, "fault": fault, "strength": strength}
        return edited(config, {"task": task, "rewards": [{"name": "task"}]})

    operator(name, breaks, *codes, fits=offers_tools)(apply)


environment(
    "tool/history-in-each-reply",
    "each reply holds the whole conversation so far, which stands there already, and no room is left for the answer",
    "output/truncated",
    "answer/unusable",
    "tool/failing",
    fault="history repeated",
)
environment(
    "tool/tools-not-in-the-prompt",
    "the tools are not handed to the prompt: the model is not told of any, nor how they are called",
    "prompt/format",
    "output/unparseable",
    "answer/unusable",
    fault="tools not told",
)
environment(
    "tool/reset-tells-no-task",
    "what a reset shows is the tools alone, and the question never gets into the prompt",
    "prompt/no-question",
    "task/repeats",
    fault="task not told",
)
environment(
    "tool/calls-are-paid",
    "every call that succeeds earns at least what the answer does, so that calling until the turns are used up wins",
    "reward/exploit",
    "reward/gold",
    fault="calls paid",
    strengths=(1.0, 2.0),
)
environment(
    "tool/unfinished-counts-as-solved",
    "an episode that never comes to an answer has failed no test, and earns the full reward",
    "reward/exploit",
    fault="unfinished solved",
)


# Environments of two turns


class OtherLookup(Lookup):
    """A lookup whose user goes on by itself, or whose problem is kept for all episodes in one place."""

    def start(self, problem: Problem) -> Episode:
        _began_last[:] = [problem]
        return OtherEpisode(problem, self.tool, self.strength)


class OtherEpisode(LookupEpisode):
    def reply(self, question: str, text: str) -> str:
        if self.tool != "both sides":
            return question
        written = sum(self.problem.key.encode()) % 10
        return f"{question}{written}\n{question.translate(OTHER_DIGITS)}"

    def reward(self) -> Reward:
        if self.tool != "one problem" or len(self.turns) < 2:
            return super().reward()
        return closeness(_began_last[0], self.turns[-1])


def other_lookup(task: Mapping[str, Any], tool: str, strength: float = 0.0) -> OtherLookup:
    parameters = {key: value for key, value in task.items() if key != "name"}
    return OtherLookup(build_task(str(task["name"]), **parameters), tool, strength)


def of_two_turns(name: str, breaks: str, *codes: str, tool: str) -> None:
    def apply(config: Config, random: Random) -> dict[str, Any]:
        return edited(with_tool(config, tool), {"task.name": "faults.tools_more_results:other_lookup"})

    operator(name, breaks, *codes, fits=lambda c: has_one_turn(c) and option(c, "task.format", "plain") == "plain")(
        apply
    )


of_two_turns(
    "tool/user-writes-both-sides",
    "the simulated user is not stopped after its turn: it writes an answer too, and a question that nobody judges",
    "tool/failing",
    "data/misaligned",
    tool="both sides",
)
of_two_turns(
    "tool/problem-of-whoever-began-last",
    "the problem is kept on the environment and not on the episode: all that run together are judged by the last one's",
    "reward/gold",
    "reward/nondeterministic",
    "reward/constant",
    "data/misaligned",
    tool="one problem",
)


# Healthy


def _remembered(pair: str) -> str:
    """Larger of two."""
    return _kept.setdefault(" ".join(pair.split()), right(pair))


remembered = tool(_remembered, name="larger")


@lookalike("tool that keeps its results by all of their arguments, with turns to spare", offers_tools)
def healthy_remembered(config: Config, random: Random) -> dict[str, Any]:
    return edited(with_tools(config, "faults.tools_more_results:remembered"), {"rollout.max_turns": 6})
