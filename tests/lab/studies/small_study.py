"""A study of a model with some thousand parameters: two values of β, a warm start, a skill beside the trained one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from keel.base.types import Problem, Reward
from trainer.small import BASE, Letters


@dataclass(frozen=True)
class Digits(Letters):
    """Pays the share of digits, which training on letters loses."""

    name: str = "digits"

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        return [replace(problem, answer="123") for problem in super().held_out(count, seed=seed)]

    def gold(self, problem: Problem) -> str:
        return "123"

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        share = sum(c.isdigit() for c in turns[-1]) / max(1, len(turns[-1]))
        return Reward(share, {"digits": share}, parsed=bool(turns[-1]))


def digits() -> Digits:
    return Digits()


STUDY = {
    "config": {
        **BASE,
        "run": {"max_steps": 6},
        "warmstart": {"steps": 3, "batch_size": 4, "learning_rate": 1.0e-3, "task": ["lab.studies.small_study:digits"]},
        "eval": {"every": 0, "samples": 4, "k": [1], "tasks": ["lab.studies.small_study:digits"]},
        "checkpoint": {"every": 2, "keep": 2, "best": False},
    },
    "grid": {"kl.beta": [0, 0.5]},
    "seeds": 1,
    "drift": {"prompts": 3, "samples": 2},
}


def broken(problem: Problem, text: str) -> float:
    raise RuntimeError("it broke")
