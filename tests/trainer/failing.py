"""A task in whose episodes every turn is a call, and every call fails; `trainer.failing:task` in configurations."""

from __future__ import annotations

from collections.abc import Sequence

from keel.base.types import Problem, Reward
from keel.envs import Task


class Failing(Task):
    name = "failing"

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        return [Problem(f"{step}/{i}", f"What is {i} + {step}?", "1") for i in range(count)]

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        return [Problem(f"held/{i}", f"What is {i} + {i}?", "1") for i in range(count)]

    def gold(self, problem: Problem) -> str:
        return "1"

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        return Reward(float(len(turns[0]) % 3), {"correct": 0.0})

    def respond(self, problem: Problem, turns: Sequence[str]) -> str | None:
        return "\n<result>\nerror: search raised KeyError: 'x'\n</result>\n"

    def counts(self, problem: Problem, turns: Sequence[str]) -> dict[str, float]:
        return {"tool/calls": float(len(turns)), "tool/errors": float(len(turns)), "tool/failed": float(len(turns))}


def task() -> Failing:
    return Failing()
