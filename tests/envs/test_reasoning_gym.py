"""Datasets of reasoning-gym as tasks: the library's answers, its scoring, our split, and nobody's code is run."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any

import pytest
import reasoning_gym as library

from keel.base.errors import KeelError
from keel.config import load_config
from keel.envs.judge import Judge
from keel.envs.reasoning_gym import is_plain_maths
from keel.envs.registry import build_task, check_task
from keel.envs.validity import check


def gym(dataset: str, **params: Any) -> Any:
    return build_task("reasoning_gym", dataset=dataset, **params)


# A number, a line, a grid, an expression, several right answers (three ways to keep them), and those that evaluate.
@pytest.mark.parametrize(
    "spec",
    [
        {"dataset": "chain_sum", "min_terms": 2, "max_terms": 3},
        {"dataset": "word_sorting"},
        {"dataset": "spiral_matrix"},
        {"dataset": "countdown", "min_numbers": 3, "max_numbers": 4},
        {"dataset": "graph_color"},
        {"dataset": "propositional_logic"},
        {"dataset": "string_insertion"},
        {"dataset": "n_queens"},
        {"dataset": "polynomial_multiplication"},
        {"dataset": "list_functions"},
        {"dataset": "power_function"},  # its configuration has nothing to validate
    ],
    ids=lambda spec: spec["dataset"],
)
def test_datasets_are_sound_tasks(spec: dict[str, Any]) -> None:
    check(build_task("reasoning_gym", **spec), count=8)


def test_problems_are_the_librarys_own() -> None:
    task = gym("leg_counting")
    items = library.create_dataset("leg_counting", seed=0, size=10_000)
    for problem in task.sample(8, seed=3, step=2):
        entry = items[problem.info["index"]]
        assert problem.prompt[0]["content"].startswith(entry["question"].rstrip())
        assert problem.answer == entry["answer"]
        for text in (entry["answer"], "0", "many legs"):
            wrapped = f"<think>hm</think><answer> {text} </answer>"
            assert task.reward(problem, [wrapped]).total == items.score_answer(text, entry)


def test_parts_of_the_score_are_paid_but_not_called_correct() -> None:
    """Countdown of the library pays 0.05 for the right numbers in the wrong place, and 0.01 for nothing."""
    task = gym("countdown")
    problem = task.sample(1, seed=0, step=0)[0]
    right, wrong = task.reward(problem, [task.gold(problem)]), task.reward(problem, ["<answer>1+1</answer>"])
    assert (right.total, right.parts["correct"]) == (1.0, 1.0)
    assert (wrong.total, wrong.parts["correct"]) == (0.05, 0.0)


@pytest.mark.parametrize(
    ("fallback", "text", "total", "parsed"),
    [
        ("line", "<answer>1</answer> no: <answer>{}</answer> bye", 1.0, True),
        ("line", "I add.\n{}\n\n", 1.0, True),
        ("line", "{}\nthat is it", 0.0, True),
        ("text", "{}", 1.0, True),
        ("none", "{}", 0.0, False),
        ("none", "<answer>{}</answer>", 1.0, True),
        ("line", "", 0.0, False),
        ("line", "<answer></answer>", 0.0, False),
    ],
)
def test_where_the_answer_is_read(fallback: str, text: str, total: float, parsed: bool) -> None:
    task = gym("chain_sum", fallback=fallback)
    problem = task.sample(1, seed=0, step=0)[0]
    reward = task.reward(problem, [text.format(problem.answer)])
    assert (reward.total, reward.parsed) == (total, parsed)


def test_held_out_questions_are_never_trained_on_whatever_the_seed() -> None:
    """In a dataset with few questions, where indices alone would bring the same one to both sides."""
    task = gym("count_bits", max_n=60)
    trained = {str(p.prompt) for seed in range(3) for step in range(10) for p in task.sample(16, seed=seed, step=step)}
    held = {str(p.prompt) for seed in range(3) for p in task.held_out(16, seed=seed)}
    assert len(held) >= 8
    assert not trained & held


def test_without_a_gold_answer_it_still_has_problems_and_a_reward() -> None:
    task = gym("rush_hour")
    problem = task.sample(1, seed=0, step=0)[0]
    assert task.reward(problem, ["<answer>A+1</answer>"]).total < 1.0
    with pytest.raises(KeelError, match="has no gold answer"):
        task.gold(problem)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "needs the parameter 'dataset'"),
        ({"dataset": "chain_sums"}, "did you mean 'chain_sum'"),
        ({"dataset": "chain_sum", "max_term": 3}, "did you mean 'max_terms'"),
        ({"dataset": "chain_sum", "min_terms": 9, "max_terms": 2}, "max_terms must be >= min_terms"),
        ({"dataset": "chain_sum", "min_terms": "many"}, "rejects its parameters"),
        ({"dataset": "chain_sum", "fallback": "lines"}, "did you mean 'line'"),
    ],
)
def test_bad_parameters_are_refused_without_a_model(params: dict[str, Any], message: str) -> None:
    with pytest.raises(KeelError, match=message):
        check_task("reasoning_gym", params)
    with pytest.raises(KeelError, match=message):
        load_config({"task": {"name": "reasoning_gym", **params}})


EVIL = "__import__('pathlib').Path({path!r}).write_text('x')"


@pytest.mark.parametrize(
    "dataset",
    ["string_insertion", "spiral_matrix", "binary_matrix", "n_queens", "countdown", "puzzle24", "simple_integration"],
)
def test_a_completion_is_never_run(dataset: str, tmp_path: Any) -> None:
    task, target = gym(dataset), tmp_path / "run"
    problem = task.sample(1, seed=0, step=0)[0]
    reward = task.reward(problem, [f"<answer>{EVIL.format(path=str(target))}</answer>"])
    assert reward.parts["correct"] == 0.0
    assert not target.exists()


@pytest.mark.parametrize("text", ["1+2*3", "(4 - 1) / 2", "x**2/2 + C", "sin(2*x)*exp(-x)", "x**(3/2)", "2.5*x"])
def test_formulas_pass(text: str) -> None:
    assert is_plain_maths(text)


@pytest.mark.parametrize(
    "text",
    ["exec(x)", "().__class__", "x.y", "open(1)", "9**9**9", "2**(2**99)", "9**999", "'a'", "[1]", "1" * 400, "5!",
     "Integral(x)", "lambda: 1"],
)  # fmt: skip
def test_anything_else_does_not(text: str) -> None:
    assert not is_plain_maths(text)


def test_the_librarys_scoring_is_under_the_judges_clock() -> None:
    task = gym("chain_sum")
    problem = task.sample(1, seed=0, step=0)[0]

    slow = replace(task, score=lambda answer, entry: threading.Event().wait(20))
    with pytest.raises(KeelError, match="did not return"):
        Judge.of(slow, timeout_s=0.05).judge(problem, [["1"]])


def test_the_library_is_loaded_only_when_it_is_used() -> None:
    code = (
        "import sys; from keel.envs.registry import build_task; build_task('arithmetic')\n"
        "print('reasoning_gym' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr
