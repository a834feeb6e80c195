"""Faults through the public extension points. All of them are functions of (seed, step), so a resumed run meets them
again exactly where the first one did; after a rollback the problems have another seed, and the fault is gone.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from keel.base.types import Problem, Reward
from keel.loggers import Logger, RunDirectory
from keel.losses import LossInputs, LossOptions, PolicyTerm
from keel.losses.policy import clipped
from trainer.small import Letters

HUGE = 1e38  # finite in a reward, infinite once a group of them is summed in fp32


@dataclass(frozen=True)
class Poisoned(Letters):
    """Letters whose rewards are multiplied by `factor` in steps first..last (finished steps) of a seed below 1000.

    Of all problems of a step, or of the one numbered `only`.
    """

    name: str = "poisoned"
    first: int = 7
    last: int = 12
    factor: float = HUGE
    every_attempt: bool = False
    only: int | None = None

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        plain = super().reward(problem, turns)
        if problem.key.startswith("held"):
            return plain
        seed, step, number = map(int, problem.key.split("/"))
        if self.only not in (None, number):
            return plain
        bad = self.first <= step + 1 <= self.last and (self.every_attempt or seed < 1000)
        return Reward(plain.total * self.factor + self.factor, plain.parts, plain.parsed) if bad else plain


def poisoned(
    first: int = 7, last: int = 12, factor: float = HUGE, every_attempt: bool = False, only: int | None = None
) -> Poisoned:
    return Poisoned(first=first, last=last, factor=factor, every_attempt=every_attempt, only=only)


@dataclass(frozen=True)
class Constant(Letters):
    """Letters that pay everyone the same, or (`by_group`) everyone in a group."""

    name: str = "constant"
    by_group: bool = False

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        paid = float(problem.key.rsplit("/", 1)[1]) if self.by_group else 0.5
        return Reward(paid, {"letters": paid}, parsed=True)


def constant(by_group: bool = False) -> Constant:
    return Constant(by_group=by_group)


def nan_loss(inputs: LossInputs, options: LossOptions) -> PolicyTerm:
    """GRPO's term times NaN."""
    term = clipped(inputs, options)
    return PolicyTerm(term.loss * torch.nan, term.ratio, term.clipped_low, term.clipped_high)


class KilledAt(Logger):
    """A logger that ends the process with SIGKILL at the first event of a kind, once a folder."""

    def __init__(self, run: RunDirectory, kind: str) -> None:
        self._kind, self._done = kind, Path(run.path.parent / f"killed-at-{kind}")

    def event(self, kind: str, **fields: Any) -> None:
        if kind == self._kind and not self._done.exists():
            self._done.write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
