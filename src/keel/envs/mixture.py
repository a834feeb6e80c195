"""A mixture of tasks, such as several skills for a warm start."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any, Self

from keel.base.errors import KeelError
from keel.base.types import Group, Problem, Reward
from keel.envs.attacks import Attack
from keel.envs.base import Task
from keel.envs.episode import Episode
from keel.envs.problems import seeded_rng, shares_of
from keel.envs.registry import build_task


@dataclass(frozen=True)
class Mixture(Task):
    """Several tasks as one. `info["mixture"]` of a problem is the index of its own task."""

    tasks: tuple[Task, ...]
    weights: tuple[float, ...]
    name: str = "mixture"

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(note for task in self.tasks for note in task.notes)

    @property
    def prompts_only(self) -> bool:
        return all(task.prompts_only for task in self.tasks)

    @property
    def reward_concurrency(self) -> int:
        return min(task.reward_concurrency for task in self.tasks)

    @property
    def prompts_repeat(self) -> bool:
        return any(task.prompts_repeat for task in self.tasks)

    @property
    def evaluation_only(self) -> bool:
        return all(task.evaluation_only for task in self.tasks)

    @property
    def trusted(self) -> bool:
        return super().trusted and all(task.trusted for task in self.tasks)

    @property
    def multi_turn(self) -> bool:
        return any(task.multi_turn for task in self.tasks)

    def filter_problems(self, fits: Callable[[Problem], bool]) -> tuple[Self, int] | None:
        filtered = [task.filter_problems(fits) for task in self.tasks]
        if not any(filtered):
            return None
        tasks = tuple(task if result is None else result[0] for task, result in zip(self.tasks, filtered, strict=True))
        return replace(self, tasks=tasks), sum(result[1] for result in filtered if result is not None)

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        """Training problems in proportion to the weights; fractional shares are rounded at random.

        Each task draws its largest share at every step, because data tasks compute epochs from a constant `count`.
        """
        rng, total = seeded_rng("mixture", "train", seed, step), sum(map(Fraction, self.weights))
        largest = [math.ceil(count * Fraction(weight) / total) for weight in self.weights]
        drawn = [iter(t.sample(size, seed=seed, step=step)) for t, size in zip(self.tasks, largest, strict=True)]
        picked = [i for i, share in enumerate(shares_of(self.weights, count, rng)) for _ in range(share)]
        rng.shuffle(picked)
        return [self._mark(i, next(drawn[i])) for i in picked]

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        """Held-out problems of all tasks in proportion to their weights."""
        total = sum(self.weights)
        edges = [round(count * sum(self.weights[:i]) / total) for i in range(len(self.tasks) + 1)]
        shares = [after - before for before, after in pairwise(edges)]
        held = zip(self.tasks, shares, strict=True)
        return [self._mark(i, p) for i, (task, share) in enumerate(held) for p in task.held_out(share, seed=seed)]

    def fingerprint(self) -> str | None:
        """The digests of the tasks that read data."""
        return "+".join(digest for task in self.tasks if (digest := task.fingerprint()) is not None) or None

    def gold(self, problem: Problem) -> str:
        return self._of(problem).gold(problem)

    def gold_turns(self, problem: Problem) -> list[str]:
        return self._of(problem).gold_turns(problem)

    def usable_for_sft(self, problem: Problem) -> bool:
        return self._of(problem).usable_for_sft(problem)

    def start(self, problem: Problem) -> Episode:
        return self._of(problem).start(problem)

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        return self._of(problem).reward(problem, turns)

    def attacks(self, problem: Problem) -> Sequence[Attack]:
        return self._of(problem).attacks(problem)

    def picture(self, problem: Problem, text: str) -> str | None:
        return self._of(problem).picture(problem, text)

    def stratum(self, problem: Problem) -> str:
        return self._of(problem).stratum(problem)

    def _of(self, problem: Problem) -> Task:
        return self.tasks[problem.info["mixture"]]

    def counters(self) -> Mapping[str, float]:
        """The counters of its tasks, prefixed with the task's name if several tasks use the same counter name."""
        counted = {i: dict(task.counters()) for i, task in enumerate(self.tasks)}
        owners = Counter(name for totals in counted.values() for name in totals)
        return {
            name if owners[name] == 1 else f"{self._label(i)}/{name}": total
            for i, totals in counted.items()
            for name, total in totals.items()
        }

    def extra_metrics(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """The additional metrics of each task, prefixed with its name."""
        metrics: dict[str, float] = {}
        for index, task in enumerate(self.tasks):
            task_groups = [group for group in groups if group.problem.info["mixture"] == index]
            if task_groups:
                metrics |= {
                    f"{self._label(index)}/{name}": value for name, value in task.extra_metrics(task_groups).items()
                }
        return metrics

    def labels(self) -> tuple[str, ...]:
        return tuple(map(self._label, range(len(self.tasks))))

    def label(self, problem: Problem) -> str:
        return self._label(problem.info["mixture"])

    def _label(self, index: int) -> str:
        """The name of a task, prefixed with its index if it is not unique."""
        name = self.tasks[index].name
        return f"{index}/{name}" if sum(task.name == name for task in self.tasks) > 1 else name

    def _mark(self, index: int, problem: Problem) -> Problem:
        return replace(problem, key=f"{index}/{problem.key}", info={**problem.info, "mixture": index})


def mixture(tasks: Sequence[Task], weights: Sequence[float] | None = None) -> Mixture:
    """A mixture of tasks, drawn in proportion to `weights` (default: equal)."""
    shares = tuple(float(w) for w in weights) if weights is not None else (1.0,) * len(tasks)
    if not tasks:
        raise KeelError("a mixture needs at least one task")
    if playing := [task.name for task in tasks if task.plays]:
        raise KeelError(
            f"a mixture cannot contain {playing[0]}, whose episodes call the model themselves: train it alone"
        )
    if len(shares) != len(tasks):
        raise KeelError(f"a mixture of {len(tasks)} tasks has {len(shares)} weights: give one per task")
    if not all(math.isfinite(w) and w >= 0 for w in shares) or sum(shares) <= 0:
        raise KeelError(f"mixture weights are {list(shares)}: they must be 0 or more, and not all 0")
    return Mixture(tuple(tasks), shares)


def mixture_of(tasks: Sequence[Mapping[str, Any]], weights: Sequence[float] | None = None) -> Mixture:
    """The task `mixture`: a list of tasks, each written as in `task:`, drawn in proportion to `weights`."""
    if not all("name" in entry for entry in tasks):
        raise KeelError("mixture takes tasks as a list of entries with a name, such as {name: arithmetic, skill: add}")
    return mixture([build_task(**entry) for entry in tasks], weights)
