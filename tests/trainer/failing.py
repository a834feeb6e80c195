"""A task in whose episodes every turn is a call, and every call fails; `trainer.failing:task` in configurations."""

from __future__ import annotations

from keel.base.types import Problem, Reward
from keel.envs import Episode, Task


class Failing(Task):
    name = "failing"

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        return [Problem(f"{step}/{i}", f"What is {i} + {step}?", "1") for i in range(count)]

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        return [Problem(f"held/{i}", f"What is {i} + {i}?", "1") for i in range(count)]

    def gold(self, problem: Problem) -> str:
        return "1"

    def start(self, problem: Problem) -> Episode:
        return FailingEpisode()


class FailingEpisode(Episode):
    def __init__(self) -> None:
        self.turns: list[str] = []

    def step(self, text: str) -> str:
        self.turns.append(text)
        return "\n<result>\nerror: search raised KeyError: 'x'\n</result>\n"

    def reward(self) -> Reward:
        return Reward(float(len(self.turns[0]) % 3), {"correct": 0.0})

    def counts(self) -> dict[str, float]:
        return dict.fromkeys(("tool/calls", "tool/errors", "tool/failed"), float(len(self.turns)))


def task() -> Failing:
    return Failing()
