"""What a task is: problems that are stable under a seed, a gold answer, and a reward with named parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from keel.base.types import Problem, Reward


@runtime_checkable
class Task(Protocol):
    """Everything training and evaluation ask of a task. A user's `module:attr` returns an object of this shape.

    A task with several turns has one method more, `respond(problem, turns) -> str | messages | None`: what the
    environment says after the model's turns so far (a text, or messages with a role such as tool), or None to end the
    episode. It may have `gold_turns(problem) -> list[str]`, the model's turns of an episode that earns the full
    reward, and `counts(problem, turns) -> Mapping[str, float]`, figures of an episode that are logged, such as
    `tool/calls`; `keel.envs.toolbox.Toolbox` gives all but the gold. A task may also have
    `extra_metrics(groups: Sequence[Group]) -> Mapping[str, float]`: figures of its own over the judged groups of an
    evaluation, such as how often a move was legal; they stand beside pass@1 in eval.jsonl and `keel eval`. One that
    reads data may have `fingerprint() -> str`, a digest of them: a run refuses to resume where it has changed. A task
    with `unanswered` true has no gold answers and no reward of its own: the configured rewards say what is good.
    `totals() -> Mapping[str, float]` are running counts of what a task works with, such as an engine's crashes; each
    step logs by how much they grew, as `task/NAME`.
    And `picture(problem, text) -> str | None`: an SVG of an answer, shown under the completions that the report tracks.
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


def gold_turns(task: Task, problem: Problem) -> list[str]:
    """The model's turns of an episode that earns the full reward: one, where the task has no several turns."""
    several = getattr(task, "gold_turns", None)
    return [task.gold(problem)] if several is None else list(several(problem))
