"""Is this a sound task? Asked without any model, of ours and of a user's own."""

from __future__ import annotations

from itertools import pairwise

from keel.errors import KeelError
from keel.tasks.base import Task
from keel.types import Problem


def check(task: Task, count: int = 32, seed: int = 0) -> None:
    """Raise a KeelError on the first thing that is wrong with a task.

    Gold answers earn the full reward and others less, problems are the same for the same (seed, step) and differ
    between steps, keys are distinct within a batch, and no held-out problem turns up in training.
    """
    train = [p for step in range(4) for p in task.sample(count, seed=seed, step=step)]
    held = task.held_out(count, seed=seed)
    _expect(len(train) == 4 * count, task, f"sample({count}) must return {count} problems")
    _expect(0 < len(held) <= count, task, f"held_out({count}) must return 1 to {count} problems")
    same = task.sample(count, seed=seed, step=0)
    _expect(same == train[:count], task, "sample must return the same problems for the same seed and step")
    _expect(task.held_out(count, seed=seed) == held, task, "held_out must return the same problems for the same seed")
    for start in (*range(0, len(train), count), None):
        keys = [p.key for p in (held if start is None else train[start : start + count])]
        _expect(len(set(keys)) == len(keys), task, "two problems of one batch have the same key: noise is keyed by it")
    prompts = {str(p.prompt) for p in train}
    _expect(not any(str(p.prompt) in prompts for p in held), task, "a held-out problem turns up in training")
    problems = train[:count] + held
    for index, problem in enumerate(problems):
        gold = task.gold(problem)
        full = _total(task, problem, gold)
        _expect(_correct(task, problem, gold), task, f"the gold answer of {problem.key!r} is not judged correct")
        _expect(
            _total(task, problem, "") < full, task, f"an empty answer to {problem.key!r} earns as much as the gold one"
        )
        for other in (task.gold(p) for p in problems[max(0, index - 2) : index + 3]):
            beaten = _total(task, problem, other) <= full
            _expect(beaten, task, f"another answer to {problem.key!r} earns more than the gold one")
    crossed = [
        _total(task, p, task.gold(q)) < _total(task, p, task.gold(p))
        for p, q in pairwise(problems)
        if not _same(task, p, q)
    ]
    _expect(not crossed or any(crossed), task, "the answer to another problem always earns the full reward")


def _same(task: Task, first: Problem, second: Problem) -> bool:
    return task.gold(first) == task.gold(second)


def _correct(task: Task, problem: Problem, text: str) -> bool:
    """By the part `correct`, where the task has one."""
    return task.reward(problem, [text]).parts.get("correct", 1.0) >= 1.0


def _total(task: Task, problem: Problem, text: str) -> float:
    first, again = task.reward(problem, [text]), task.reward(problem, [text])
    _expect(first == again, task, f"the reward of {problem.key!r} changes from call to call")
    return first.total


def _expect(fine: bool, task: Task, what: str) -> None:
    if not fine:
        raise KeelError(f"task {task.name!r}: {what}")
