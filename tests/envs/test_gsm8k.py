"""The task `gsm8k`: the number behind ####, a worked gold answer, and comparison with and without math-verify."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from keel.base.errors import KeelError
from keel.envs.registry import build_task
from keel.envs.validity import check


def rows(count: int = 40) -> list[dict[str, str]]:
    return [
        {
            "question": f"Ann has {n} clips and sells half of them for $2 each. How much does she get?",
            "answer": f"She sells {n}/2 = <<{n}/2={n // 2}>>{n // 2}.\nShe gets {n // 2}*2 = {n}.\n#### {n:,}",
        }
        for n in range(1000, 1000 + 2 * count, 2)
    ]


def write(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def task_of(tmp_path: Path, records: list[dict[str, Any]] | None = None, **params: Any) -> Any:
    return build_task("gsm8k", data={"path": write(tmp_path / "train.jsonl", records or rows())}, **params)


@pytest.mark.parametrize("installed", [True, False])
def test_it_is_a_sound_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    monkeypatch.setattr("keel.envs.dataset.has_math_verify", lambda: installed)
    task = task_of(tmp_path)
    check(task, count=8)
    assert any(("by math-verify" if installed else "as numbers") in note for note in task.notes)


def test_a_problem(tmp_path: Path) -> None:
    task = task_of(tmp_path)
    problem = next(p for p in (*task.train, *task.held) if p.key == "train.jsonl:1")
    assert problem.answer == "1000"
    assert problem.prompt[0]["role"] == "user"
    assert problem.prompt[0]["content"].startswith("Ann has 1000 clips")
    assert "####" in problem.prompt[0]["content"]
    assert task.gold(problem) == "She sells 1000/2 = 500.\nShe gets 500*2 = 1000.\n#### 1000"
    plain = task_of(tmp_path, instruction=None)
    assert plain.train[0].prompt[0]["content"].endswith("How much does she get?")


@pytest.mark.parametrize(
    ("text", "reward", "parsed"),
    [
        ("#### 1000", 1.0, True),
        ("#### $1,000.00", 1.0, True),
        ("The answer is 1000", 1.0, True),
        ("1000 clips, so #### 999", 0.0, True),
        ("#### 12 #### 1000", 1.0, True),
        ("so \\boxed{2000/2}", 1.0, True),
        ("#### $10^{3}$", 1.0, True),
        ("#### 500 * 2", 1.0, True),
        # one reader: of two answers in two notations one counts, whichever is right
        ("\\boxed{1000} or 7", 1.0, True),
        ("\\boxed{7} or 1000", 0.0, True),
        ("#### 7/1000", 0.0, True),
        ("nothing", 0.0, False),
        ("", 0.0, False),
        ("#### 9**9**9**9**9", 0.0, True),
    ],
)
def test_rewards(tmp_path: Path, text: str, reward: float, parsed: bool) -> None:
    task = task_of(tmp_path)
    problem = next(p for p in (*task.train, *task.held) if p.answer == "1000")
    found = task.reward(problem, [text])
    assert (found.total, found.parts) == (reward, {"correct": reward})
    assert found.parsed == parsed


def test_the_hub_is_the_default_and_its_test_split_is_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load_dataset(path: str, name: str, split: str) -> Any:
        asked.append((path, name, split))
        return datasets.Dataset.from_list(rows(20)[:15] if split == "train" else rows(20)[15:])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    task: Any = build_task("gsm8k")
    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    assert (len(task.train), len(task.held)) == (15, 5)


def test_answers_without_a_number_are_broken(tmp_path: Path) -> None:
    records = [*rows(10), {"question": "Who?", "answer": "Nobody."}]
    with pytest.raises(KeelError, match=r"train\.jsonl:11: the answer does not end with #### and a number"):
        task_of(tmp_path, records)
    data = {"path": write(tmp_path / "train.jsonl", records), "on_broken": "skip"}
    task: Any = build_task("gsm8k", data=data)
    assert len(task.train) + len(task.held) == 10
    assert any("1 broken rows skipped" in note for note in task.notes)
    messages = [{"question": [{"role": "user", "content": f"{n}?"}], "answer": f"#### {n}"} for n in range(9)]
    with pytest.raises(KeelError, match="use the task dataset for chat messages"):
        task_of(tmp_path, messages)
