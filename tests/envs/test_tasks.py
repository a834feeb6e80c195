"""Every registered task is sound, and each by hand where a number can be checked."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keel.base.errors import KeelError
from keel.base.types import Problem, Reward
from keel.envs import Task, TaskWrapper
from keel.envs.answers import last_number, last_tag
from keel.envs.arithmetic import SKILLS, arithmetic
from keel.envs.countdown import countdown, value_of
from keel.envs.mixture import mixture
from keel.envs.registry import TASKS, build_task, check_task
from keel.envs.validity import check


def _double(number: int) -> int:
    """Twice a number."""
    return 2 * number


SPECS: list[dict[str, Any]] = [
    *({"name": "arithmetic", "skill": skill} for skill in SKILLS),
    {"name": "arithmetic", "skill": "add", "style": "words"},
    {"name": "arithmetic", "skill": "subtract", "low": -20, "high": 20, "style": "words", "format": "answer_tag"},
    {"name": "arithmetic", "skill": "reverse", "style": "words", "digits": 2},
    {"name": "arithmetic", "skill": "multiply", "digits": 18},
    {"name": "capitals"},
    {"name": "code"},
    {"name": "countdown"},
    {"name": "countdown", "numbers": 2, "high": 9, "format": "plain", "operations": "+-"},
    {"name": "countdown", "numbers": [3, 5], "low": 0, "target_low": 0},
    {"name": "multihop", "retriever": "golden"},
    {"name": "multihop", "tool_format": "json", "answer_style": "complete", "hops": [2, 3], "documents": 5},
    {"name": "reasoning_gym", "dataset": "chain_sum"},
    {"name": "tools", "task": {"name": "arithmetic", "style": "words"}, "tools": [_double]},
    {"name": "mixture", "tasks": [{"name": "arithmetic", "skill": "max"}, {"name": "countdown"}], "weights": [1, 3]},
]


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: str(spec).partition(" at 0x")[0])
def test_every_task_is_sound(spec: dict[str, Any]) -> None:
    task = build_task(**spec)
    assert isinstance(task, Task)
    check(task)


def test_specs_cover_the_registry() -> None:
    need_data = {"dataset", "gsm8k"}  # held to the same check in test_dataset.py and test_gsm8k.py
    in_chess = {name for name in TASKS if name.startswith("chess")}  # and these in chess/
    behind_servers = {"http", "openenv"}  # test_http_environment.py, tests_envs/test_openenv.py
    assert {spec["name"] for spec in SPECS} == set(TASKS) - need_data - in_chess - behind_servers


def untyped(digits):
    return arithmetic(digits=digits + 1)


def test_a_task_that_cannot_be_made_of_its_parameters_is_one_line() -> None:
    name = f"{__name__}:untyped"
    assert build_task(name, digits=2).name == arithmetic(digits=3).name
    with pytest.raises(KeelError, match=f"task {name} .*TypeError: .*line") as caught:
        build_task(name, digits="three")
    assert "\n" not in str(caught.value)


class Broken(TaskWrapper):
    """A good task with one method replaced."""

    name = "broken"

    def __init__(self, **methods: Any) -> None:
        self.inner = arithmetic(high=30)
        vars(self).update(methods)


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({"gold": lambda problem: "0"}, "the gold answer of .* is not judged correct"),
        ({"gold": lambda problem: "", "reward": lambda problem, turns: Reward(-1.0)}, "an empty answer"),
        ({"reward": lambda problem, turns: Reward(1.0)}, "an empty answer"),
        ({"reward": lambda problem, turns: Reward(len(turns[-1]))}, "earns more than the gold"),
        ({"held_out": lambda count, seed=0: arithmetic(high=30).sample(count, seed=0, step=1)}, "the training data"),
        ({"sample": lambda count, seed, step: arithmetic(high=30).sample(1, seed=0, step=0) * count}, "the same key"),
        ({"reward": lambda problem, turns: Reward(float(bool(turns[-1])))}, "answer to another problem"),
    ],
)
def test_check_finds_what_is_planted(methods: dict[str, Any], message: str) -> None:
    with pytest.raises(KeelError, match=message):
        check(Broken(**methods))


def test_check_finds_a_task_that_forgets_its_seed() -> None:
    draws = iter(range(10**6))
    task = Broken(sample=lambda count, seed, step: arithmetic().sample(count, seed=next(draws), step=step))
    with pytest.raises(KeelError, match="the same problems"):
        check(task)


@pytest.mark.parametrize("spec", SPECS[:-1], ids=lambda spec: str(spec).partition(" at 0x")[0])
def test_held_out_is_disjoint_whatever_is_asked(spec: dict[str, Any]) -> None:
    """Also for other seeds on both sides: the problem decides, not the draw."""
    task = build_task(**spec)
    trained = {
        p.key.partition("#")[0]
        for seed in range(3)
        for step in range(20)
        for p in task.sample(16, seed=seed, step=step)
    }
    held = {p.key for seed in range(3) for p in task.held_out(64, seed=seed)}
    assert held
    assert not trained & held


def test_neither_order_of_a_held_out_sum_is_trained() -> None:
    task = arithmetic("add", high=9)
    pair = lambda p: tuple(sorted(p.key.partition("#")[0].split(":")[1].split(",")))  # noqa: E731
    trained = {pair(p) for step in range(50) for p in task.sample(32, seed=0, step=step)}
    assert not trained & {pair(p) for p in task.held_out(100)}


def test_a_problem_is_on_the_same_side_under_every_range_and_style() -> None:
    wide, narrow = arithmetic(high=99), arithmetic(high=20, style="words")
    held = {p.key for p in wide.held_out(1000)}
    assert not held & {p.key for step in range(30) for p in narrow.sample(32, seed=5, step=step)}


def test_small_ranges_repeat_under_keys_of_their_own_and_give_what_they_hold() -> None:
    task = arithmetic(high=3)
    problems = task.sample(64, seed=0, step=0)
    assert len({p.key for p in problems}) == 64
    assert len({p.prompt for p in problems}) <= 16
    assert all(task.reward(p, [task.gold(p)]).total == 1 for p in problems)
    assert len(arithmetic(high=9).held_out(1000)) < 100
    with pytest.raises(KeelError, match="no held-out problem"):
        arithmetic(high=0).held_out(4)


def test_streams_differ_by_step_and_seed() -> None:
    task = arithmetic(high=999)
    batches = [task.sample(16, seed=s, step=t) for s, t in ((0, 0), (0, 1), (1, 0))]
    assert len({p.key for batch in batches for p in batch}) == 48


@pytest.mark.parametrize(
    ("skill", "options", "prompt", "answer"),
    [
        ("add", {"low": 12, "high": 12}, "12+12=", "24"),
        ("multiply", {"low": 12, "high": 12}, "12*12=", "144"),
        ("subtract", {"low": 7, "high": 7}, "7-7=", "0"),
        ("max", {"low": -3, "high": -3}, "max -3 -3=", "-3"),
    ],
)
def test_by_hand(skill: str, options: dict[str, int], prompt: str, answer: str) -> None:
    _, problem = arithmetic(skill, **options)._draw(__import__("random").Random(0))
    assert (problem.prompt, problem.answer) == (prompt, answer)


@given(st.text("0123456789", min_size=1, max_size=8))
def test_digit_skills_against_their_definition(digits: str) -> None:
    assert SKILLS["reverse"].answer(SKILLS["reverse"].answer(digits)) == digits
    assert SKILLS["copy"].answer(digits) == digits
    ordered = SKILLS["sort"].answer(digits)
    assert Counter(ordered) == Counter(digits)
    assert all(a <= b for a, b in pairwise(ordered))


ADD = Problem("add:3,4", "3+4=", "7")


@pytest.mark.parametrize(
    ("text", "total", "parsed"),
    [
        ("7", 1, True),
        (" 7\n", 1, True),
        ("8", 0, True),
        ("7.", 0, False),
        ("", 0, False),
        ("7 7", 0, False),
        ("٧", 0, False),
    ],
)
def test_signs_leave_one_way_to_be_right(text: str, total: float, parsed: bool) -> None:
    assert arithmetic().reward(ADD, [text]) == Reward(total, {"correct": total}, parsed)


@pytest.mark.parametrize(
    ("text", "total"),
    [("The answer is 7.", 1), ("3 + 4 = 7", 1), ("10-3 is 7", 1), ("7, not 8", 0), ("seven", 0), ("7.0", 1), ("-7", 0)],
)
def test_words_read_the_last_number(text: str, total: float) -> None:
    assert arithmetic(style="words").reward(ADD, [text]).total == total


def test_answer_tag_pays_a_tenth_for_its_form() -> None:
    task = arithmetic(format="answer_tag")
    totals = [
        task.reward(ADD, [t]).total
        for t in ("<answer>7</answer>", "<answer>8</answer>", "7", "<answer>8</answer> <answer>7</answer>")
    ]
    assert totals == [1.0, 0.1, 0.0, 1.0]
    assert not task.reward(ADD, ["7"]).parsed


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1,000", "1000"),
        ("5-3", "3"),
        ("x = -3", "-3"),
        ("−3", "-3"),
        ("007", "7"),
        ("-0", "0"),
        ("2.50", "2.5"),
        ("", None),
        ("9" * 5000, None),
    ],
)
def test_last_number(text: str, number: str | None) -> None:
    assert last_number(text) == number


def test_last_tag_is_linear_and_takes_the_last() -> None:
    assert last_tag("<answer>1</answer><answer>2</answer>") == "2"
    assert last_tag("</answer><answer>") is None
    assert last_tag("<answer>" * 200_000) is None


@pytest.mark.parametrize(
    ("expression", "value", "numbers"),
    [
        ("3*5+7", 22, [3, 5, 7]),
        ("(1 + 2) / 3", 1, [1, 2, 3]),
        ("8/(3-8/3)", 24, [8, 3, 8, 3]),
        ("2×3−1÷2", Fraction(11, 2), [2, 3, 1, 2]),
        ("-(2-5)", 3, [2, 5]),
    ],
)
def test_expressions_are_exact(expression: str, value: Fraction, numbers: list[int]) -> None:
    assert value_of(expression) == (value, numbers)


@pytest.mark.parametrize(
    "expression",
    [
        "2**3", "7//2", "1/0", "1/(2-2)", "9**9**9**9", "", "()", "3+", "3 4", "1e9", "0x10", "3(4)", "a", "007", "1.5",
        "1_000", "__import__('os')", "(" * 5000, "1+" * 5000 + "1", "9" * 5000, "~1", "+1", "1,2", "1\x00", "(" * 250,
    ],
)  # fmt: skip
def test_anything_else_is_no_expression(expression: str) -> None:
    assert value_of(expression) is None


@given(st.text("0123456789+-*/() ×÷−", max_size=40))
def test_values_agree_with_python_where_it_agrees_to_evaluate(text: str) -> None:
    """An oracle on the restricted alphabet only: Python's own arithmetic in floats."""
    found = value_of(text)
    if found is None or "//" in text.replace(" ", ""):
        return
    plain = text.translate(str.maketrans("×÷−", "*/-")).strip()
    assert float(found[0]) == pytest.approx(eval(plain), rel=1e-9, abs=1e-9)


