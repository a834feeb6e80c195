"""A task that a random model earns something in, and the model of the runs here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from conftest import llama
from keel.base.types import Problem, Reward
from keel.envs import Task
from keel.models.tiny import tiny_tokenizer


@dataclass(frozen=True)
class Letters(Task):
    """Pays the share of letters in a completion."""

    name: str = "letters"

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        return [Problem(f"{seed}/{step}/{i}", f"{step}:{i}=", "abc") for i in range(count)]

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        return [Problem(f"held/{i}", f"h{i}=", "abc") for i in range(count)]

    def gold(self, problem: Problem) -> str:
        return "abc"

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        share = sum(c.isalpha() for c in turns[-1]) / max(1, len(turns[-1]))
        return Reward(share, {"letters": share}, parsed=bool(turns[-1]))


def letters() -> Letters:
    return Letters()


def tied_model(seed: int = 0) -> tuple[Any, Any]:
    return llama(seed, tied=True), tiny_tokenizer()
