"""What a part declares is what it is given; anything else is one line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import Field

from keel.base.errors import KeelError
from keel.base.options import Options, PositiveInt
from keel.base.parts import make_part, part_arguments


class GameOptions(Options):
    """The parameters of a part, in a class of their own."""

    size: PositiveInt = Field(default=3, description="Cells a side.")


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
        (lambda: None, {}, r"engine mine takes \(\): it must take 1 positional"),
        (dict, {}, "engine mine is the built-in dict: give a function or class"),
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


@dataclass(frozen=True)
class Board:
    """A part that is a dataclass: its fields are its parameters."""

    size: int = 3
    share: float = 0.5
    bound: float = inf
    wrap: bool = False
    cells: tuple[int, ...] = ()
    rule: Literal["up", "down"] = "up"
    limit: int | None = None
    either: int | Sequence[int] = 1
    extra: Mapping[str, float] | None = None
    folder: Path | None = None
    judge: str | Callable[..., Any] = "exact"
    other: Any = None
    unknown: NotHere = None  # noqa: F821


@dataclass(frozen=True)
class Readable:
    """The same without a type that cannot be read."""

    size: int = 3
    share: float = 0.5
    bound: float = inf
    wrap: bool = False
    cells: tuple[int, ...] = ()
    rule: Literal["up", "down"] = "up"
    limit: int | None = None
    either: int | Sequence[int] = 1
    extra: Mapping[str, float] | None = None
    folder: Path | None = None
    judge: str | Callable[..., Any] = "exact"
    other: Any = None


FITTING = {
    "size": [0, -4],
    "share": [1, 0.25],
    "bound": [inf, 2],
    "wrap": [True],
    "cells": [[1, 2], ()],
    "rule": ["down"],
    "limit": [None, 4],
    "either": [3, [3, 4]],
    "extra": [None, {"a": 1}],
    "folder": ["runs/mine"],
    "judge": ["numeric", len],
    "other": [object(), True, "text"],
}
WRONG = {
    "size": ["three", 2.5, 2.0, True, None, [3]],
    "share": ["half", True, nan, inf, None],
    "bound": [nan, "high"],
    "wrap": [1, "yes"],
    "cells": [[1, "b"], "12", 3],
    "rule": ["left", 1],
    "limit": ["four", 1.5, False],
    "either": ["three", [1.5], True],
    "extra": [3, {"a": "b"}],
    "folder": [3],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in FITTING.items() for value in values])
def test_a_value_of_the_declared_type_is_passed_on_as_it_is(name: str, value: Any) -> None:
    assert part_arguments("task mine", Readable, {name: value})[name] is value


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_value_of_another_type_is_one_line(name: str, value: Any) -> None:
    with pytest.raises(KeelError, match=rf"^kl\.controller\.{name}(\[\d\]|\.a)? is .*(expected|must be)") as caught:
        part_arguments("controller mine", Readable, {name: value}, section="kl.controller")
    assert "\n" not in str(caught.value)


def test_types_that_cannot_be_read_are_their_owners_to_check() -> None:
    assert part_arguments("task mine", Board, {"unknown": 3, "size": 3}) == {"unknown": 3, "size": 3}


def untyped(size, depth=2):
    return [None] * size + [depth + 1]


def test_an_error_of_the_constructor_is_one_line_that_names_the_part_and_the_place() -> None:
    assert make_part("task mine", untyped, 1, depth=1) == [None, 2]
    arguments = part_arguments("task mine", untyped, {"size": "three"})
    with pytest.raises(KeelError, match=rf"task mine .*TypeError: .*{Path(__file__).name}, line \d+") as caught:
        make_part("task mine", untyped, **arguments)
    assert "\n" not in str(caught.value)