def solution(numbers: Sequence[int] = (3, 5, 7), target: int = 22) -> Problem:
    return Problem("c", "", "3*5+7", {"numbers": tuple(numbers), "target": target})


@pytest.mark.parametrize(
    ("text", "total"),
    [
        ("<think>x</think><answer>3*5+7</answer>", 1.0),
        ("<answer>1</answer><answer>7+5*3</answer>", 1.0),
        ("<answer>7+5*3</answer><answer>1</answer>", 0.1),
        ("<answer>22</answer>", 0.1),
        ("<answer>3*5+7+3-3</answer>", 0.1),
        ("<answer>3*5</answer>", 0.1),
        ("<answer></answer>", 0.1),
        ("3*5+7", 0.0),
        ("<answer>3*5+7", 0.0),
    ],
)
def test_countdown_rewards(text: str, total: float) -> None:
    assert countdown().reward(solution(), [text]).total == total


@given(st.integers(0, 10**6), st.sampled_from([2, 3, 4, 6]))
def test_generated_countdowns_are_solved_by_their_gold(seed: int, numbers: int) -> None:
    task = countdown(numbers=numbers, low=0, high=30, target_low=0)
    for problem in task.sample(4, seed=seed, step=0):
        found = value_of(problem.answer)
        assert found is not None
        assert found[0] == problem.info["target"]
        assert Counter(found[1]) == Counter(problem.info["numbers"])


