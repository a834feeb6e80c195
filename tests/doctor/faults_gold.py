"""Rewards and tasks that contradict their own gold answers, through public extension points."""

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


tagged = in_form(r"<answer>(.*?)</answer>")


def judges_the_prompt(problem: Problem, text: str) -> Reward:
    return Reward(nearness(problem, str(problem.prompt).split()[1]).total)


def last_number_earns(problem: Problem, text: str) -> Reward:
    """A correct reward of the last number. A copy of "max 7 3=" is therefore right half of the time."""
    return nearness(problem, last_number(text) or "")


class CallBefore:
    """The reward of the previous call."""

    earned = 0.0

    def __call__(self, problem: Problem, text: str) -> Reward:
        before, self.earned = self.earned, nearness(problem, text).total
        return Reward(before)


call_before = CallBefore()


def form_and_answer(problem: Problem, text: str) -> Reward:
    """A correct pair of rewards: most for the answer, little for a format that gold answers lack."""
    return Reward(nearness(problem, text.replace("!", "")).total + 0.2 * text.endswith("!"))


class Around(TaskWrapper):
    """The schooled task with one thing changed."""

    name = "around"

    def __init__(self) -> None:
        self.inner = inner_task()

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        return Reward(float(turns[-1].strip() == problem.answer))


class WorkedSolutions(Around):
    """Gold answers with worked solutions, while the reward compares a value."""

    def gold(self, problem: Problem) -> str:
        return f"Of these {self.inner.gold(problem)} is the largest.\n#### {self.inner.gold(problem)}"


class NextRow(Around):
    """Every problem has the answer of the next one."""

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        problems = self.inner.sample(count, seed=seed, step=step)
        answers = [problem.answer for problem in problems]
        return [replace(p, answer=a) for p, a in zip(problems, [*answers[1:], answers[0]], strict=True)]

    def gold(self, problem: Problem) -> str:
        return str(problem.answer)


class OneAnswer(NextRow):
    """Every problem has the answer of the first one."""

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        return [replace(p, answer="7") for p in self.inner.sample(count, seed=seed, step=step)]


def trifles(problem: Problem, text: str) -> Reward:
    """Rewards differ by a ten-thousandth, independent of the text's content."""
    return Reward(0.5 + 1e-4 * (sum(map(ord, text)) * 37 % 101) / 101)


NUMBERS: set[str] | None = None  # keys of problems that get one; None: all


def nan_beyond_the_batch(problem: Problem, text: str) -> float:
    return nearness(problem, text).total if NUMBERS is None or problem.key in NUMBERS else float("nan")
