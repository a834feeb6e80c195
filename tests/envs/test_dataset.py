"""The task `dataset`: epochs, held-out problems, answers, prompts that are too long, and a run on a user's own file."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import keel
from keel.base.errors import KeelError
from keel.base.types import Problem
from keel.config import load_config
from keel.config.load import choose
from keel.envs.problems import split_held_out
from keel.envs.registry import build_task
from keel.envs.validity import check
from keel.run.build import build_named_task, build_policy, build_run

TINY = {
    "rollout.prompts_per_step": 2,
    "rollout.num_generations": 2,
    "rollout.max_completion_length": 4,
    "eval.samples": 2,
    "eval.k": [1],
    "run.max_steps": 2,
    "log.tensorboard": False,
    "log.console": "none",
}


def sums(count: int = 40) -> list[dict[str, Any]]:
    return [{"question": f"{a}+{a // 2}=", "answer": a + a // 2, "level": a % 3} for a in range(count)]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def task_of(tmp_path: Path, rows: list[dict[str, Any]], **params: Any) -> Any:
    return build_task("dataset", data={"path": write(tmp_path / "mine.jsonl", rows)}, **params)


def refused(tmp_path: Path, rows: list[dict[str, Any]], **params: Any) -> str:
    with pytest.raises(KeelError) as caught:
        task_of(tmp_path, rows, **params)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ------------------------------------------------------------------------------------- problems and epochs


@pytest.mark.parametrize("params", [{}, {"answer": "exact"}, {"answer": "math"}, {"tag": "answer"}, {"held_out": 7}])
def test_it_is_a_sound_task(tmp_path: Path, params: dict[str, Any]) -> None:
    check(task_of(tmp_path, sums(80), **params), count=8)


def test_an_epoch_is_without_replacement_and_the_next_has_another_order(tmp_path: Path) -> None:
    task = task_of(tmp_path, sums(), held_out=4)
    walk = [p.key for step in range(18) for p in task.sample(4, seed=3, step=step)]
    first, second = walk[:36], walk[36:]
    assert set(first) == set(second) == {p.key for p in task.train}
    assert first != second
    assert walk == [p.key for step in range(18) for p in task.sample(4, seed=3, step=step)]
    assert first != [p.key for step in range(9) for p in task.sample(4, seed=4, step=step)]


def test_a_batch_over_an_epochs_end_has_distinct_keys(tmp_path: Path) -> None:
    task = task_of(tmp_path, sums(4), held_out=1)
    batch = task.sample(8, seed=0, step=0)
    assert len({p.key for p in batch}) == 8
    assert max(Counter(p.key.partition("#")[0] for p in batch).values()) == 3


def test_what_is_held_out_depends_on_the_prompt_alone(tmp_path: Path) -> None:
    few, many = task_of(tmp_path, sums(40)), task_of(tmp_path, list(reversed(sums(80))))
    assert {p.prompt for p in few.held} == {p.prompt for p in many.held} & {row["question"] for row in sums(40)}
    assert 0 < len(many.held) < 20
    twice = task_of(tmp_path, sums(40) * 2)
    assert not {p.prompt for p in twice.held} & {p.prompt for p in twice.train}
    assert len(task_of(tmp_path, sums(40), held_out=11).held) == 11
    assert len(task_of(tmp_path, sums(3), held_out=0.0001).held) == 1


def test_a_whole_number_is_a_count_also_as_a_float(tmp_path: Path) -> None:
    counted, written = (task_of(tmp_path, sums(40), held_out=number) for number in (11, 11.0))
    assert [p.key for p in written.held] == [p.key for p in counted.held]
    assert len(split_held_out(map(str, range(40)), 11.0)) == 11
    for wrong in (-1, 2.5, float("inf"), float("nan")):
        with pytest.raises(KeelError, match="held_out"):
            split_held_out("abc", wrong)


def test_another_file_to_evaluate_on(tmp_path: Path) -> None:
    other = write(tmp_path / "other.jsonl", [*sums(45)[40:], sums(1)[0]])
    task = task_of(tmp_path, sums(40), eval_path=other)
    assert len(task.held) == 6
    assert len(task.train) == 39  # the row that both hold is not trained on
    assert any("1 training problems are in the evaluation set" in note for note in task.notes)
    folder = tmp_path / "splits"
    folder.mkdir()
    write(folder / "train.jsonl", sums(5))
    write(folder / "test.jsonl", sums(8)[5:])
    assert len(build_task("dataset", data={"path": str(folder)}, eval_split="test").held) == 3  # type: ignore[attr-defined]


def test_other_columns_reach_a_users_reward(tmp_path: Path) -> None:
    assert task_of(tmp_path, sums()).train[0].info.keys() == {"level"}


# -------------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize(
    ("answer", "params", "text", "reward", "parsed"),
    [
        ("Paris", {}, " Paris\n", 1.0, True),
        ("Paris", {}, "It is Paris", 0.0, True),
        ("Paris", {}, "", 0.0, False),
        (12, {}, "so 10 + 2 is 12.0", 1.0, True),
        (1e-7, {}, "0.0000001", 1.0, True),
        (12, {}, "twelve", 0.0, False),
        ("12", {"answer": "exact"}, "it is 12", 0.0, True),
        ("1/2", {"answer": "math"}, "so $\\frac{1}{2}$", 1.0, True),
        ("1/2", {"answer": "math"}, "so $\\frac{1}{3}$", 0.0, True),
        ("Paris", {"tag": "answer"}, "Hm. <answer>Paris</answer>", 1.0, True),
        ("Paris", {"tag": "answer"}, "Paris", 0.0, False),
        (["Paris", "paris"], {}, "paris", 1.0, True),
        (["Paris", "paris"], {}, "Rome", 0.0, True),
        (True, {}, "true", 1.0, True),
    ],
)
def test_how_answers_are_compared(
    tmp_path: Path, answer: Any, params: dict[str, Any], text: str, reward: float, parsed: bool
) -> None:
    rows = [{"question": f"q{i}", "answer": answer} for i in range(4)]
    task = task_of(tmp_path, rows, **params)
    found = task.reward(task.train[0], [text])
    assert (found.total, found.parts["correct"], found.parsed) == (reward, reward, parsed)
    assert task.reward(task.train[0], [task.gold(task.train[0])]).total == 1.0


# ------------------------------------------------------------------------------------------------ bad input


def test_bad_input_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [{"question": f"q{i}", "answer": "word"} for i in range(4)]
    assert "mine.jsonl:1: task.answer is numeric" in refused(tmp_path, words, answer="numeric")
    assert "did you mean numeric" in refused(tmp_path, sums(), answer="numerical")
    assert "none for evaluation" in refused(tmp_path, sums(1)[:1], held_out=0)
    assert "none for training" in refused(tmp_path, sums(1))
    assert "none for training" in refused(tmp_path, sums(5), held_out=5)
    assert "task.held_out" in refused(tmp_path, sums(), held_out=-1)
    assert "task.held_out" in refused(tmp_path, sums(), held_out=2.5)
    assert "name the training data" in refused(tmp_path, sums(), eval_split="train")
    with pytest.raises(KeelError, match=r"unknown option data\.pth: did you mean data\.path"):
        build_task("dataset", data={"pth": "x"})
    with pytest.raises(KeelError, match=r"unknown option data\.columns\.promt: did you mean data\.columns\.prompt"):
        build_task("dataset", data={"path": "x", "columns": {"promt": "x"}})
    with pytest.raises(KeelError, match=r"give data\.path"):
        build_task("dataset")
    monkeypatch.setattr("keel.envs.answers.has_math_verify", lambda: False)
    assert "pip install math-verify" in refused(tmp_path, sums(), answer="math")


# --------------------------------------------------------------------------------- configuration and building


def test_data_alone_chooses_the_task(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = load_config({}, ["data.path=mine.jsonl"])
    assert config.task.name == "dataset"
    assert "task.name=dataset" in caplog.text
    assert load_config({}, ["data.path=mine.jsonl", "task.name=gsm8k"]).task.name == "gsm8k"
    assert load_config(config.to_dict()) == config
    for override in ("data.path=a.jsonl", "datasets=a.jsonl", "dataset_name=a/b", "data.train_files=a.parquet"):
        assert choose([], overrides=[override]) == ("own_data", [])
    assert choose([], overrides=["kl.beta=1"]) == ("default", [])


def test_each_task_gets_its_data(tmp_path: Path) -> None:
    mine, other = write(tmp_path / "mine.jsonl", sums()), write(tmp_path / "other.jsonl", sums(20))
    entry = {"name": "dataset", "data": {"path": other}}
    config = load_config({"data": {"path": mine}, "eval": {"tasks": [entry, "dataset", "countdown"]}})
    named = [build_named_task(spec, config).name for spec in (config.task, *config.eval.tasks)]
    assert named == ["dataset/mine", "dataset/other", "dataset/mine", "countdown"]


def test_too_long_prompts_are_dropped_for_good_and_counted(tmp_path: Path) -> None:
    rows = [*sums(20), *({"question": "9" * (30 + i), "answer": i} for i in range(20))]
    path = write(tmp_path / "mine.jsonl", rows)
    config = load_config({**TINY, "data": {"path": path, "max_prompt_length": 12, "truncation": "drop"}})
    loaded = build_policy(config)
    built = build_run(config, loaded)
    task: Any = built.run.task
    assert len(task.train) + len(task.held) == 20
    assert all(len(p.prompt) <= 12 for p in (*task.train, *task.held))
    assert any(note.startswith("20 problems ") for note in built.notes)
    with pytest.raises(KeelError, match=r"prompts are too long: raise data\.max_prompt_length, which is 2"):
        build_run(load_config(config, ["data.max_prompt_length=2"]), loaded)
    own = load_config({**TINY, "data": {"max_prompt_length": 12, "truncation": "drop"}})
    with pytest.raises(KeelError, match=r"data\.truncation=drop needs a task that reads data"):
        build_run(own, loaded)
    with pytest.raises(KeelError, match=r"unknown data\.chat_template 'chatlm': did you mean 'chatml'"):
        build_run(load_config(config, ["data.chat_template=chatlm"]), loaded)


def test_one_question_under_two_personas_is_on_one_side(tmp_path: Path) -> None:
    rows = [{**row, "persona": persona} for row in sums(40) for persona in ("Be brief.", "Be kind.")]
    path = write(tmp_path / "mine.jsonl", rows)
    task: Any = build_task("dataset", data={"path": path, "columns": {"system": "persona"}})
    trained, held = ({p.prompt[-1]["content"] for p in side} for side in (task.train, task.held))
    assert held
    assert not trained & held


# -------------------------------------------------------------------------------------------------- whole runs


def seen(problem: Problem, text: str) -> float:
    """A user's reward that reads a column of the data."""
    return float(problem.info["level"])