def test_mixture_shares_and_judges_where_it_belongs() -> None:
    mixed = mixture([arithmetic("max"), countdown(), arithmetic("copy")], [3, 1, 0])
    problems = mixed.sample(400, seed=0, step=0)
    assert Counter(p.info["mixture"] for p in problems) == {0: 300, 1: 100}
    assert [p.info["mixture"] for p in problems] != sorted(p.info["mixture"] for p in problems)
    assert Counter(p.info["mixture"] for p in mixed.held_out(40)) == {0: 30, 1: 10}
    assert not mixed.multi_turn


def test_a_share_that_is_no_whole_number_is_rounded_and_right_on_average() -> None:
    mixed = mixture([arithmetic("max"), arithmetic("min"), arithmetic("copy")], [0.1, 0.55, 0.35])
    counts = [Counter(p.info["mixture"] for p in mixed.sample(5, seed=1, step=step)) for step in range(1000)]
    assert {tuple(sorted(c.values())) for c in counts} <= {(1, 1, 3), (1, 2, 2), (2, 3)}
    assert {c[0] for c in counts} == {0, 1}
    for index, weight in enumerate([0.1, 0.55, 0.35]):
        assert sum(c[index] for c in counts) / 5000 == pytest.approx(weight, abs=0.01)


def test_data_in_a_mixture_are_seen_once_an_epoch(tmp_path: Path) -> None:
    def rows(name: str, number: int) -> dict[str, Any]:
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"question": f"{name} {i}", "answer": i}) + "\n" for i in range(number)))
        return {"name": "dataset", "data": {"path": str(path)}, "held_out": 2}

    mixed = build_task("mixture", tasks=[rows("a", 32), rows("b", 12)], weights=[3, 1])
    seen = [p.prompt for step in range(10) for p in mixed.sample(4, seed=0, step=step)]
    assert len(set(seen)) == len(seen) == 40


