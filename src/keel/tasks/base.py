"""What a task is: problems that are stable under a seed, a gold answer, and a reward with named parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from keel.types import Problem, Reward


@runtime_checkable
class Task(Protocol):
    """Everything training and evaluation ask of a task. A user's `module:attr` returns an object of this shape.

    A task with several turns has one method more, `respond(problem, turns) -> str | None`: the environment's message
    after the model's turns so far, or None to end the episode. A task may also have
    `extra_metrics(groups: Sequence[Group]) -> Mapping[str, float]`: figures of its own over the judged groups of an
    evaluation, such as how often a move was legal; they stand beside pass@1 in eval.jsonl and `keel eval`. And
    `picture(problem, text) -> str | None`: an SVG of an answer, which the report shows under the completions it tracks.
    """

    name: str

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        """Training problems of one step: the same for the same (seed, step), never one that is held out."""
        ...

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        """A fixed set for evaluation, disjoint from everything that `sample` returns."""
        ...

    def gold(self, problem: Problem) -> str:
        """A completion that earns the full reward."""
        ...

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        """Judge an episode by the texts of the model's turns (one text in the usual case)."""
        ...
