"""Tools as models call them: results kept, shifted, scaled or cut, and episodes that the environment reads wrongly."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping
from random import Random
from typing import Any

from faults.base import edited, lookalike, operator
from faults.school import larger as right
from faults.tools import offers_tools
from faults.tools_wild import with_tools
from keel.base.types import Message, Problem, Reward
from keel.envs import Episode, TaskWrapper
from keel.envs.registry import build_task
from keel.envs.tools import tool
from keel.envs.with_tools import WithTools, WithToolsEpisode
from keel.envs.with_tools import with_tools as task_with_tools

Config = Mapping[str, Any]


def pair_of(pair: str) -> tuple[int, int]:
    first, second = map(int, pair.split())
    return first, second


_results: dict[int, str] = {}
_rows = [(a, b) for a in range(10) for b in range(10)]
Random(7).shuffle(_rows)


def _cached(pair: str) -> str:
    """Larger of two."""
    return _results.setdefault(pair_of(pair)[0], right(pair))


def _shifted(pair: str) -> str:
    """Larger of two."""
    row = _rows.index(pair_of(pair)) if pair_of(pair) in _rows else 0
    return str(max(_rows[(row + 1) % len(_rows)]))


def _hundredths(pair: str) -> str:
    """Larger of two."""
    return str(100 * int(right(pair)))


def _encoded(pair: str) -> str:
    """Larger of two."""
    return base64.b64encode(right(pair).encode()).decode()


def _other_digits(pair: str) -> str:
    """Larger of two."""
    return right(pair).translate({ord("0") + digit: chr(0x0660 + digit) for digit in range(10)})


def _warning(pair: str) -> str:
    """Larger of two."""
    return f"FutureWarning: pair will be a list soon\n{right(pair)}"[:32]


def _first_word(pair: str) -> str:
    """Larger of two."""
    return right(pair.split(" ")[0])


def _other_tool(pair: str) -> str:
    """Larger of two."""
    return str(min(map(int, pair.split())))


def _with_manual(pair: str) -> str:
    """Larger of two numbers. Use this tool whenever the user wants two numbers to be compared and the larger one to be
    told. Do not use it for more than two numbers, for dates, for versions of software or for amounts of money in
    different currencies. Give both numbers in one text with a blank between them, without signs, units or separators
    of thousands. The result is a text that holds the larger number alone. If the numbers are equal, either is told.
    Results may be kept for later calls. Errors are told as text that begins with the word error.
    """
    return right(pair)


cached = tool(_cached, name="larger")
shifted = tool(_shifted, name="larger")
hundredths = tool(_hundredths, name="larger")
encoded = tool(_encoded, name="larger")
other_digits = tool(_other_digits, name="larger")
warning = tool(_warning, name="larger")
first_word = tool(_first_word, name="larger")
other_tool = tool(_other_tool, name="larger")
with_manual = tool(_with_manual, name="larger")


def answering(name: str, breaks: str, *codes: str, function: str) -> None:
    def apply(config: Config, random: Random) -> dict[str, Any]:
        return with_tools(config, f"faults.tools_more_calls:{function}")

    operator(name, breaks, *codes, fits=offers_tools)(apply)


answering(
    "tool/cache-key-too-short",
    "results are kept by the first operand alone, so that most calls get what another one asked",
    "tool/failing",
    function="cached",
)
answering(
    "tool/index-shifted-by-a-row",
    "the index is one row off its documents: each call gets the next row's",
    "tool/failing",
    function="shifted",
)
answering(
    "tool/result-in-hundredths",
    "results are in hundredths of the unit asked for",
    "tool/failing",
    function="hundredths",
)
answering("tool/result-in-base64", "results come as bytes and are shown in base64", "tool/failing", function="encoded")
answering(
    "tool/digits-of-another-script",
    "results are written in the digits of the server's locale, which the model does not know",
    "tool/failing",
    function="other_digits",
)
answering(
    "tool/warnings-push-the-result-out",
    "a warning is printed before each result, and the output is cut in silence before the result",
    "tool/failing",
    function="warning",
)
answering(
    "tool/arguments-end-at-the-first-blank",
    "the parser hands on an argument up to its first blank",
    "tool/failing",
    function="first_word",
)
answering(
    "tool/dispatched-to-another-tool",
    "calls of one tool are run by another, which does the contrary",
    "tool/failing",
    function="other_tool",
)
answering(
    "tool/manual-in-the-prompt",
    "the tool's description is a manual that stands before every question",
    "prompt/format",
    "output/unparseable",
    function="with_manual",
)


# How an environment reads its episode


class Agent(TaskWrapper):
    """The task with its tool, whose episodes are read wrongly."""

    def __init__(self, inner: WithTools, fault: str) -> None:
        self.inner, self.fault = inner, fault

    def start(self, problem: Problem) -> Episode:
        return AgentEpisode(self.inner, problem, self.fault)  # type: ignore[arg-type]


class AgentEpisode(WithToolsEpisode):
    def __init__(self, task: WithTools, problem: Problem, fault: str) -> None:
        super().__init__(task, problem)
        self.fault = fault

    async def step(self, text: str) -> str | list[Message] | None:
        if self.fault == "prompt parsed":
            return await super().step(f"{self.problem.prompt}{text}")
        reply = await super().step(text)
        if self.fault == "calls not seen":
            self.is_over = True
            return None
        return reply

    def reward(self) -> Reward:
        if self.fault == "last turn lost":
            return self.task.reward(self.problem, [self.turns[-2] if len(self.turns) > 1 else ""])
        results = [result.content for result in self.every_result if not result.is_error]
        if self.fault == "results judged" and results:
            return self.task.reward(self.problem, [results[-1]])
        return super().reward()


def agent(task: Mapping[str, Any], fault: str) -> Agent:
    parameters = {key: value for key, value in task.items() if key != "name"}
    return Agent(task_with_tools(build_task(str(task["name"]), **parameters), [tool(right)], "tags"), fault)


def misread(name: str, breaks: str, *codes: str, fault: str) -> None:
    def apply(config: Config, random: Random) -> dict[str, Any]:
        task = {"name": "faults.tools_more_calls:agent", "task": dict(config["task"]["task"]), "fault": fault}
        return edited(config, {"task": task, "rewards": [{"name": "task"}]})

    operator(name, breaks, *codes, fits=offers_tools)(apply)


misread(
    "tool/calls-of-the-prompt-are-made",
    "calls are looked for in the prompt too, where the instructions show one, so that no turn is an answer",
    "answer/unusable",
    "output/unparseable",
    "reward/constant",
    "reward/gold",
    "tool/failing",
    fault="prompt parsed",
)
misread(
    "tool/calls-not-seen",
    "messages are of another type than the environment looks for: no call is run, and it is taken for the answer",
    "output/unparseable",
    "answer/unusable",
    "reward/constant",
    fault="calls not seen",
)
misread(
    "tool/last-turn-not-counted",
    "the state that is judged is the one before the last turn, so that the call is judged and not the answer",
    "reward/gold",
    "output/unparseable",
    "reward/constant",
    fault="last turn lost",
)
misread(
    "tool/result-judged-as-the-answer",
    "the answer is looked for in the tool's messages too, and its result is paid for",
    "reward/exploit",
    "reward/constant",
    fault="results judged",
)


@operator(
    "tool/turn-cut-inside-the-call",
    "the limit of a turn is shorter than a call, which is cut before its end",
    "output/truncated",
    "output/unparseable",
    "answer/unusable",
    fits=offers_tools,
)
def turn_cut_inside_the_call(config: Config, random: Random) -> dict[str, Any]:
    return edited(config, {"rollout.max_turn_length": random.choice((10, 12))})


# Healthy


def _unhurried(pair: str) -> str:
    """Larger of two."""
    time.sleep(0.01)
    return right(pair)


def _strict(pair: str) -> str:
    """Larger of two."""
    first, second = pair.split()
    if not (first.isdigit() and second.isdigit()):
        raise ValueError("two numbers are needed, with a blank between them")
    return str(max(int(first), int(second)))


unhurried = tool(_unhurried, name="larger", timeout_s=30)
strict = tool(_strict, name="larger")


@lookalike("tool that takes its time", offers_tools)
def healthy_unhurried(config: Config, random: Random) -> dict[str, Any]:
    return with_tools(config, "faults.tools_more_calls:unhurried")


@lookalike("tool that refuses what is no pair of numbers", offers_tools)
def healthy_strict(config: Config, random: Random) -> dict[str, Any]:
    return with_tools(config, "faults.tools_more_calls:strict")
