"""The loop: cadence, what a finished run directory holds, how it is called and how it ends."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import keel
from keel.base.errors import KeelError
from trainer.small import BASE, Letters, small_config


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("runs")
    seen: list[int] = []
    result = keel.train(
        small_config(f"run.dir={folder}", "run.max_steps=6", "eval.every=2", "checkpoint.every=4", "checkpoint.keep=1"),
        callbacks=[lambda state, metrics: seen.append(state.step)],
    )
    return result, seen


def test_a_finished_run_directory_holds_the_contracts_files(finished: Any) -> None:
    result, seen = finished
    run = result.directory
    for name in ("config.yaml", "env.json", "metrics.jsonl", "rollouts.jsonl", "eval.jsonl", "events.jsonl"):
        assert (run / name).exists(), name
    assert (run / "report.html").read_text().lower().startswith("<!doctype html")
    assert seen == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in read(run / "metrics.jsonl")] == seen
    assert [line["step"] for line in read(run / "eval.jsonl")] == [0, 2, 4, 6]
    assert isinstance(json.loads((run / "findings.json").read_text()), list)


def test_the_summary_is_the_contracts(finished: Any) -> None:
    result, _ = finished
    summary = json.loads((result.directory / "summary.json").read_text())
    assert summary == json.loads(json.dumps(result.summary))
    fixed = {"task", "steps", "accuracy", "retention", "kl", "beta", "wall_s", "findings"}
    assert set(summary) == {*fixed, "reward", "reward_failures"}
    assert set(summary["accuracy"]) == {"before", "after", "ci95_before", "ci95_after"}
    assert set(summary["kl"]) == {"k1", "k2", "k3", "sequence"}
    assert math.isfinite(summary["kl"]["k3"]["se"])


def test_the_last_and_the_best_checkpoint_are_kept(finished: Any) -> None:
    result, _ = finished
    names = {path.name for path in (result.directory / "checkpoints").iterdir()}
    assert names == {"step-6", result.best.name}


def test_rollouts_show_the_same_problems_before_and_after(finished: Any) -> None:
    result, _ = finished
    records = read(result.directory / "rollouts.jsonl")
    first = [r for r in records if r["step"] == 0]
    last = [r for r in records if r["step"] == 6 and r["tracked"]]
    assert {r["problem"] for r in first} == {r["problem"] for r in last}
    fields = {"problem", "group", "prompt", "messages", "completion", "tokens", "kl", "reward", "parts", "advantage"}
    for record in records:
        assert fields | {"stop_reason"} <= set(record)
        assert len(record["kl"]) == len(record["tokens"])
    assert max(abs(x) for r in first for x in r["kl"]) < 1e-4
    assert max(abs(x) for r in last for x in r["kl"]) > 1e-3


def test_the_trained_config_can_be_run_again(finished: Any) -> None:
    from keel.config import load_config

    result, _ = finished
    assert load_config(result.directory / "config.yaml").run.max_steps == 6


def test_a_task_and_a_reward_of_ones_own(tmp_path: Path) -> None:
    def prefers_e(problem: Any, text: str) -> float:
        return float(text.count("e"))

    quick = [f"run.dir={tmp_path}", "run.max_steps=1"]
    result = keel.train(BASE, task=Letters("mine"), reward=prefers_e, overrides=quick)
    assert result.summary["task"] == "mine"
    assert "reward/part/prefers_e" in read(result.directory / "metrics.jsonl")[0]


def test_a_callback_can_end_the_run(tmp_path: Path) -> None:
    result = keel.train(BASE, callbacks=[lambda state, _: state.step == 2], overrides=[f"run.dir={tmp_path}"])
    assert (result.steps, result.exit_status) == (2, 0)
    assert (result.directory / "checkpoints" / "step-2").is_dir()


def test_a_dry_run_leaves_nothing(tmp_path: Path) -> None:
    overrides = [f"run.dir={tmp_path / 'runs'}", "warmstart.steps=50"]
    result = keel.train(BASE, overrides=overrides, dry_run=True)
    assert result.exit_status == 0
    assert result.summary["metrics"]["grad/norm"] >= 0
    assert not (tmp_path / "runs").exists()
    assert not result.directory.exists()


def test_a_mistake_is_one_line_before_any_model_loads() -> None:
    with pytest.raises(KeelError, match=r"kl\.beta"):
        keel.train({**BASE, "kl": {"bet": 0.1}})


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"task": ["run.max_steps=1"]}, r"the task is a list, which does not derive from keel.envs.Task.*overrides="),
        ({"reward": ["correct"]}, "the reward is a list: pass a function"),
    ],
)
def test_what_is_no_task_or_reward_is_refused(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(KeelError, match=said):
        keel.train(BASE, **given, overrides=[f"run.dir={tmp_path}"])
    assert not list(tmp_path.iterdir())


class Undrawable(Letters):
    """Its pictures fail on whatever a model says."""

    def picture(self, problem: Any, text: str) -> str | None:
        raise ValueError("cannot draw this")


def test_a_picture_that_cannot_be_drawn_does_not_stop_a_run(tmp_path: Path) -> None:
    result = keel.train(small_config(f"run.dir={tmp_path}", "run.max_steps=1"), task=Undrawable())
    tracked = [r for r in read(result.directory / "rollouts.jsonl") if r["tracked"]]
    assert tracked
    assert not any("picture" in record for record in tracked)
