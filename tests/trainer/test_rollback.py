"""Rollback: a run in trouble goes back to where it was good and goes on; a kill in between changes nothing."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import keel
import processes
from keel.loggers import rundir
from keel.run.build import build_policy, build_run
from keel.trainer import rollback
from keel.trainer.checkpoint import load_checkpoint, restore_weights, save_checkpoint
from keel.trainer.state import State
from keel.trainer.step import train_step
from run.test_resume import assert_same, lines, train
from trainer.small import BASE, small_config

pytestmark = pytest.mark.processes


# Not finite from step 7 to 12: the fifth skip in a row, at step 11, calls for the rollback.
NANS = {
    "task.name": "trainer.faults:poisoned",
    "run.max_steps": "20",
    "checkpoint.every": "3",
    "checkpoint.best": "false",
    "eval.every": "5",
}


def command_line(folder: Path, settings: dict[str, str], **more: str) -> list[str]:
    return [f"{name}={value}" for name, value in {**settings, "run.dir": str(folder), **more}.items()]


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in lines(run, "events.jsonl") if event["kind"] == kind]


def findings(run: Path) -> dict[str, Any]:
    return {finding["code"]: finding for finding in json.loads((run / "findings.json").read_text())}


@pytest.fixture(scope="module")
def recovered(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return keel.train(BASE, overrides=command_line(tmp_path_factory.mktemp("nans"), NANS))


def test_a_run_of_nans_is_survived(recovered: Any) -> None:
    """Steps 7–11 are skipped; step 6 was confirmed by nobody (7 was not fine), so the last good one is step 3."""
    run = recovered.directory
    metrics = lines(run, "metrics.jsonl")
    assert (recovered.exit_status, recovered.steps) == (0, 20)
    assert [line["step"] for line in metrics] == list(range(1, 21))
    assert all(line["guard/skipped"] == 0 for line in metrics)
    assert [line["guard/rollbacks"] for line in metrics] == [0.0] * 3 + [1.0] * 17
    rates = [line["optim/learning_rate"] for line in metrics]
    assert rates == [pytest.approx(0.01)] * 3 + [pytest.approx(0.005)] * 17
    guard_events = events(run, "rollback")
    assert [(event["step"], event["to"], event["attempt"]) for event in guard_events] == [(11, 3, 1)]
    assert [event["step"] for event in events(run, "guard/skipped")] == [7, 8, 9, 10, 11]
    assert not (run / "rollback.json").exists()


def test_the_model_at_the_end_is_good(recovered: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(recovered.directory / "checkpoints" / "step-20")
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    accuracy = recovered.summary["accuracy"]
    assert accuracy["after"] >= accuracy["before"]
    rewards = [line["reward/mean"] for line in lines(recovered.directory, "metrics.jsonl")]
    assert sum(rewards[-5:]) > sum(rewards[:5])


def test_what_was_given_up_is_kept(recovered: Any) -> None:
    abandoned = recovered.directory / "abandoned" / "attempt-0"
    assert [line["step"] for line in lines(abandoned, "metrics.jsonl")] == list(range(4, 12))
    assert {line["step"] for line in lines(abandoned, "rollouts.jsonl")} == set(range(4, 12))
    assert [line["step"] for line in lines(abandoned, "eval.jsonl")] == [5, 10]
    assert [line["step"] for line in lines(recovered.directory, "eval.jsonl")] == [0, 5, 10, 15, 20]


def test_the_next_attempt_meets_other_problems(recovered: Any) -> None:
    def problems(folder: Path, step: int) -> set[str]:
        return {r["problem"] for r in lines(folder, "rollouts.jsonl") if r["step"] == step and not r["tracked"]}

    run = recovered.directory
    assert not problems(run, 5) & problems(run / "abandoned" / "attempt-0", 5)


def killed_then_resumed(folder: Path, settings: dict[str, str]) -> Path:
    extra = {"log.extra": "[{name: trainer.faults:KilledAt, kind: rollback}]"}
    killed = processes.run(train, command_line(folder, {**settings, **extra}))
    assert killed.returncode == -signal.SIGKILL
    run = folder / "small"
    assert (run / "rollback.json").exists()
    assert lines(run, "metrics.jsonl")[-1]["step"] == 11
    keel.train(BASE, overrides=command_line(folder, settings), resume=True)
    return run


def test_kill_9_in_the_middle_of_a_rollback_changes_nothing(tmp_path: Path, recovered: Any) -> None:
    run = killed_then_resumed(tmp_path, NANS)
    assert_same(run, recovered.directory)
    for name in ("metrics.jsonl", "rollouts.jsonl", "eval.jsonl"):
        abandoned = Path("abandoned") / "attempt-0" / name
        assert lines(run, str(abandoned)) == lines(recovered.directory, str(abandoned))
    assert len(events(run, "rollback")) == 1
    assert [event["step"] for event in events(run, "guard/skipped")] == [7, 8, 9, 10, 11]


def test_kill_9_with_adapters_a_moving_reference_and_a_controller(tmp_path: Path) -> None:
    """The same with all that has a state of its own: LoRA, an EMA reference, a PID controller, a schedule."""
    reference = {"reference.kind": "ema", "reference.every": "2", "reference.alpha": "0.3"}
    controller = {"kl.controller.name": "pid", "kl.controller.target": "0.001", "optim.schedule": "cosine"}
    settings = {**NANS, "model.lora.r": "2", **reference, **controller, "run.max_steps": "14"}
    whole = keel.train(BASE, overrides=command_line(tmp_path / "whole", settings))
    run = killed_then_resumed(tmp_path / "killed", settings)
    assert_same(run, whole.directory)
    assert len(events(run, "rollback")) == 1
    assert len({line["kl/beta"] for line in lines(run, "metrics.jsonl")}) > 5


class Killed(BaseException):
    pass


MOMENTS = [
    (rollback, "_announce"),
    (rundir, "lines_after"),
    (rundir, "drop_lines_after"),
    (rollback, "drop_after"),
    (rollback, "rewrite_state"),
    (rollback, "restore_weights"),
]


# But for the last two, between which rollback.json is removed, nothing is written between one and the next.
@pytest.mark.parametrize(
    ("module", "name", "when"),
    [*((module, name, "before") for module, name in MOMENTS), (rollback, "rewrite_state", "after")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_moment_of_a_rollback_can_be_the_last(
    tmp_path: Path, recovered: Any, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, when: str
) -> None:
    inner = getattr(module, name)

    def die(*args: Any, **kwargs: Any) -> None:
        if when == "after":
            inner(*args, **kwargs)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(module, name, die)
        with pytest.raises(Killed):
            keel.train(BASE, overrides=command_line(tmp_path, NANS))
    run = keel.train(BASE, overrides=command_line(tmp_path, NANS), resume=True).directory
    assert_same(run, recovered.directory)
    assert len(events(run, "rollback")) == 1


def test_a_resume_after_a_rollback_keeps_the_whole_story(tmp_path: Path, recovered: Any) -> None:
    """Ctrl-C at step 8 of the second attempt: events of the first one, at later steps, stay."""

    def stop(state: Any, metrics: Any) -> None:
        if state.attempt == 1 and state.step == 8:
            os.kill(os.getpid(), signal.SIGINT)

    result = keel.train(BASE, overrides=command_line(tmp_path, NANS), callbacks=[stop])
    assert result.exit_status == 130
    keel.train(BASE, overrides=command_line(tmp_path, NANS), resume=True)
    assert_same(result.directory, recovered.directory)
    assert [event["step"] for event in events(result.directory, "guard/skipped")] == [7, 8, 9, 10, 11]


# Adam with a large ε moves like plain gradient descent: rewards 10⁶ times their size throw the policy far off.
EXPLOSION = {
    **NANS,
    "task.first": "8",
    "task.last": "8",
    "task.factor": "1e6",
    "loss.scale_rewards": "none",
    "optim.max_grad_norm": "null",
    "optim.eps": "10",
    "optim.learning_rate": "0.5",
    "kl.budget.max": "0.5",
    "kl.budget.action": "rollback",
    "checkpoint.every": "1",
}


def test_a_kl_explosion_is_survived(tmp_path: Path) -> None:
    """The update of step 8 explodes and step 9 sees it; step-8 is saved, but step 9 does not vouch for it."""
    result = keel.train(BASE, overrides=command_line(tmp_path, EXPLOSION))
    run = result.directory
    guard_events = events(run, "rollback")
    assert [(event["step"], event["to"], event["code"]) for event in guard_events] == [(9, 7, "kl/over-budget")]
    abandoned = lines(run / "abandoned" / "attempt-0", "metrics.jsonl")
    assert [line["step"] for line in abandoned] == [8, 9]
    assert abandoned[-1]["kl/policy_ref/k3/mean"] > 0.5
    assert abandoned[-1]["guard/over_budget"] == 1.0
    metrics = lines(run, "metrics.jsonl")
    assert (result.exit_status, [line["step"] for line in metrics]) == (0, list(range(1, 21)))
    assert max(line["kl/policy_ref/k3/mean"] for line in metrics) < 0.5
    assert result.summary["kl"]["k3"]["mean"] < 0.5
    page = (run / "report.html").read_text()
    assert "kl.budget.max 0.5 at step 9: " in page
    assert "step-7" in page


LAST = {**EXPLOSION, "run.max_steps": "8"}


def final_kl(result: Any) -> float:
    return float(result.summary["kl"]["k3"]["mean"])


def test_an_explosion_in_the_last_update_is_rolled_back(tmp_path: Path) -> None:
    """No step comes after the 8th: the policy is measured before it is saved."""
    result = keel.train(BASE, overrides=command_line(tmp_path, LAST))
    guard_events = events(result.directory, "rollback")
    assert [(event["step"], event["to"], event["code"]) for event in guard_events] == [(8, 7, "kl/over-budget")]
    assert "step 8" in guard_events[0]["message"]
    assert (result.exit_status, result.steps) == (0, 8)
    assert final_kl(result) < 0.5
    assert [line["step"] for line in lines(result.directory, "metrics.jsonl")] == list(range(1, 9))


def test_an_explosion_in_the_last_update_ends_at_the_model_before_it(tmp_path: Path) -> None:
    result = keel.train(BASE, overrides=command_line(tmp_path, {**LAST, "kl.budget.action": "stop"}))
    assert (result.exit_status, result.steps) == (1, 7)
    assert max(int(path.name[5:]) for path in (result.directory / "checkpoints").iterdir()) == 7
    assert final_kl(result) < 0.5
    assert findings(result.directory)["kl/over-budget"]["severity"] == "error"


@pytest.mark.parametrize("budget", ["{max: 0.5, action: warn}", "null"])
def test_an_explosion_in_the_last_update_that_is_kept_is_said(tmp_path: Path, budget: str) -> None:
    settings = {name: value for name, value in LAST.items() if not name.startswith("kl.budget")}
    result = keel.train(BASE, overrides=command_line(tmp_path, {**settings, "kl.budget": budget}))
    assert (result.exit_status, result.steps) == (0, 8)
    assert final_kl(result) > 0.5
    metrics = lines(result.directory, "metrics.jsonl")
    assert max(line["kl/policy_ref/k3/mean"] for line in metrics) < 0.5
    assert "after the last update" in findings(result.directory)["kl/explosion"]["evidence"]
    assert len(events(result.directory, "kl/over-budget")) == (budget != "null")


def test_a_learning_rate_that_explodes_at_once_goes_back_to_the_start(tmp_path: Path) -> None:
    more = {"kl.budget.max": "0.5", "kl.budget.action": "rollback", "guards.recovery_lr_factor": "0.001"}
    settings = {"run.max_steps": "8", "checkpoint.every": "3", "optim.learning_rate": "1.0", **more}
    result = keel.train(BASE, overrides=command_line(tmp_path, settings))
    assert [(event["step"], event["to"]) for event in events(result.directory, "rollback")] == [(2, 0)]
    metrics = lines(result.directory, "metrics.jsonl")
    assert (result.exit_status, len(metrics)) == (0, 8)
    assert {line["optim/learning_rate"] for line in metrics} == {0.001}
    assert max(line["kl/policy_ref/k3/mean"] for line in metrics) < 0.5


def test_a_run_that_cannot_be_helped_stops_at_its_last_good_model(tmp_path: Path) -> None:
    settings = {**NANS, "task.every_attempt": "true", "guards.max_rollbacks": "2", "guards.max_consecutive_nans": "2"}
    result = keel.train(BASE, overrides=command_line(tmp_path, settings))
    run = result.directory
    assert (result.exit_status, result.steps) == (1, 3)
    assert [event["lr_factor"] for event in events(run, "rollback")] == [0.5, 0.25]
    guard_events = events(run, "stop")
    assert len(guard_events) == 1
    assert "after 2 rollbacks" in guard_events[0]["message"]
    assert [line["step"] for line in lines(run, "metrics.jsonl")] == [1, 2, 3]
    assert sorted(path.name for path in (run / "abandoned").iterdir()) == ["attempt-0", "attempt-1", "attempt-2"]
    assert max(int(path.name[5:]) for path in (run / "checkpoints").iterdir()) == 3
    assert findings(run)["reward/non-finite"]["severity"] == "error"
    assert findings(run)["optim/non-finite"]["evidence"].startswith("explained by reward/non-finite")
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 3
    assert {"guard/rolled-back", "optim/non-finite"} <= set(summary["findings"])
    assert summary["accuracy"]["after"] is not None
    assert "stopped after 3 of 20 steps" in (run / "report.html").read_text()


def test_a_stopped_run_goes_on_under_other_limits(tmp_path: Path) -> None:
    budget = {**NANS, "task.first": "99", "kl.budget.max": "0.001", "kl.beta": "0"}
    stopped = keel.train(BASE, overrides=command_line(tmp_path, budget))
    assert stopped.exit_status == 1
    first = (stopped.directory / "abandoned" / "attempt-0" / "metrics.jsonl").read_text()
    again = keel.train(BASE, overrides=command_line(tmp_path, budget), resume=True)
    assert (again.exit_status, again.steps) == (1, stopped.steps)
    abandoned = {path.name: path / "metrics.jsonl" for path in (stopped.directory / "abandoned").iterdir()}
    assert sorted(abandoned) == ["attempt-0", "attempt-1"]
    assert abandoned["attempt-0"].read_text() == first
    longer = {**budget, "kl.budget.max": "100"}
    result = keel.train(BASE, overrides=command_line(tmp_path, longer), resume=True)
    assert (result.exit_status, result.steps) == (0, 20)
    whole = keel.train(BASE, overrides=command_line(tmp_path / "whole", longer))
    assert lines(result.directory, "metrics.jsonl") == lines(whole.directory, "metrics.jsonl")


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model.lora.r=2",),
        ("reference.kind=ema", "reference.every=1", "reference.alpha=0.3"),
        ("model.lora.r=2", "reference.kind=ema", "reference.every=1"),
        ("kl.controller.name=pid", "kl.controller.target=0.001", "optim.schedule=cosine"),
    ],
    ids=lambda overrides: " ".join(overrides) or "plain",
)
def test_taken_back_in_memory_is_the_same_as_loaded_anew(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    config = small_config(*overrides)
    run = build_run(config, build_policy(config)).run
    state = State(kl=run.controller.init())
    for _ in range(2):
        state = train_step(run, state).state
    folder = save_checkpoint(tmp_path, run, state)
    expected = [train_step(run, state)]
    expected.append(train_step(run, expected[0].state))
    restore_weights(folder, run.policy.model)
    state = load_checkpoint(folder, run)
    for step in expected:
        state, metrics, _ = train_step(run, state)
        for name, value in step.metrics.items():
            if not name.startswith(("time/", "speed/", "memory/")):
                assert metrics[name] == value, name
    assert all(bool(torch.isfinite(p).all()) for p in run.policy.model.parameters())
