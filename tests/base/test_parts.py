"""What a part declares is what it is given; anything else is one line."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import Field

from keel.base.errors import KeelError
from keel.base.options import Options, Positive
from keel.base.parts import part_arguments


class GameOptions(Options):
    """The parameters of a part, in a class of their own."""

    size: Positive = Field(default=3, description="Cells a side.")


def by_keyword(problem: Any, *, size: int, depth: int = 2, run: Any = None) -> Any: ...


def by_class(problem: Any, options: GameOptions, run: Any = None) -> Any: ...


def by_position(problem: Any, /, size: int) -> Any: ...


def by_anything(problem: Any, **params: Any) -> Any: ...


@pytest.mark.parametrize(
    ("factory", "params", "given"),
    [
        (by_keyword, {"size": 4}, {"size": 4, "run": "here"}),
        (by_class, {"size": 4}, {"options": GameOptions(size=4), "run": "here"}),
        (by_class, {}, {"options": GameOptions(), "run": "here"}),
        (by_anything, {"size": 4}, {"size": 4}),
        (by_position, {"size": 4}, {"size": 4}),
        (max, {"size": 4}, {"size": 4}),  # built in, without a signature
    ],
)
def test_a_part_is_given_its_own_parameters_and_what_it_takes_of_the_rest(
    factory: Any, params: dict[str, Any], given: dict[str, Any]
) -> None:
    assert part_arguments("engine mine", factory, params, positional=1, run="here", unasked=1) == given


@pytest.mark.parametrize(
    ("factory", "params", "message"),
    [
        (by_keyword, {"size": 4, "dept": 1}, "unknown engine mine parameter 'dept': did you mean 'depth'"),
        (by_keyword, {}, "engine mine needs the parameter 'size'"),
        (by_keyword, {"size": 4, "problem": 1}, "unknown engine mine parameter 'problem'"),
        (by_keyword, {"size": 4, "run": 1}, "unknown engine mine parameter 'run'"),
        (
            lambda problem: None,
            {"size": 4},
            "has no parameters: leave 'size' out",
        ),
        (lambda: None, {}, r"engine mine takes \(\): it must take 1 before its own parameters"),
        (dict, {}, "engine mine is Python's own dict: give a function or a class of yours"),
        (by_class, {"siz": 4}, "unknown option engine mine.siz: did you mean engine mine.size"),
        (by_class, {"size": 0}, "engine mine.size is 0: it must be at least 1"),
    ],
)
def test_what_a_part_does_not_declare_is_one_line(factory: Any, params: dict[str, Any], message: str) -> None:
    with pytest.raises(KeelError, match=message) as caught:
        part_arguments("engine mine", factory, params, positional=1, run="here")
    assert "\n" not in str(caught.value)


def test_what_the_caller_gives_later_is_not_asked_for() -> None:
    assert part_arguments("reward mine", by_keyword, {"depth": 1}, positional=1, reserved=("size",)) == {"depth": 1}
