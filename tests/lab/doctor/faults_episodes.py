"""Environments of several turns, sound and broken: the first turn is a call, the second the answer."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

from keel.base.types import Problem, Reward
from keel.envs import Episode
from keel.models.tiny import CHAT_TEMPLATE
from lab.doctor.faults import Odd
from lab.doctor.schooled import nearness, schooled_model


class Consulting(Odd):
    """The schooled task behind a tool that says the problem again; `kind` is what is wrong with it."""

    last: ClassVar[str] = ""  # what the call before returned
    open: ClassVar[list[Consultation]] = []  # episodes that are not over

    def __init__(self, kind: str) -> None:
        super().__init__(kind, kind)

    def start(self, problem: Problem) -> Episode:
        return Consultation(self.kind, problem)


class Consultation(Episode):
    def __init__(self, kind: str, problem: Problem) -> None:
        self.kind, self.problem, self.turns = kind, problem, list[str]()
        Consulting.open.append(self)

    def close(self) -> None:
        Consulting.open.remove(self)

    def of_another(self) -> str:
        """What another open episode asks; where there is none, this one."""
        others = [other.problem for other in Consulting.open if other.problem.key != self.problem.key]
        return str((others or [self.problem])[-1].prompt)

    def step(self, text: str) -> str | None:
        self.turns.append(text)
        if len(self.turns) > 1 and self.kind not in ("endless", "interview"):
            return None
        prompt = str(self.problem.prompt)
        before, Consulting.last = Consulting.last, prompt
        return {
            "failing": "error: 503 from the index\n",
            "empty": "\n<result>\n\n</result>\n",
            "late": before,
            "swapped": self.of_another(),
            "interview": f"{text}? {prompt}",
            "again": "Are you sure?\n",
            "lines": "\n".join(prompt),
        }.get(self.kind, prompt)

    def reward(self) -> Reward:
        return nearness(self.problem, self.turns[-1])


def _rewriting(reply: str) -> tuple[Any, Any]:
    """A template that writes replies in a way of its own."""
    model, shared = schooled_model()
    tokenizer = copy.deepcopy(shared)
    content = f"(message['content'] if loop.first or message['role'] == 'assistant' else {reply})"
    tokenizer.chat_template = CHAT_TEMPLATE.replace("message['content']", content)
    return model, tokenizer


def forgetful() -> tuple[Any, Any]:
    """One that writes the first question alone."""
    return _rewriting("''")


def quoting() -> tuple[Any, Any]:
    """One that writes replies as JSON, as Llama 3.1's does."""
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
