"""Validity checks of a task that need no model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise

from keel.base.errors import KeelError
from keel.base.types import Problem, Reward
from keel.envs.base import Task
from keel.envs.rewards import as_reward

STEPS = 4  # checked training steps
NONSENSE = ("", "no", "<answer>", "\x00\n∞" * 3, "I do not know. " * 40)


@dataclass(frozen=True)
class ValidityCheck:
    """The result of one check; `detail` says what was checked, or gives the first failure."""

    name: str
    ok: bool
    detail: str


def check(task: Task, count: int = 32, seed: int = 0) -> None:
    """Raise a KeelError at the first failed check; see `checks`."""
    for result in checks(task, count, seed):
        if not result.ok:
            raise KeelError(f"task {task.name!r}: {result.detail}")


def checks(task: Task, count: int = 32, seed: int = 0) -> Iterator[ValidityCheck]:
    """Run the checks one by one.

    The number of problems is as requested; (seed, step) determines the problems; keys are unique within a batch; no
    held-out problem is in the training data. Rewards are finite and deterministic; gold answers are graded correct,
    earn more than an empty answer and at least as much as any other; answers of other problems earn less at least once.
    """
    drawn = _DrawnProblems(task, count, seed)
    for name, property_of in PROPERTIES.items():
        yield outcome(name, partial(property_of, drawn))


def outcome(name: str, run: Callable[[], str]) -> ValidityCheck:
    """Run one check and catch its failure."""
    try:
        return ValidityCheck(name, True, run())
    except (CheckFailed, KeelError) as error:
        return ValidityCheck(name, False, str(error))
    except Exception as error:  # a user's task may raise anything
        first = next(iter(str(error).strip().splitlines()), "")
        return ValidityCheck(name, False, f"raised {type(error).__name__}" + (f": {first}" if first else ""))


def training_steps(task: Task, count: int, seed: int, steps: int) -> list[list[Problem]]:
    """The problems of the first training steps; empty for an evaluation-only task."""
    steps = 0 if task.evaluation_only else steps
    return [task.sample(count, seed=seed, step=step) for step in range(steps)]


def first_problems(task: Task, count: int, seed: int) -> list[Problem]:
    """Training problems, or held-out problems of an evaluation-only task."""
    (batch,) = training_steps(task, count, seed, 1) or [task.held_out(count, seed=seed)]
    return batch


class CheckFailed(Exception):
    """A check has failed."""


def expect(fine: bool, what: str) -> None:
    """Raise `CheckFailed` unless `fine`."""
    if not fine:
        raise CheckFailed(what)


class _DrawnProblems:
    """The checked problems of a task, drawn at first use."""

    def __init__(self, task: Task, count: int, seed: int) -> None:
        self.task, self.count, self.seed = task, count, seed

    @cached_property
    def steps(self) -> list[list[Problem]]:
        return training_steps(self.task, self.count, self.seed, STEPS)

    @cached_property
    def held(self) -> list[Problem]:
        return self.task.held_out(self.count, seed=self.seed)

    @property
    def problems(self) -> list[Problem]:
        """The problems whose rewards are checked."""
        return [*(problem for batch in self.steps[:1] for problem in batch), *self.held]

    def reward(self, problem: Problem, *turns: str) -> Reward:
        try:
            first, again = (as_reward(self.task.reward(problem, turns)) for _ in range(2))
        except ValueError as error:  # not finite, or no reward at all
            raise CheckFailed(f"the reward of {problem.key!r} for {turns[-1][:40]!r}: {error}") from error
        expect(first == again, f"the reward of {problem.key!r} changes from call to call")
        return first

    def gold(self, problem: Problem) -> float:
        return self.reward(problem, *self.task.gold_turns(problem)).total


def _sizes(drawn: _DrawnProblems) -> str:
    count = drawn.count
    expect(all(len(batch) == count for batch in drawn.steps), f"sample({count}) must return {count} problems")
    expect(0 < len(drawn.held) <= count, f"held_out({count}) must return 1 to {count} problems")
    if not drawn.steps:
        return f"evaluation only: {len(drawn.held)} held-out problems, none for training"
    return f"{STEPS} steps of {count} problems, {len(drawn.held)} held out"


def _deterministic(drawn: _DrawnProblems) -> str:
    task, count, seed = drawn.task, drawn.count, drawn.seed
    same = all(task.sample(count, seed=seed, step=0) == batch for batch in drawn.steps[:1])
    expect(same, "sample must return the same problems for the same seed and step")
    same = task.held_out(count, seed=seed) == drawn.held
    expect(same, "held_out must return the same problems for the same seed")
    return f"two calls with seed {seed} return the same problems"


def _keys(drawn: _DrawnProblems) -> str:
    for batch in (*drawn.steps, drawn.held):
        keys = {p.key for p in batch}
        expect(len(keys) == len(batch), "two problems of a batch have the same key, which seeds the sampling noise")
    return "keys are unique within a batch"


def _disjoint(drawn: _DrawnProblems) -> str:
    what = "keys" if drawn.task.prompts_repeat else "prompts"
    trained = {_told_apart(drawn.task, p) for batch in drawn.steps for p in batch}
    shared = [p.key for p in drawn.held if _told_apart(drawn.task, p) in trained]
    expect(not shared, f"a held-out problem is in the training data: {shared[:1]}")
    return f"none of {len(drawn.held)} held-out {what} is among {len(trained)} in training"


def _told_apart(task: Task, problem: Problem) -> str:
    return problem.key if task.prompts_repeat else str(problem.prompt)


def _finite(drawn: _DrawnProblems) -> str:
    for problem in drawn.problems[:8]:
        for text in NONSENSE:
            drawn.reward(problem, text)
    for problem in drawn.problems:
        with suppress(KeelError):  # the next check reports missing gold answers
            drawn.reward(problem, *drawn.task.gold_turns(problem))
    return f"rewards of {len(drawn.problems)} gold answers and of nonsense are finite and deterministic"


def _gold(drawn: _DrawnProblems) -> str:
    for problem in drawn.problems:
        correct = drawn.reward(problem, *drawn.task.gold_turns(problem)).parts.get("correct", 1.0) >= 1.0
        expect(correct, f"the gold answer of {problem.key!r} is not judged correct")
    totals = [drawn.gold(problem) for problem in drawn.problems]
    unfit = sum(not drawn.task.usable_for_sft(problem) for problem in drawn.problems)
    rest = f"; {unfit} are not used in a warm start" if unfit else ""
    return f"{len(totals)} gold answers are judged correct and earn {_span(totals)}{rest}"


def _empty(drawn: _DrawnProblems) -> str:
    totals = [drawn.reward(problem, "").total for problem in drawn.problems]
    for problem, total in zip(drawn.problems, totals, strict=True):
        expect(total < drawn.gold(problem), f"an empty answer to {problem.key!r} earns as much as the gold one")
    return f"an empty answer earns {_span(totals)}"


def _gold_is_best(drawn: _DrawnProblems) -> str:
    problems = drawn.problems
    for index, problem in enumerate(problems):
        full = drawn.gold(problem)
        others = [drawn.task.gold_turns(other) for other in problems[max(0, index - 2) : index + 3]]
        for turns in (*others, *([text] for text in (NONSENSE if index < 8 else ()))):
            fine = drawn.reward(problem, *turns).total <= full
            expect(fine, f"another answer to {problem.key!r} earns more than the gold one: {turns[-1][:40]!r}")
    return "neither another problem's answer nor nonsense, short or long, earns more"


def _wrong(drawn: _DrawnProblems) -> str:
    gold = drawn.task.gold_turns
    pairs = [(p, q) for p, q in pairwise(drawn.problems) if gold(p) != gold(q)]
    less = [drawn.reward(p, *gold(q)).total < drawn.gold(p) for p, q in pairs]
    expect(not less or any(less), "the answer to another problem always earns the full reward")
    return f"the answer to another problem earns less in {sum(less)} of {len(less)} cases"


def _span(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


PROPERTIES: dict[str, Callable[[_DrawnProblems], str]] = {
    "problems as asked": _sizes,
    "deterministic": _deterministic,
    "distinct keys": _keys,
    "held out": _disjoint,
    "finite rewards": _finite,
    "gold is correct": _gold,
    "empty earns less": _empty,
    "gold earns most": _gold_is_best,
    "wrong earns less": _wrong,
}
