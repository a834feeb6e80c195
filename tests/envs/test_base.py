"""One base class for tasks: wrappers forward all that it lists, and what is no task is refused in one line."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self

import pytest

import keel.envs
from keel.base.errors import KeelError
from keel.base.types import Group, Problem, Reward
from keel.envs import Task, TaskWrapper
from keel.envs.attacks import Attack
from keel.envs.base import MEMBERS, play_turns
from keel.envs.mixture import Mixture, mixture
from keel.envs.registry import build_task
from keel.envs.tools import tool
from keel.envs.with_tools import with_tools

PROBLEM = Problem("p", "?", "7", {"mixture": 0})


@tool
def look(query: str) -> str:
    """Look something up."""
    return query


PLAYS = {"plays", "playing"}  # a wrapper forwards them, and a mixture of tasks that play is refused


class Full(Task):
    """A task whose every member says something that no default says."""

    name, notes, prompts_only, evaluation_only = "full", ("read twice",), True, True
    reward_concurrency, prompts_repeat = 3, True

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        return [PROBLEM] * count

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        return [Problem("held", "?")] * count

    def gold(self, problem: Problem) -> str:
        return "7"

    def gold_turns(self, problem: Problem) -> list[str]:
        return ["6", "7"]

    def usable_for_sft(self, problem: Problem) -> bool:
        return False

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        return Reward(float(len(turns)))

    def stratum(self, problem: Problem) -> str:
        return "hard"

    def extra_metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        return {"groups": float(len(groups))}

    def counters(self) -> dict[str, float]:
        return {"crashed": 2.0}

    def picture(self, problem: Problem, text: str) -> str:
        return f"<svg>{text}</svg>"

    def attacks(self, problem: Problem) -> list[Attack]:
        return [Attack("asking", "words", ())]

    def fingerprint(self) -> str:
        return "of the data"

    def filter_problems(self, fits: Callable[[Problem], bool]) -> tuple[Self, int]:
        return self, 3


class Default(Task):
    """A task that only has what every task must."""

    name = "default"

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        return []

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        return []

    def gold(self, problem: Problem) -> str:
        return ""

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        return Reward(0.0)


class Wrapped(TaskWrapper):
    """A user's wrapper that changes nothing."""

    def __init__(self, inner: Task) -> None:
        self.inner = inner


def values_of(task: Task) -> dict[str, Any]:
    """What each member of a task says."""
    given: dict[str, tuple[Any, ...]] = {
        "extra_metrics": ([Group(PROBLEM, (), ())],),
        "picture": (PROBLEM, "7"),
        "reward": (PROBLEM, ["7"]),
    }
    found: dict[str, Any] = {}
    for name in MEMBERS:
        value = getattr(task, name)
        if name in ("sample", "held_out"):
            found[name] = len(value(4, seed=0, step=0) if name == "sample" else value(4))
        elif name == "filter_problems":
            remaining = value(lambda problem: True)
            found[name] = None if remaining is None else remaining[1]
        elif name == "start":
            found[name] = type(value(PROBLEM))
        elif name == "playing":
            found[name] = None if not task.plays else type(value(None))
        else:
            found[name] = value(*given.get(name, (PROBLEM,) * len(signature(value)))) if callable(value) else value
    return found


def signature(method: Any) -> list[str]:
    return list(inspect.signature(method).parameters)


def test_every_wrapper_forwards_every_member() -> None:
    """Those that mean something else on purpose are listed; a new member of Task must be forwarded or listed."""
    inner = Full()
    plain = values_of(inner)
    by_default = values_of(Default())
    assert {name for name in MEMBERS if plain[name] == by_default[name]} == {"trusted", "multi_turn", "start", *PLAYS}
    assert values_of(Wrapped(inner)) == plain
    tools = values_of(with_tools(inner, [look]))
    changed = {name for name in MEMBERS if tools[name] != plain[name]}
    assert changed == {"name", "multi_turn", "start"}
    mixed = values_of(mixture([inner]))
    assert {name for name in MEMBERS if mixed[name] != plain[name]} == {"name", "extra_metrics"}
    assert set(MEMBERS) - set(vars(Mixture)) - PLAYS == {"name"} - set(vars(Mixture)), (
        "a mixture decides each of them itself"
    )


class Playing(Full):
    """A task whose episodes call the model by themselves."""

    plays = True

    def playing(self, model: Any) -> Any:
        return nullcontext()


def test_a_task_that_plays_is_wrapped_and_not_mixed() -> None:
    assert values_of(Wrapped(Playing())) == values_of(Playing())
    assert values_of(Playing())["playing"] is nullcontext
    with pytest.raises(KeelError, match=r"mixture.*full"):
        mixture([Full(), Playing()])


