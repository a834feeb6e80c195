"""The task capitals: what counts as an answer, and that nothing held out is trained on."""

import pytest

from keel.base.errors import KeelError
from keel.base.types import Problem
from keel.envs.capitals import CAPITALS
from keel.envs.registry import build_task


def judged(text, country="Brazil"):
    return build_task("capitals").reward(Problem("k", "", CAPITALS[country]), [text])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Brasília", 1),
        ("The capital of Brazil is brasilia.", 1),
        ("Lima", 0),
        ("Brasília, or perhaps Lima", 0),
        ("", 0),
        ("Brasilian", 0),
    ],
)
def test_answers(text, value):
    assert judged(text).total == value


def test_names_of_several_words_and_inside_others():
    assert judged("New Delhi!", "India").total == 1
    assert judged("Romeo", "Italy").total == 0
    assert not judged("I do not know").parsed


def test_held_out_is_never_trained_on():
    task = build_task("capitals", held_out=20)
    kept = {problem.key for problem in task.held_out(99)}
    assert len(kept) == 20
    drawn = task.sample(150, seed=1, step=2)
    assert len({problem.key for problem in drawn}) == 150
    assert not kept & {problem.key.partition("#")[0] for problem in drawn}
    assert task.sample(5, seed=1, step=2) == drawn[:5]
    assert all(task.reward(problem, [task.gold(problem)]).total == 1 for problem in task.held_out(20))


@pytest.mark.parametrize("bad", [0, 64, True, 2.5])
def test_refused(bad):
    with pytest.raises(KeelError, match=r"capitals.held_out"):
        build_task("capitals", held_out=bad)