@pytest.mark.slow
@pytest.mark.parametrize("truncation", ["drop", "left"])
def test_a_run_on_ones_own_file(tmp_path: Path, truncation: str) -> None:
    rows = [*sums(30), *({"question": "9" * 30 + f"{i}=", "answer": i, "level": 1} for i in range(30))]
    settings = {
        **TINY,
        "run.dir": str(tmp_path / "runs"),
        "data.path": write(tmp_path / "mine.jsonl", rows),
        "data.max_prompt_length": 12,
        "data.truncation": truncation,
    }
    result = keel.train(settings, reward=seen)
    assert result.summary["task"] == "dataset/mine"
    lines = [json.loads(line) for line in (result.directory / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    cut = sum(line["prompt/truncated_fraction"] for line in lines)
    assert (cut > 0) == (truncation == "left")
    events = (result.directory / "events.jsonl").read_text()
    assert ("30 problems are left out" in events) == (truncation == "drop")
    evaluated = [json.loads(line) for line in (result.directory / "eval.jsonl").read_text().splitlines()]
    assert {line["task"] for line in evaluated} == {"dataset/mine"}


def test_bad_data_leaves_no_run_behind(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text("{")
    settings = {**TINY, "run.dir": str(tmp_path / "runs"), "data.path": str(tmp_path / "mine.jsonl")}
    with pytest.raises(KeelError, match=r"mine\.jsonl:1: not JSON"):
        keel.train(settings)
    assert not (tmp_path / "runs").exists()
