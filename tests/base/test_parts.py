"""What a part declares is what it is given; anything else is one line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import Field

from keel.base.errors import KeelError
from keel.base.options import Options, PositiveInt
from keel.base.parts import import_object, is_import_path, make_part, part_arguments


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module of the working folder, which is not on the path yet; a name of its own for each test."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(tmp_path)
    name = f"own_{re.sub(r'[^a-z0-9]', '_', tmp_path.name)}"

    def write(text: str) -> str:
        Path(f"{name}.py").write_text(text)
        return name

    yield write
    sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("name", "own"),
    [("a:b", True), ("a.b_1:C", True), ("tiny", False), ("a:", False), (":b", False), ("a..b:c", False), (3, False)]
    + [(name, False) for name in ("C:\\models", "a:b:c", "a/b:c", "1a:b", "a: b", None)],
)
def test_what_has_the_form(name, own):
    assert is_import_path(name) is own


def test_a_module_of_the_working_folder(module):
    name = module("def double(x):\n    return 2 * x\n")
    assert import_object(f"{name}:double", "reward")(4) == 8


def test_what_is_no_function_passes_where_it_may(module):
    name = module("recipe = {'a': 1}\n")
    assert import_object(f"{name}:recipe", "loss.loss_type", callable_only=False) == {"a": 1}
    with pytest.raises(KeelError, match=rf"^task '{name}:recipe' is of type dict: it must be a function or a class$"):
        import_object(f"{name}:recipe", "task")


def test_a_kind_and_an_option_are_named_as_the_user_writes_them(module):
    name = module("")
    cause = rf": module '{name}' has no attribute 'f'; check the spelling and PYTHONPATH$"
    with pytest.raises(KeelError, match=rf"^cannot import task '{name}:f'{cause}"):
        import_object(f"{name}:f", "task")
    with pytest.raises(KeelError, match=rf"^cannot import kl\.estimator={name}:f{cause}"):
        import_object(f"{name}:f", "kl.estimator")
    with pytest.raises(KeelError, match=r"^tool 'search' is not module:attr, such as my_module:my_part$"):
        import_object("search", "tool")


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("a = 1\nb = a / 0\n", "ZeroDivisionError: division by zero"),
        ("a = 1\n\nraise SystemExit(0)\n", "SystemExit: 0"),
    ],
)
def test_a_module_that_fails_says_where(module, text, cause):
    name = module(text)
    line = text.count("\n")
    with pytest.raises(KeelError, match=rf"^cannot import engine '{name}:f': {cause}, in .*{name}\.py, line {line}$"):
        import_object(f"{name}:f", "engine")


def test_a_refusal_by_keel_itself_stands_alone(module):
    name = module("from keel.envs.registry import build_task\n\nbuild_task('nothing')\n")
    with pytest.raises(KeelError, match=r"^unknown task 'nothing'"):
        import_object(f"{name}:f", "task")


def test_the_path_grows_once(module):
    name = module("def f(): pass\n")
    for _ in range(2):
        import_object(f"{name}:f", "task")
    assert sys.path.count("") == 1


def test_an_import_loads_no_framework():
    code = "import keel.base.parts, sys; print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=os.environ)
    assert done.stdout.strip() == "[]", done.stderr


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