def test_a_wrapper_of_a_task_of_several_turns_has_them_too() -> None:
    inner = with_tools(Full(), [look])
    for outer, problem in ((Wrapped(inner), PROBLEM), (mixture([inner, Full()]), PROBLEM)):
        assert outer.multi_turn
        assert type(outer.start(problem)) is type(inner.start(problem))
        assert outer.reward(problem, ["7"]) == inner.reward(problem, ["7"]) == Reward(1.0)


def test_what_is_kept_keeps_its_wrapper() -> None:
    kept = with_tools(Full(), [look]).filter_problems(lambda problem: True)
    assert kept is not None
    assert (kept[0].name, kept[0].tools, kept[1]) == ("full+tools", (look,), 3)
    assert build_task("arithmetic").filter_problems(lambda problem: True) is None
    both = mixture([build_task("arithmetic"), Full()]).filter_problems(lambda problem: True)
    assert both is not None
    assert both[1] == 3


def test_what_is_kept_fits_with_the_tools_offered(tmp_path: Path) -> None:
    rows = [{"question": f"{'9' * (30 * (i % 2))}+{i}=", "answer": i} for i in range(40)]
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = with_tools(build_task("dataset", data={"path": str(path)}), [look], "tags")
    lengths = [len(str(p.prompt)) for p in task.sample(20, seed=0, step=0)]
    limit = min(lengths) + 10
    assert max(len(str(p.prompt)) for p in task.inner.sample(20, seed=0, step=0)) < limit < max(lengths)
    kept = task.filter_problems(lambda problem: len(str(problem.prompt)) <= limit)
    assert kept is not None
    assert kept[1] == 20
    assert all(len(str(p.prompt)) <= limit for p in kept[0].sample(20, seed=0, step=0))


def test_an_episode_is_judged_by_the_wrapper_that_starts_it() -> None:
    class Doubled(Wrapped):
        def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
            return Reward(2 * self.inner.reward(problem, turns).total)

    with play_turns(Doubled(Full()), PROBLEM, ["7"]) as (episode, _):
        assert episode.reward() == Reward(2.0)


def test_a_wrappers_own_attributes_come_first() -> None:
    wrapped: Any = Wrapped(Full())
    wrapped.name, wrapped.notes = "mine", ()
    assert (wrapped.name, wrapped.notes, wrapped.fingerprint()) == ("mine", (), "of the data")


def test_a_users_subclass_of_a_task_of_ours_is_a_users_code() -> None:
    class Mine(type(build_task("countdown"))):  # type: ignore[misc]
        pass

    assert build_task("countdown").trusted
    assert not Mine(**vars(build_task("countdown"))).trusted
    assert not Wrapped(build_task("countdown")).trusted


class Shaped:
    """The shape of a task, as 0.1 took it."""

    name = "shaped"
    sample = held_out = gold = reward = lambda self, *args, **options: None


class Bare(Task):
    """Half a task."""

    name = "bare"
    sample = Full.sample
    reward = Full.reward


class Around(TaskWrapper):
    """A wrapper without a task."""


class AroundShaped(TaskWrapper):
    inner = Shaped()  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ("Shaped", r"made a Shaped, which does not derive from keel\.envs\.Task: see docs/extending\.md"),
        ("Bare", "made a Bare without held_out, gold: see keel.envs.Task"),
        ("AroundShaped", r"made a AroundShaped around a Shaped, which does not derive from keel\.envs\.Task: see"),
        ("Around", r"made a Around around a NoneType, which does not derive"),
    ],
)
def test_what_is_no_task_is_refused_in_one_line(made: str, message: str) -> None:
    with pytest.raises(KeelError, match=message) as caught:
        build_task(f"{__name__}:{made}")
    assert "\n" not in str(caught.value)


class Unmarked(Task):
    """Problems alone."""

    name, sample, held_out = "unmarked", Full.sample, Full.held_out


class Marked(TaskWrapper):
    """What its inner task lacks it has itself."""

    inner = Unmarked()
    gold, reward = Full.gold, Full.reward


def test_what_a_wrapper_writes_its_inner_task_need_not_have() -> None:
    assert build_task(f"{__name__}:Marked").gold(PROBLEM) == "7"


@pytest.mark.slow
def test_nobody_looks_for_members_of_a_task_by_name() -> None:
    """Optional powers are declared: no `hasattr` or `getattr` with the name of one anywhere."""
    powers = {*MEMBERS, "inner"} - {"name"}  # which many things have
    source = Path(keel.envs.__file__).parents[1]
    asked = [
        f"{path.relative_to(source)}: {ast.unparse(node)}"
        for path in source.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("hasattr", "getattr")
        if isinstance(node.args[1], ast.Constant) and node.args[1].value in powers
    ]
    assert asked == ["envs/base.py: getattr(candidate, 'inner', None)"]  # of what may be no task at all