def test_no_total_of_a_mixture_hides_another() -> None:
    def counting(name: str, **totals: float) -> Any:
        class Counting(Task):
            def counters(self) -> dict[str, float]:
                return totals

        made = Counting()
        made.name = name  # type: ignore[misc]
        return made

    first, second, third = counting("a", crashed=1, cached=2), counting("b", crashed=3), counting("b", crashed=4)
    assert mixture([first, arithmetic()]).counters() == {"crashed": 1, "cached": 2}
    assert mixture([first, second]).counters() == {"a/crashed": 1, "cached": 2, "b/crashed": 3}
    assert mixture([second, third]).counters() == {"0/b/crashed": 3, "1/b/crashed": 4}


@pytest.mark.parametrize("weights", [[1], [1, -1], [0, 0], [1, float("nan")]])
def test_mixture_refuses_bad_weights(weights: list[float]) -> None:
    with pytest.raises(KeelError, match="weights"):
        mixture([arithmetic(), countdown()], weights)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("arithmetics", {}, "did you mean 'arithmetic'"),
        ("arithmetic", {"skil": "add"}, "did you mean 'skill'"),
        ("arithmetic", {"skill": "ad"}, "did you mean 'add'"),
        ("arithmetic", {"skill": "copy", "low": 3}, "give digits"),
        ("arithmetic", {"digits": 2, "high": 3}, "not both"),
        ("arithmetic", {"digits": 0}, "at least 1"),
        ("arithmetic", {"low": 5, "high": 3}, "high must not be below low"),
        ("arithmetic", {"format": "tag"}, "arithmetic.format is the text tag"),
        ("arithmetic", {"style": "word"}, "did you mean words"),
        ("countdown", {"numbers": 1}, "from 2 to 8"),
        ("countdown", {"operations": "+^"}, "some of"),
        ("countdown", {"target_low": 5, "target_high": 1}, "swap them"),
        ("countdown", {"low": -1}, "at least 0"),
        ("mixture", {}, "needs the parameter 'tasks'"),
        ("mixture", {"tasks": ["arithmetic"]}, r"tasks\[0\] is the text arithmetic: expected a mapping"),
        ("mixture", {"tasks": [{"skill": "add"}]}, "entries with a name"),
        ("arithmetic", {"digits": "three"}, "arithmetic.digits is the text three: expected a whole number"),
        ("arithmetic", {"digits": True}, "arithmetic.digits is true: expected a whole number"),
        ("countdown", {"numbers": [3, "four"]}, r"countdown.numbers\[1\] is the text four"),
        ("no.such.module:task", {}, "cannot import task"),
        ("keel.envs.countdown:FORMAT_REWARD", {}, "must be a function"),
        ("builtins:dict", {}, "is the built-in dict: give a function or class"),
        ("keel.envs.base:Task", {}, "a Task without sample, held_out, gold, reward"),
    ],
)
def test_bad_names_and_parameters_are_refused_in_one_line(name: str, params: dict[str, Any], message: str) -> None:
    with pytest.raises(KeelError, match=message) as caught:
        build_task(name, **params)
    assert "\n" not in str(caught.value)


def test_check_task_builds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(skill: str = "add") -> None:
        raise AssertionError("built")

    monkeypatch.setitem(TASKS, "arithmetic", never)
    check_task("arithmetic", {"skill": "add"})


def test_users_own_task() -> None:
    made = build_task("keel.envs.arithmetic:arithmetic", skill="max")
    assert made == replace(arithmetic("max"))
