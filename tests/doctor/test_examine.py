"""Diagnoses of real runs from their files: healthy and broken ones, and the report."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from doctor.schooled import nearness, schooled_config
from keel.api import train
from keel.base.types import Problem
from keel.doctor.examine import examine


def run(tmp_path: Path, *overrides: str, steps: int = 8, reward: Any = None) -> Path:
    config = schooled_config(f"run.dir={tmp_path}", f"run.max_steps={steps}", "run.name=run", *overrides)
    return Path(train(config, reward=reward).directory)


def sometimes_nan(problem: Problem, text: str) -> float:
    return math.nan if len(text) % 2 else nearness(problem, text).total


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["run.seed=1", "loss.loss_type=dr_grpo", "kl.beta=0"],
        ["model.lora={r: 4}", "kl.estimator=exact"],
        ["loss.num_iterations=2", "rollout.temperature=0.7"],
    ],
)
def test_a_healthy_run_has_no_findings(tmp_path, overrides):
    path = run(tmp_path, *overrides)
    assert json.loads((path / "findings.json").read_text()) == []
    assert examine(path).exit_status == 0


def test_a_learning_rate_100_times_too_high_is_named_first(tmp_path):
    path = run(tmp_path, "optim.learning_rate=1e-2")
    findings = json.loads((path / "findings.json").read_text())
    assert findings[0]["code"] == "optim/lr-too-high"
    assert "learning rate of 0.01" in findings[0]["evidence"]
    assert json.loads((path / "summary.json").read_text())["findings"] == sorted({f["code"] for f in findings})
    report = (path / "report.html").read_text()
    assert report.index("optim/lr-too-high") < report.index("What the doctor checked") < report.index("<h2>Curves")
    assert "E05 explosion chain: learning rate" in report


def test_a_nan_reward_is_named_first(tmp_path):
    path = run(tmp_path, "reward.on_error=zero", reward=sometimes_nan, steps=3)
    assert json.loads((path / "findings.json").read_text())[0]["code"] == "reward/non-finite"


def test_completions_without_an_end_are_named_first(tmp_path):
    path = run(tmp_path, "rollout.max_completion_length=1", steps=3)
    assert json.loads((path / "findings.json").read_text())[0]["code"] == "output/truncated"


def test_a_raised_threshold_of_the_configuration_is_in_the_report(tmp_path):
    path = run(tmp_path, "doctor.thresholds.kl_over_budget=0.7", steps=2)
    assert "threshold kl_over_budget raised from 0.2 to 0.7" in (path / "report.html").read_text()


def test_a_doctor_that_fails_does_not_cost_the_run(tmp_path, monkeypatch):
    def broken(*_: Any) -> None:
        raise RuntimeError("no doctor today")

    monkeypatch.setattr("keel.doctor.examine.examine", broken)
    path = run(tmp_path, steps=2)
    assert json.loads((path / "findings.json").read_text()) is None
    assert "no doctor today" in (path / "events.jsonl").read_text()
    assert (path / "summary.json").exists()
