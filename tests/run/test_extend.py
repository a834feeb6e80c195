"""Extending a run: the learning rate goes on along the course that the run was begun with, unless another is given."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

import keel
from keel.base.errors import KeelError
from run.test_resume import lines
from trainer.small import BASE

RATE = 0.01


def train(folder: Path, *settings: str, resume: bool = False) -> Path:
    return keel.train(BASE, overrides=[*settings, f"run.dir={folder}", "checkpoint.every=2"], resume=resume).directory


def rates(run: Path) -> list[float]:
    return [line["optim/learning_rate"] for line in lines(run, "metrics.jsonl")]


def schedule_events(run: Path) -> list[dict[str, Any]]:
    return [event for event in lines(run, "events.jsonl") if event["kind"] == "schedule"]


def course(name: str, progress: float) -> float:
    return 1 - progress if name == "linear" else 0.5 * (1 + math.cos(math.pi * progress))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "warmup", "low"), [("linear", 0, 0.0), ("cosine", 2, 0.25)])
def test_an_extended_run_keeps_its_course(tmp_path: Path, name: str, warmup: int, low: float) -> None:
    how = (f"optim.schedule={name}", f"optim.warmup_steps={warmup}", f"optim.final_ratio={low}")
    train(tmp_path, *how, "run.max_steps=6")
    run = train(tmp_path, *how, "run.max_steps=10", resume=True)
    first = [RATE * (step + 1) / warmup for step in range(warmup)]
    down = [RATE * (low + (1 - low) * course(name, step / (6 - warmup))) for step in range(6 - warmup)]
    assert rates(run) == pytest.approx([*first, *down, *[RATE * low] * 4])
    (event,) = schedule_events(run)
    assert event["step"] == 6
    assert "still ends at step 6" in event["message"]
    assert "optim.decay_steps=10" in event["message"]
    assert yaml.safe_load((run / "config.yaml").read_text())["optim"]["decay_steps"] == 6


@pytest.mark.slow
def test_the_kept_course_stays_kept(tmp_path: Path) -> None:
    """By the configuration of the run's own folder, by the first one again, and over a second extension."""
    train(tmp_path, "optim.schedule=linear", "run.max_steps=4", "optim.final_ratio=0.5")
    train(tmp_path, "optim.schedule=linear", "run.max_steps=6", "optim.final_ratio=0.5", resume=True)
    run = tmp_path / "small"
    keel.train(run, overrides=["run.max_steps=8"], resume=True)
    assert rates(run) == pytest.approx([RATE * (1 - 0.5 * step / 4) for step in range(4)] + [RATE / 2] * 4)
    assert yaml.safe_load((run / "config.yaml").read_text())["optim"]["decay_steps"] == 4
    assert len(schedule_events(run)) == 1


@pytest.mark.slow
def test_another_end_is_taken_and_the_jump_is_said(tmp_path: Path) -> None:
    train(tmp_path, "optim.schedule=linear", "run.max_steps=6")
    run = train(tmp_path, "optim.schedule=linear", "run.max_steps=12", "optim.decay_steps=12", resume=True)
    assert rates(run) == pytest.approx(
        [RATE * (1 - s / 6) for s in range(6)] + [RATE * (1 - s / 12) for s in range(6, 12)]
    )
    (event,) = schedule_events(run)
    assert event["message"] == (
        "optim.decay_steps was 6 and is 12: the learning rate goes from 0.001667 at step 6 to 0.005 at step 7, where "
        "it would have been 0"
    )


@pytest.mark.slow
def test_a_decay_that_was_given_an_end_is_the_run_that_never_ended(tmp_path: Path) -> None:
    how = ("optim.schedule=cosine", "optim.decay_steps=8")
    whole = train(tmp_path / "whole", *how, "run.max_steps=8")
    train(tmp_path, *how, "run.max_steps=4")
    run = train(tmp_path, *how, "run.max_steps=8", resume=True)
    assert lines(run, "metrics.jsonl") == lines(whole, "metrics.jsonl")
    assert schedule_events(run) == []


@pytest.mark.slow
def test_a_shorter_run_keeps_its_course_too(tmp_path: Path) -> None:
    def stop(state: Any, metrics: Any) -> bool:
        return bool(state.step == 2)

    how = [f"run.dir={tmp_path}", "optim.schedule=linear"]
    keel.train(BASE, overrides=[*how, "run.max_steps=8"], callbacks=[stop])
    run = keel.train(BASE, overrides=[*how, "run.max_steps=4"], resume=True).directory
    assert rates(run) == pytest.approx([RATE * (1 - step / 8) for step in range(4)])


@pytest.mark.slow
def test_a_constant_rate_says_nothing_and_other_options_are_still_refused(tmp_path: Path) -> None:
    train(tmp_path, "run.max_steps=2")
    run = train(tmp_path, "run.max_steps=3", resume=True)
    assert rates(run) == [RATE] * 3
    assert schedule_events(run) == []
    with pytest.raises(KeelError, match=r"optim\.schedule was 'constant'"):
        train(tmp_path, "run.max_steps=4", "optim.schedule=linear", resume=True)
