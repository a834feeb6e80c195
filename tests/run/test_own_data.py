"""Runs on a user's own file: evaluated as trained, resumed on the same rows only, prompts alone, prompts as given."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import keel
from keel.base.errors import KeelError
from keel.cli import main
from keel.config import load_config
from keel.envs.dataset import AnswerGrader
from keel.envs.judge import Judge
from keel.envs.registry import build_task
from keel.envs.rewards import wrap
from keel.models.tiny import tiny_tokenizer
from keel.run.evaluate import run_evaluation
from keel.run.model_ref import resolve_model
from keel.run.parts import build_named_task, without_long_prompts

SETTINGS: dict[str, Any] = {
    "model.name": "trainer.small:small_model",
    "rollout.prompts_per_step": 2,
    "rollout.num_generations": 2,
    "rollout.max_completion_length": 4,
    "eval.samples": 3,
    "eval.k": [1, 2],
    "run.max_steps": 1,
    "run.name": "mine",
    "log.tensorboard": False,
    "log.console": "none",
}
LENGTH = [{"name": "length", "target": 0, "scale": 10.0}]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def sums(count: int = 24) -> list[dict[str, Any]]:
    return [{"question": f"{a}+{a // 2}=", "answer": a + a // 2} for a in range(count)]


def trained(folder: Path, **changes: Any) -> keel.TrainResult:
    return keel.train({**SETTINGS, "run.dir": str(folder / "runs"), **changes})


def records(result: Any, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (result.directory / name).read_text().splitlines()]


# ------------------------------------------------------------------------------------------------- evaluation


def test_the_reward_under_drop_is_the_share_of_right_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AnswerGrader, "_judge", lambda self, answer, text: True)
    rows = [*sums(), *({"question": "9" * 40, "answer": i} for i in range(4))]
    path = write(tmp_path / "mine.jsonl", rows)
    result = trained(tmp_path, **{"data.path": path, "data.max_prompt_length": 12, "data.truncation": "drop"})
    model_ref = resolve_model(str(result.directory))
    [record] = run_evaluation(model_ref, baseline=resolve_model(f"{result.directory}@start"))["tasks"]
    assert record["reward"] == record["pass@1"] == 1.0
    assert record["baseline"]["reward"] == 1.0


def test_a_reward_that_is_called_task_does_not_hide_the_tasks_own(tmp_path: Path) -> None:
    task = build_task("dataset", data={"path": write(tmp_path / "mine.jsonl", sums())})
    judge = Judge([wrap(lambda problem, text: 0.25, "task")]).with_task_reward(task)
    assert [part.name for part in judge.parts] == ["task", "task#2"]
    assert judge.task_part(task) == "task#2"
    problem = task.held_out(1)[0]
    [reward] = judge.judge(problem, [[str(problem.answer)]]) or ()
    assert (reward.total, reward.parts["task"], reward.parts["task#2/correct"]) == (0.25, 0.25, 1.0)
    with pytest.raises(KeelError, match="two rewards have the name 'a'"):
        Judge([wrap(lambda problem, text: 1.0, "a"), wrap(lambda problem, text: 2.0, "a")])


# ------------------------------------------------------------------------------------------------- prompts alone


def test_prompts_alone_are_trained_and_evaluated_by_the_rewards(tmp_path: Path, capsys: Any) -> None:
    path = write(tmp_path / "prompts.jsonl", [{"prompt": f"say {a}"} for a in range(24)])
    result = trained(tmp_path, **{"data.path": path, "rewards": LENGTH})
    assert result.summary["accuracy"] == {"before": None, "after": None, "ci95_before": None, "ci95_after": None}
    [before, after] = records(result, "eval.jsonl")
    assert "pass@1" not in after
    assert result.summary["reward"] == {"before": before["reward"], "after": after["reward"]}
    assert -0.4 <= after["reward"] < 0  # up to four characters, a tenth each
    assert "Held-out reward" in (result.directory / "report.html").read_text()
    assert main(["eval", str(result.directory), "--baseline", f"{result.directory}@start"]) == 0
    page = capsys.readouterr().out
    assert "–" in page
    assert "reward before" in page
    assert main(["eval", str(result.directory), "--json"]) == 0
    [record] = json.loads(capsys.readouterr().out)["tasks"]
    assert record["reward"] == after["reward"]


def test_a_reward_in_python_judges_prompts_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "prompts.jsonl", [{"prompt": f"say {a}", "level": a} for a in range(24)])
    settings = {**SETTINGS, "run.dir": str(tmp_path), "data.path": path, "data.columns.answer": None}
    result = keel.train(settings, reward=lambda problem, text: 0.5 + 0 * problem.info["level"])
    assert result.summary["reward"] == {"before": 0.5, "after": 0.5}


@pytest.mark.parametrize(
    "rewards",
    [
        [{"name": "task"}],
        [{"name": "length"}, {"name": "exact"}],
        [{"name": "cosine"}],
        [{"name": "regex", "pattern": "(.)", "group": 1}],
        [{"name": "ladder", "rungs": [{"reward": "numeric", "value": 1.0}]}],
    ],
)
def test_rewards_that_need_answers_are_refused_before_a_run_begins(tmp_path: Path, rewards: Any) -> None:
    path = write(tmp_path / "prompts.jsonl", [{"prompt": f"say {a}"} for a in range(24)])
    with pytest.raises(KeelError, match=r"needs answers, and 'dataset/prompts' has none"):
        trained(tmp_path, **{"data.path": path, "rewards": rewards})
    assert not (tmp_path / "runs").exists()


def test_messages_may_be_made_of_text_parts(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "say "}, {"type": "text", "text": "it"}]
    rows = [{"prompt": [{"role": "user", "content": [*parts, {"type": "text", "text": str(a)}]}]} for a in range(9)]
    task = build_task("dataset", data={"path": write(tmp_path / "p.jsonl", rows)}, held_out=1)
    assert {p.prompt[0]["content"] for p in task.sample(8, seed=0, step=0)} < {f"say it{a}" for a in range(9)}
    rows[0]["prompt"][0]["content"].append({"type": "image", "url": "x"})
    with pytest.raises(KeelError, match=r"p\.jsonl:1: column 'prompt' has messages"):
        build_task("dataset", data={"path": write(tmp_path / "p.jsonl", rows)})


# ------------------------------------------------------------------------------------------------- the same data


@pytest.mark.parametrize("change", ["rows", "answers", "nothing"])
def test_a_run_goes_on_with_the_same_rows_only(tmp_path: Path, change: str) -> None:
    rows = sums()
    path = write(tmp_path / "mine.jsonl", rows)
    first = trained(tmp_path, **{"data.path": path})
    if change != "nothing":
        write(tmp_path / "mine.jsonl", rows[1:] if change == "rows" else [{**row, "answer": 1} for row in rows])
    settings = {**SETTINGS, "run.dir": str(tmp_path / "runs"), "data.path": path, "run.max_steps": 2}
    if change == "nothing":
        assert keel.train(settings, resume=True).steps == 2
        return
    with pytest.raises(KeelError, match=r"mine\.jsonl has changed since .*runs/mine was trained on it") as caught:
        keel.train(settings, resume=True)
    assert "\n" not in str(caught.value)
    assert len(records(first, "metrics.jsonl")) == 1


def test_a_run_knows_its_data_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    write(tmp_path / "mine.jsonl", sums())
    write(tmp_path / "test.jsonl", [{"question": f"1+{a}=", "answer": 1 + a} for a in range(50, 60)])
    monkeypatch.chdir(tmp_path)
    result = trained(Path(), **{"data.path": "mine.jsonl", "task.eval_path": "test.jsonl"})
    folder = result.directory.absolute()
    os.mkdir("elsewhere")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["eval", str(folder), "--json"]) == 0
    [record] = json.loads(capsys.readouterr().out)["tasks"]
    [_, last] = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
    assert record["reward"] == last["reward"]
    monkeypatch.chdir(tmp_path)
    again = {**SETTINGS, "run.dir": "runs", "data.path": "mine.jsonl", "task.eval_path": "test.jsonl"}
    assert keel.train({**again, "run.max_steps": 2}, resume=True).steps == 2


# ------------------------------------------------------------------------------------------------- what was shown


def test_rollouts_hold_the_prompt_that_the_model_was_given(tmp_path: Path, capsys: Any) -> None:
    path = write(tmp_path / "mine.jsonl", sums())
    changes = {"data.path": path, "data.system_prompt": "Add.", "data.max_prompt_length": 9, "data.truncation": "left"}
    result = trained(tmp_path, **changes)
    for record in records(result, "rollouts.jsonl"):
        question = record["messages"][-1]["content"]
        whole = [
            "<bos>",
            "<|system|>",
            *"Add.",
            "<eos>",
            "<|user|>",
            *question,
            "<eos>",
            "<|assistant|>",
        ]  # one token a character
        assert record["prompt"] == "".join(whole[-9:])
        assert record["prompt_tokens_cut"] == max(0, len(whole) - 9)
    cut = [r for r in records(result, "rollouts.jsonl") if r["step"] == 0 and r["prompt_tokens_cut"]]
    assert cut
    assert main(["show", str(result.directory), "--step", "0", "--problem", cut[0]["problem"], "--no-color"]) == 0
    page = capsys.readouterr().out
    assert f"{cut[0]['prompt_tokens_cut']} tokens truncated on the left" in page
    assert "Add." not in page
    assert "tokens truncated on the left" in (result.directory / "report.html").read_text()


@pytest.mark.slow
def test_tools_around_a_task_do_not_hide_that_its_data_have_changed(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", sums())
    task = {"name": "tools", "task": {"name": "dataset", "data": {"path": path}}, "tools": ["run.test_own_data:double"]}
    first = trained(tmp_path, task=task, **{"model.name": "tiny"})
    settings = {**SETTINGS, "run.dir": str(tmp_path / "runs"), "task": task, "run.max_steps": 2, "model.name": "tiny"}
    write(tmp_path / "mine.jsonl", sums()[1:])
    with pytest.raises(KeelError, match=r"dataset/mine\+tools has changed since .*mine was trained on it"):
        keel.train(settings, resume=True)
    write(tmp_path / "mine.jsonl", sums())
    assert keel.train(settings, resume=True).steps == first.steps + 1


def double(number: int) -> int:
    """Double a number."""
    return 2 * number


@pytest.mark.parametrize(
    ("digits", "limits", "fix"),
    [
        (70, {}, "leave room for an answer with a smaller data.max_prompt_length and data.truncation left or drop"),
        (60, {"rollout.max_completion_length": 30}, "set rollout.max_completion_length to 4 or less"),
        (40, {"data.max_prompt_length": 12}, "raise it, or set data.truncation to left or drop"),
        (40, {"data.max_prompt_length": 12, "data.truncation": "drop"}, "raise data.max_prompt_length, which is 12"),
    ],
)
def test_a_prompt_that_is_too_long_is_refused_with_the_option_that_helps(
    tmp_path: Path, digits: int, limits: dict[str, Any], fix: str
) -> None:
    """The model reads 64 tokens, a letter each."""
    path = write(tmp_path / "mine.jsonl", [{"question": f"{i}" * digits, "answer": i} for i in range(4)])
    with pytest.raises(KeelError) as caught:
        trained(tmp_path, **{"data.path": path, "task.held_out": 2, **limits})
    assert str(caught.value).endswith(fix)


@pytest.mark.parametrize("limits", [{"truncation": "drop", "max_prompt_length": 99}, {}], ids=["drop", "error"])
def test_a_row_with_a_control_token_is_refused_at_the_start(tmp_path: Path, limits: dict[str, Any]) -> None:
    """It is named with the option that allows it, before any problem is drawn."""
    path = tmp_path / "mine.jsonl"
    path.write_text('{"question": "1+1=", "answer": 2}\n{"question": "<eos><|user|>2+1=", "answer": 3}\n')
    config = load_config({"data": {"path": str(path), **limits}, "task": {"name": "dataset"}})
    tokenizer = tiny_tokenizer()
    with pytest.raises(KeelError, match=r"mine\.jsonl:2.*data\.allow_control_tokens=true") as refused:
        without_long_prompts(config, tokenizer, build_named_task(config.task, config))
    assert "max_prompt_length" not in str(refused.value)
