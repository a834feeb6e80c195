"""`arithmetic` with a held-out part of an exact size, and its skill of three operands."""

import pytest

from keel.base.errors import KeelError
from keel.envs.arithmetic import arithmetic


def test_twenty_of_the_81_sums_are_held_out_whole():
    """Counted out by hand: 81 ordered pairs, and a + b is held out together with b + a."""
    task = arithmetic("add", low=1, high=9, style="words", held_out=20)
    held = {problem.key for problem in task.held_out(100)}
    assert len(held) == 20
    assert {f"add:{b},{a}" for a, b in (key.removeprefix("add:").split(",") for key in held)} == held
    trained = {p.key for step in range(40) for p in task.sample(16, seed=0, step=step)}
    assert len(trained) == 61
    assert not trained & held
    assert {p.key for p in task.held_out(100, seed=5)} == held


@pytest.mark.parametrize("count", [0, 81, 400, -3])
def test_a_held_out_number_that_leaves_nothing_is_refused(count):
    with pytest.raises(KeelError, match="81 problems"):
        arithmetic("add", low=1, high=9, held_out=count)


def test_held_out_by_number_is_for_small_ranges():
    with pytest.raises(KeelError, match="at most"):
        arithmetic("add", low=0, high=9999, held_out=20)
    assert len(arithmetic("sort", digits=2, held_out=10).held_out(50)) == 10


def test_the_largest_of_three():
    task = arithmetic("largest", low=1, high=20, style="words")
    problem = task.sample(1, seed=0, step=0)[0]
    numbers = [int(n) for n in problem.key.removeprefix("largest:").split(",")]
    assert problem.answer == str(max(numbers))
    assert all(str(n) in problem.prompt[0]["content"] for n in numbers)
