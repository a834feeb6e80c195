"""Rewards and tasks that do not know their own answers, through public extension points."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from doctor.schooled import TASK, nearness
from keel.base.types import Problem, Reward
from keel.envs import Task, TaskWrapper
from keel.envs.answers import last_number
from keel.envs.registry import build_task


def inner_task() -> Task:
    return build_task(str(TASK["name"]), **{k: v for k, v in TASK.items() if k != "name"})


def in_form(pattern: str):
    def reward(problem: Problem, text: str) -> Reward:
        match = re.search(pattern, text)
        return Reward(float(match is not None and match.group(1) == problem.answer), parsed=match is not None)

    return reward


boxed = in_form(r"\\boxed\{(.*?)\}")
tagged = in_form(r"<answer>(.*?)</answer>")
marked = in_form(r"#### (.*)")
spoken = in_form(r"The answer is (\w+)")


def nothing_earns(problem: Problem, text: str) -> Reward:
    return Reward(0.0)


def counts_characters(problem: Problem, text: str) -> Reward:
    return Reward(min(1.0, len(text) / 8))


def anywhere(problem: Problem, text: str) -> Reward:
    """Right where the answer stands anywhere in the text."""
    return Reward(float(problem.answer in text.split()))


def any_digit(problem: Problem, text: str) -> Reward:
    return Reward(float(text.strip().isdigit()))


def judges_the_prompt(problem: Problem, text: str) -> Reward:
    return Reward(nearness(problem, str(problem.prompt).split()[1]).total)


def last_number_earns(problem: Problem, text: str) -> Reward:
    """An honest reward: its last number is read, so that a copy of "max 7 3=" is right half of the time."""
    return nearness(problem, last_number(text) or "")


class CallBefore:
    """What the call before it earned."""

    earned = 0.0

    def __call__(self, problem: Problem, text: str) -> Reward:
        before, self.earned = self.earned, nearness(problem, text).total
        return Reward(before)


call_before = CallBefore()


def form_and_answer(problem: Problem, text: str) -> Reward:
    """An honest pair: most for the answer, a little for a form that gold answers do not have."""
    return Reward(nearness(problem, text.replace("!", "")).total + 0.2 * text.endswith("!"))


class Around(TaskWrapper):
    """The schooled task with one thing changed."""

    name = "around"

    def __init__(self) -> None:
        self.inner = inner_task()

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        return Reward(float(turns[-1].strip() == problem.answer))


class WorkedSolutions(Around):
    """Gold answers that show their work, while a value is compared."""

    def gold(self, problem: Problem) -> str:
        return f"Of these {self.inner.gold(problem)} is the largest.\n#### {self.inner.gold(problem)}"


class NextRow(Around):
    """Every problem has the answer of the one after it."""

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        problems = self.inner.sample(count, seed=seed, step=step)
        answers = [problem.answer for problem in problems]
        return [replace(p, answer=a) for p, a in zip(problems, [*answers[1:], answers[0]], strict=True)]

    def gold(self, problem: Problem) -> str:
        return str(problem.answer)


class GradedByNextRow(NextRow):
    """The same, while gold answers are still the problem's own."""

    def gold(self, problem: Problem) -> str:
        return str(max(int(n) for n in re.findall(r"\d+", str(problem.prompt))))


class OneAnswer(NextRow):
    """Every problem has the answer of the first."""

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        return [replace(p, answer="7") for p in self.inner.sample(count, seed=seed, step=step)]


class BoxedAnswers(NextRow):
    """Answers in a box, which texts are compared with."""

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        problems = self.inner.sample(count, seed=seed, step=step)
        return [replace(p, answer=f"\\boxed{{{p.answer}}}") for p in problems]


def trifles(problem: Problem, text: str) -> Reward:
    """Tells texts apart by a ten-thousandth, and not by what they say."""
    return Reward(0.5 + 1e-4 * (sum(map(ord, text)) * 37 % 101) / 101)


NUMBERS: set[str] | None = None  # keys of problems that get one; None: all


def nan_beyond_the_batch(problem: Problem, text: str) -> float:
    return nearness(problem, text).total if NUMBERS is None or problem.key in NUMBERS else float("nan")
