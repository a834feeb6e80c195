"""Environments with several turns, correct and broken. The first turn is a call, the second the answer."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from random import Random
from typing import Any, ClassVar

from doctor.faults import Odd
from doctor.schooled import nearness, schooled_model
from keel.base.types import Problem, Reward
from keel.envs import Episode, Task
from keel.envs.toolbox import Toolbox, ToolEpisode
from keel.envs.tools import tool
from keel.models.tiny import CHAT_TEMPLATE


class Consulting(Odd):
    """The schooled task with a tool that repeats the problem. `kind` selects the fault."""

    last: ClassVar[str] = ""  # what the call before returned
    asked: ClassVar[list[str]] = []  # all that was ever asked
    said: ClassVar[str] = ""  # the last turn of any episode
    dice: ClassVar[Random] = Random(0)
    open: ClassVar[list[Consultation]] = []  # episodes that are not over

    def __init__(self, kind: str) -> None:
        super().__init__(kind, kind)

    def start(self, problem: Problem) -> Episode:
        return Consultation(self.kind, problem)

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        return Task.reward(self, problem, turns)


class Consultation(Episode):
    def __init__(self, kind: str, problem: Problem) -> None:
        self.kind, self.problem, self.turns = kind, problem, list[str]()
        Consulting.open.append(self)

    def close(self) -> None:
        Consulting.open.remove(self)

    def of_another(self) -> str:
        """The problem of another open episode, or its own if there is none."""
        others = [other.problem for other in Consulting.open if other.problem.key != self.problem.key]
        return str((others or [self.problem])[-1].prompt)

    def step(self, text: str) -> str | None:
        self.turns.append(text)
        Consulting.said = text
        if len(self.turns) > 1 and self.kind not in ("endless", "interview"):
            return None
        prompt = str(self.problem.prompt)
        before, Consulting.last = Consulting.last, prompt
        Consulting.asked.append(prompt)
        return {
            "failing": "error: 503 from the index\n",
            "empty": "\n<result>\n\n</result>\n",
            "late": before,
            "swapped": self.of_another(),
            "interview": f"{text}? {prompt}",
            "again": "Are you sure?\n",
            "lines": "\n".join(prompt),
            "constant": "Result: 7\n",
            "wrong": f"Result: {int(text.strip() == self.problem.answer)} of 5 tests\n",
            "done": "Result: saved\n",
            "random": f"Result: {Consulting.dice.randrange(10)}\n",
            "clocked": f"Result: {prompt} in {Consulting.dice.randrange(10_000)} ms\n",
            "piled up": "\n".join(Consulting.asked),
            "told": f"{prompt} (expected: {self.problem.answer})",
            "found": f"{text} is {'' if text.strip() == self.problem.answer else 'not '}the answer",
        }.get(self.kind, prompt)

    def reward(self) -> Reward:
        return nearness(self.problem, Consulting.said if self.kind == "judged by the last" else self.turns[-1])


class Calling(ToolEpisode):
    """Episodes that call the tool `larger`. `kind` selects the environment's fault."""

    def __init__(self, kind: str, problem: Problem) -> None:
        super().__init__(Toolbox(lambda problem: [tool(larger)], "tags"), problem)
        self.kind = kind

    async def step(self, text: str) -> Any:
        if self.kind == "arguments turned":
            text = re.sub(r"(\d) (\d)", r"\2 \1", text)
        if self.kind == "of another call":
            text = re.sub(r"(\d) (\d)", lambda pair: "{} {}".format(*_next(pair)), text)
        reply = await super().step(text)
        return f"{str(reply)[:12]}</result>" if self.kind == "result cut" else reply

    def reward(self) -> Reward:
        return nearness(self.problem, self.turns[-1])


def _next(pair: re.Match[str]) -> tuple[int, int]:
    """The pair of the next of four problems."""
    number = (int(pair[1]) + 1) % 4
    return number, number + 5


def of_the_episode(problem: Problem, text: str, *, turns: Any) -> float:
    """A reward that reads the episode, as the documentation describes."""
    return 0.5 + len(turns.episode.turns)


def larger(pair: str) -> str:
    """Larger of two."""
    return f"of {pair} it is {max(map(int, pair.split()))}"


def _rewriting(reply: str) -> tuple[Any, Any]:
    """A template that rewrites replies."""
    model, shared = schooled_model()
    tokenizer = copy.deepcopy(shared)
    content = f"(message['content'] if loop.first or message['role'] == 'assistant' else {reply})"
    tokenizer.chat_template = CHAT_TEMPLATE.replace("message['content']", content)
    return model, tokenizer


def forgetful() -> tuple[Any, Any]:
    """A template that keeps only the first question."""
    return _rewriting("''")


def quoting() -> tuple[Any, Any]:
    """A template that writes replies as JSON, as that of Llama 3.1 does."""
    return _rewriting("(message['content'] | tojson)")


def sound() -> Consulting:
    return Consulting("sound")


def failing() -> Consulting:
    return Consulting("failing")


def empty() -> Consulting:
    return Consulting("empty")


def late() -> Consulting:
    return Consulting("late")


def swapped() -> Consulting:
    return Consulting("swapped")


def endless() -> Consulting:
    return Consulting("endless")


def interview() -> Consulting:
    return Consulting("interview")


def again() -> Consulting:
    return Consulting("again")


def lines() -> Consulting:
    return Consulting("lines")


def of_kind(kind: str) -> Consulting:
    return Consulting(kind)
