"""The task `countdown`: worked demonstrations, the search for a solution, and problems from rows."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.base.errors import KeelError
from keel.envs.countdown import countdown, solve, steps_of, value_of
from keel.envs.registry import build_task
from keel.envs.validity import check


@pytest.mark.parametrize(
    ("numbers", "target", "solved"),
    [
        ([3, 5, 7], 22, True),
        ([3, 3, 8, 8], 24, True),  # 8/(3-8/3): no way round a fraction
        ([1, 5, 5, 5], 24, True),  # 5*(5-1/5)
        ([0, 0], 0, True),
        ([2, 3], 0, False),
        ([1, 1, 1], 50, False),
        ([1, 1, 1, 1], 24, False),
    ],
)
def test_a_solution_is_found_where_there_is_one(numbers: list[int], target: int, solved: bool) -> None:
    solution = solve(numbers, target)
    assert (solution is not None) == solved
    if solution is not None:
        evaluated = value_of(solution)
        assert evaluated is not None
        assert evaluated[0] == target
        assert Counter(evaluated[1]) == Counter(numbers)


@given(st.integers(0, 10**6), st.sampled_from([2, 3, 4]))
def test_every_problem_that_is_made_can_be_solved(seed: int, numbers: int) -> None:
    for problem in countdown(numbers=numbers, low=0, high=30, target_low=0).sample(2, seed=seed, step=0):
        assert solve(problem.info["numbers"], problem.info["target"]) is not None


def test_steps_are_the_operations_in_order() -> None:
    assert steps_of("86-(24-9)*3") == ["24 - 9 = 15", "15 * 3 = 45", "86 - 45 = 41"]
    assert steps_of("7") == []


def true_values(steps: list[str]) -> list[Fraction]:
    """What each step comes to; both of its sides must."""
    values = []
    for step in steps:
        left, right = (value_of(side) for side in step.split(" = "))
        assert left is not None
        assert right is not None
        assert left[0] == right[0], step
        values.append(right[0])
    return values


def test_a_fraction_is_bracketed() -> None:
    assert steps_of("8/(3-8/3)") == ["8 / 3 = 8/3", "3 - (8/3) = 1/3", "8 / (1/3) = 24"]
    solution = solve([3, 3, 8, 8], 24)
    assert solution is not None
    assert true_values(steps_of(solution))[-1] == 24


@given(st.lists(st.integers(0, 12), min_size=2, max_size=4), st.integers(0, 60))
def test_every_step_of_a_searched_solution_is_true(numbers: list[int], target: int) -> None:
    solution = solve(numbers, target)
    if solution is not None:
        assert true_values(steps_of(solution))[-1] == target


@given(st.recursive(st.integers(0, 9).map(str), lambda part: st.tuples(part, st.sampled_from("+-*/"), part).map(
    lambda sides: f"({sides[0]}{sides[1]}{sides[2]})"), max_leaves=6))  # fmt: skip
def test_every_step_of_an_expression_is_true_fractions_and_negatives_too(expression: str) -> None:
    evaluated = value_of(expression)
    if evaluated is not None and (steps := steps_of(expression)):
        assert true_values(steps)[-1] == evaluated[0]


@given(st.integers(0, 10**6))
def test_every_step_of_a_demonstration_is_true_and_the_last_is_the_target(seed: int) -> None:
    task = countdown(target_high=100)
    (problem,) = task.sample(1, seed=seed, step=0)
    thoughts, _, answer = task.gold(problem).removeprefix("<think>").partition("</think><answer>")
    assert true_values(thoughts.split(", "))[-1] == problem.info["target"]
    assert answer.removesuffix("</answer>").replace(" ", "") == problem.answer


# ------------------------------------------------------------------------------------------------ problems from rows


def rows(count: int = 40) -> list[dict[str, Any]]:
    """Rows as in Countdown-Tasks-3to4, made by the task."""
    problems = countdown(target_high=100).sample(count, seed=1, step=0)
    return [{"target": p.info["target"], "nums": list(p.info["numbers"])} for p in problems]


def write(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def from_rows(path: Path, records: list[dict[str, Any]] | None = None, **params: Any) -> Any:
    source = {"path": write(path / "rows.jsonl", records or rows()), **params.pop("data", {})}
    return build_task("countdown", data=source, **params)


@pytest.mark.parametrize("form", ["tags", "plain"])
def test_rows_are_a_sound_task(tmp_path: Path, form: str) -> None:
    task = from_rows(tmp_path, format=form, held_out=0.5)
    check(task, count=8)
    assert len(task.train) + len(task.held) == 40


def test_a_row_is_on_the_side_of_the_same_problem_made(tmp_path: Path) -> None:
    made = countdown(numbers=3, high=9, target_high=30)
    sides = made.sample(60, seed=0, step=0), made.held_out(20)
    records = [{"nums": sorted(p.info["numbers"]), "target": p.info["target"]} for side in sides for p in side]
    task = from_rows(tmp_path, records)
    assert {int(p.key.partition(":")[2]) <= 60 for p in task.train} == {True}
    assert {int(p.key.partition(":")[2]) > 60 for p in task.held} == {True}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"nums": [1], "target": 1}, r"nums is \[1\]: it must be a list of 2 to 5 numbers"),
        ({"nums": "1 2 3", "target": 6}, "nums is '1 2 3': it must be a list"),
        ({"nums": [1, 2.5], "target": 3}, "must be integers of 0 or more"),
        ({"nums": [1, 2], "target": None}, "target None: they must be integers"),
        ({"nums": [1, True], "target": 2}, "must be integers of 0 or more"),
    ],
)
def test_a_broken_row_is_named_or_left_out(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    records = [*rows(), record]
    with pytest.raises(KeelError, match=f"rows.jsonl:41: .*{message}"):
        from_rows(tmp_path, records)
    task = from_rows(tmp_path, records, data={"on_broken": "skip"})
    assert any("1 broken rows skipped" in note for note in task.notes)
