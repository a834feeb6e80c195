"""Guards: what they see, what they say, and that a step they stop is still a whole step."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import keel
from keel.base.errors import KeelError
from keel.kl import KLState
from keel.kl.options import KLBudget
from keel.loggers import Logger, MultiLogger, RunDirectory
from keel.run.build import build_policy, build_run
from keel.trainer.checkpoint import load_checkpoint, save_checkpoint
from keel.trainer.guards import (
    MIN_NORMS,
    GuardViolation,
    final_violation,
    find_violation,
    over_budget,
    spike_limit,
)
from keel.trainer.options import GuardLimits, GuardOptions
from keel.trainer.records import measure_final
from keel.trainer.rollback import roll_back
from keel.trainer.sample import problem_seed
from keel.trainer.state import State, TrainingRun, step_seed
from keel.trainer.step import train_step
from trainer.small import BASE, small_config
from trainer.test_step import ALWAYS, STATISTICS, make, weights

QUICK = {"run.max_steps": "4", "checkpoint.every": "2"}


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def train(folder: Path, *overrides: str, **more: Any) -> Any:
    settings = {**QUICK, **dict(override.split("=", 1) for override in overrides), "run.dir": str(folder)}
    return keel.train(BASE, overrides=[f"{name}={value}" for name, value in settings.items()], **more)


def kinds(run: Path) -> list[str]:
    return [event["kind"] for event in read(run / "events.jsonl")]


def at(**changes: Any) -> State:
    return State(kl=KLState(beta=0.1, base=0.1), **changes)


@pytest.mark.parametrize(
    ("unit", "metrics", "broken"),
    [
        ("per_token", {"kl/policy_ref/k3/mean": 0.1, "kl/policy_ref/k3/p95": 0.2}, None),
        ("per_token", {"kl/policy_ref/k3/mean": 0.11, "kl/policy_ref/k3/p95": 0.1}, "k3/mean is 0.11 nats per token"),
        ("per_token", {"kl/policy_ref/k3/mean": 0.05, "kl/policy_ref/k3/p95": 0.21}, "k3/p95 is 0.21 nats per token"),
        ("per_token", {"kl/policy_ref/k3/mean": math.nan}, "k3/mean is nan"),
        ("per_token", {"kl/policy_ref/k3/mean": 0.5, "kl/policy_ref/exact/mean": 0.05}, None),
        ("per_token", {"kl/policy_ref/sequence/mean": 9.0}, None),
        ("per_sequence", {"kl/policy_ref/sequence/mean": 0.05, "kl/policy_ref/sequence/p95": 0.19}, None),
        ("per_sequence", {"kl/policy_ref/sequence/mean": 0.2}, "sequence/mean is 0.2 nats per sequence"),
        ("per_sequence", {"kl/policy_ref/sequence/mean": 0.0, "kl/policy_ref/sequence/p95": 0.3}, "sequence/p95"),
        ("per_token", {}, None),
    ],
)
def test_the_budget_is_a_mean_and_twice_that_for_the_95th_percentile(
    unit: Any, metrics: dict[str, float], broken: str | None
) -> None:
    message = over_budget(metrics, KLBudget(max=0.1, unit=unit))
    assert message is None if broken is None else broken in str(message)
    assert over_budget(metrics, None) is None


def test_which_trouble_asks_for_what() -> None:
    options, limit = GuardOptions(max_consecutive_nans=3, on_nans="stop"), KLBudget(max=0.1, action="rollback")
    bad = {"kl/policy_ref/k3/mean": 0.5}
    assert find_violation(at(consecutive_skips=2), {}, options, limit) is None
    skips = find_violation(at(consecutive_skips=3), bad, options, limit)
    budget = find_violation(at(consecutive_skips=2), bad, options, limit)
    assert skips is not None
    assert (skips.code, skips.action) == ("optim/non-finite", "stop")
    assert budget is not None
    assert (budget.code, budget.action) == ("kl/over-budget", "rollback")


def test_a_run_of_skipped_spikes_is_not_called_non_finite() -> None:
    options = GuardOptions(max_consecutive_nans=3, on_nans="stop")
    spikes = find_violation(at(consecutive_skips=3, spike_skips=3), {}, options)
    mixed = find_violation(at(consecutive_skips=3, spike_skips=2), {}, options)
    assert spikes is not None
    assert mixed is not None
    assert (spikes.code, mixed.code) == ("optim/spike", "optim/non-finite")


def test_a_violation_that_only_warns_does_not_hide_a_graver_one() -> None:
    bad = {"kl/policy_ref/k3/mean": 0.5}
    options = GuardOptions(max_consecutive_nans=3, on_nans="warn")
    violation = find_violation(at(consecutive_skips=3), bad, options, KLBudget(max=0.1))
    assert violation is not None
    assert (violation.code, violation.action) == ("kl/over-budget", "stop")


def test_a_spike_is_measured_against_the_median_of_enough_norms() -> None:
    limits = GuardLimits(grad_spike=4.0)
    assert spike_limit((1.0,) * (MIN_NORMS - 1), limits) is None
    assert spike_limit((1.0, 3.0, 100.0) * 4, limits) == 12.0


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["warn", "skip"])
def test_a_spike_is_said_and_only_skipped_on_request(tmp_path: Path, answer: str) -> None:
    """Rewards of step 12 are 10⁴ times their size and not divided by their deviation: so is the gradient."""
    task = ["task.name=trainer.faults:poisoned", "task.first=12", "task.last=12", "task.factor=1e4"]
    plain = ["loss.scale_rewards=none", "optim.max_grad_norm=null", "run.max_steps=14", "kl.beta=0"]
    run = train(tmp_path, *task, *plain, f"guards.on_spike={answer}").directory
    lines = {line["step"]: line for line in read(run / "metrics.jsonl")}
    assert [step for step, line in lines.items() if line["guard/spike"]] == [12]
    assert [step for step, line in lines.items() if line["guard/skipped"]] == ([12] if answer == "skip" else [])
    event = next(event for event in read(run / "events.jsonl") if event["kind"] == "guard/spike")
    assert event["step"] == 12
    assert "running median" in event["message"]
    if answer == "skip":
        assert "spike" in next(e for e in read(run / "events.jsonl") if e["kind"] == "guard/skipped")["message"]


SPIKES = ["task.name=trainer.faults:poisoned", "task.first=12", "task.last=99", "task.factor=1e4", "kl.beta=0"]
PLAIN = ["loss.scale_rewards=none", "optim.max_grad_norm=null", "guards.on_spike=skip"]


@pytest.mark.slow
def test_spikes_that_are_skipped_never_become_the_usual(tmp_path: Path) -> None:
    """Every step from the 12th on: were their norms in the window, its median would be a spike's from the 23rd on."""
    result = train(tmp_path, *SPIKES, *PLAIN, "run.max_steps=30", "guards.max_consecutive_nans=100")
    lines = {line["step"]: line for line in read(result.directory / "metrics.jsonl")}
    assert [step for step, line in lines.items() if line["guard/spike"]] == list(range(12, 31))
    assert [step for step, line in lines.items() if line["guard/skipped"]] == list(range(12, 31))
    assert not any(line["guard/nonfinite"] for line in lines.values())
    skipped = [event for event in read(result.directory / "events.jsonl") if event["kind"] == "guard/skipped"]
    assert {(event["cause"], event["nonfinite"]) for event in skipped} == {("spike", None)}
    assert "optim/spike" in result.summary["findings"]
    assert "optim/non-finite" not in result.summary["findings"]


@pytest.mark.slow
def test_a_run_of_skipped_spikes_ends_under_its_own_code(tmp_path: Path) -> None:
    result = train(
        tmp_path, *SPIKES, *PLAIN, "run.max_steps=30", "guards.max_consecutive_nans=3", "guards.on_nans=stop"
    )
    assert result.exit_status == 1
    assert "step 14" in result.stopped
    assert [e["code"] for e in read(result.directory / "events.jsonl") if e["kind"] == "stop"] == ["optim/spike"]
    findings = {f["code"]: f for f in json.loads((result.directory / "findings.json").read_text())}
    assert findings["optim/lr-too-high"]["severity"] == "error"  # a rate of 0.01, which the spikes come from
    assert findings["optim/spike"]["evidence"].startswith("explained by optim/lr-too-high: ")
    assert "step 14" in findings["optim/spike"]["evidence"]
    assert "optim/non-finite" not in findings


@pytest.mark.slow
def test_a_step_with_one_bad_update_of_two_is_a_bad_step(tmp_path: Path) -> None:
    """The rewards of a step's last problem, alone in the second minibatch, overflow."""
    half = ["optim.minibatches=2", "task.name=trainer.faults:poisoned", "task.only=2", "task.first=1", "task.last=99"]
    run, state = make(*half)
    before = weights(run)
    step = train_step(run, state)
    assert (step.metrics["guard/skipped"], step.metrics["guard/nonfinite"]) == (0.5, 0.5)
    assert (step.state.consecutive_skips, step.state.policy_version, len(step.state.norms)) == (1, 1, 1)
    assert not torch.equal(weights(run), before)  # the other update was made
    result = train(tmp_path, *half, "guards.max_consecutive_nans=3", "guards.on_nans=stop", "run.max_steps=9")
    assert result.exit_status == 1
    assert "step 3" in result.stopped
    assert "optim/non-finite" in result.summary["findings"]


def test_the_end_is_judged_like_a_step() -> None:
    limits = GuardOptions(on_nans="stop"), KLBudget(max=0.1, action="rollback")
    assert final_violation(9, {"kl/policy_ref/k3/mean": 0.05, "logp/policy_mean": -1.0}, *limits) is None
    assert final_violation(9, {}, *limits) is None
    far = final_violation(9, {"kl/policy_ref/k3/mean": 0.5, "logp/policy_mean": -1.0}, *limits)
    assert far is not None
    assert (far.code, far.action) == ("kl/over-budget", "rollback")
    assert "step 9" in far.message


def test_a_policy_that_ends_not_finite_is_logged_although_its_budget_was_exceeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keel.trainer.loop.measure_final", lambda run, state: {"logp/policy_mean": math.nan})
    budget = ("kl.budget.max=1e-9", "kl.budget.action=warn", "guards.on_nans=warn")
    result = train(tmp_path, *budget, "optim.learning_rate=0.01", "run.max_steps=3")
    assert kinds(result.directory).count("kl/over-budget") == 1
    assert kinds(result.directory).count("optim/non-finite") == 1


@pytest.mark.parametrize("overrides", [(), ("kl.beta=0", "kl.measure_every=0")], ids=["reference", "none"])
def test_weights_that_are_not_finite_are_seen_at_the_end_and_not_sampled_from(overrides: tuple[str, ...]) -> None:
    run, state = make(*overrides)
    finite = measure_final(run, state)
    assert bool(finite) == (not overrides)
    run.optimizer.parameters[1].data[0] = torch.nan
    violation = final_violation(4, measure_final(run, state), GuardOptions(on_nans="stop"))
    assert violation is not None
    assert (violation.code, violation.action) == ("optim/non-finite", "stop")


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("kl.exact=true", "optim.minibatches=2", "loss.num_iterations=2"),
        ("model.lora.r=2", "model.lora.dropout=0.3", "reference.kind=ema", "reference.every=1"),
        ("kl.beta=0", "kl.measure_every=3"),
    ],
    ids=["plain", "exact", "lora", "seldom"],
)
def test_the_end_is_what_the_next_step_would_report(overrides: tuple[str, ...]) -> None:
    run, state = make(*overrides)
    for _ in range(2):
        torch.manual_seed(step_seed(run.seed, state))
        state = train_step(run, state).state
    before = (state, torch.get_rng_state().tolist(), weights(run).tolist())
    measured = measure_final(run, state)
    assert (state, torch.get_rng_state().tolist(), weights(run).tolist()) == before
    torch.manual_seed(step_seed(run.seed, state))
    line = train_step(run, state).metrics
    assert measured["kl/policy_ref/k3/mean"] > 0
    if "kl.measure_every=3" not in overrides:
        assert measured == {name: line[name] for name in measured}


def test_a_non_finite_loss_at_the_first_step_still_writes_a_complete_line(tmp_path: Path) -> None:
    result = train(tmp_path, "loss.loss_type=trainer.faults:nan_loss", "run.max_steps=1")
    line = read(result.directory / "metrics.jsonl")[0]
    missing = {*ALWAYS, *STATISTICS} - set(line)
    assert not missing
    assert line["guard/skipped"] == 1.0
    assert line["loss/policy"] is None
    assert "loss/policy" in line["nonfinite"]
    assert line["kl/policy_ref/k3/mean"] is not None
    skipped = next(event for event in read(result.directory / "events.jsonl") if event["kind"] == "guard/skipped")
    assert skipped["nonfinite"] == "loss/policy"
    batch = json.loads((result.directory / skipped["batch"]).read_text())
    assert skipped["batch"] == "skipped/step-1.json"
    assert batch["first_nonfinite"] == "loss/policy"
    assert len(batch["completions"]) == 3 * 4
    for record in batch["completions"]:
        names = ("tokens", "old_logp", "ref_logp", "sample_logp")
        assert len({len(record[name]) for name in names}) == 1
        assert record["text"]
        assert None not in (record["reward"], record["advantage"])


def test_a_skipped_update_leaves_weights_moments_and_schedule_alone() -> None:
    run, state = make("loss.loss_type=trainer.faults:nan_loss", "optim.warmup_steps=5")
    before, rate = weights(run), run.optimizer.lr
    state = train_step(run, state).state
    assert torch.equal(weights(run), before)
    assert run.optimizer.lr == rate
    assert not run.optimizer.inner.state
    assert (state.consecutive_skips, state.policy_version, state.norms) == (1, 0, ())


def test_the_parameter_with_the_first_non_finite_gradient_is_named() -> None:
    run, _ = make()
    names = [name for name, _ in run.policy.model.named_parameters()]
    for parameter in run.optimizer.parameters:
        parameter.grad = torch.zeros_like(parameter)
    run.optimizer.parameters[2].grad[0] = torch.inf
    metrics = run.optimizer.step()
    assert metrics["guard/skipped"].value == 1.0
    assert run.optimizer.nonfinite == names[2]


def fp16(run: TrainingRun, limit: float, scale: float = 2.0**16) -> None:
    """A loss scaler on the CPU, and gradients that overflow while its scale is above `limit`."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.zeros(()))
    run.optimizer.scaler = scaler
    run.optimizer.parameters[0].register_hook(lambda grad: grad / 0.0 if scaler.get_scale() > limit else grad)


def test_an_overflow_that_the_loss_scaler_handles_is_no_defect_of_the_policy() -> None:
    run, state = make()
    fp16(run, limit=2.0**8)
    before = weights(run)
    for halvings in range(1, 9):
        state, metrics, _ = train_step(run, state)
        assert (metrics["guard/skipped"], metrics["guard/overflow"], metrics["guard/nonfinite"]) == (1.0, 1.0, 0.0)
        assert run.optimizer.loss_scale == 2.0 ** (16 - halvings)
        assert (state.good, state.policy_version, state.confirmed) == (True, 0, 0)
        assert find_violation(state, metrics, run.guards) is None
    assert torch.equal(weights(run), before)
    state, metrics, _ = train_step(run, state)
    assert (metrics["guard/skipped"], metrics["guard/overflow"], state.policy_version) == (0.0, 0.0, 1)
    assert not torch.equal(weights(run), before)


@pytest.mark.parametrize("overrides", [(), ("loss.loss_type=trainer.faults:nan_loss",)], ids=["gradient", "loss"])
def test_non_finite_numbers_that_no_loss_scale_removes_are_counted(overrides: tuple[str, ...]) -> None:
    run, state = make(*overrides)
    fp16(run, limit=0.0, scale=2.0**16 if overrides else 1.0)  # a gradient counts at the least scale, a loss at once
    for step in range(1, 6):
        state, metrics, _ = train_step(run, state)
        assert (metrics["guard/nonfinite"], metrics["guard/overflow"], state.consecutive_skips) == (1.0, 0.0, step)
    assert overrides or run.optimizer.loss_scale == 1.0
    violation = find_violation(state, metrics, run.guards)
    assert violation is not None
    assert violation.code == "optim/non-finite"


@pytest.mark.parametrize(("scale", "after"), [(64.0, 64.0), (1.0, 2.0**16)], ids=["backed off", "not the cause"])
def test_a_rollback_keeps_a_loss_scale_that_has_backed_off(tmp_path: Path, scale: float, after: float) -> None:
    run, state = make()
    fp16(run, limit=math.inf)
    with RunDirectory.create(tmp_path / "run") as directory:
        save_checkpoint(directory.checkpoints, run, state)
        run.optimizer.limit_loss_scale(0.0, scale)
        violation = GuardViolation("optim/non-finite", "", "rollback")
        back = roll_back(directory, MultiLogger(Logger()), run, train_step(run, state).state, violation)
        assert back is not None
        assert run.optimizer.loss_scale == after
        fp16(run, limit=math.inf)  # a resume builds a new scaler
        state = load_checkpoint(directory.checkpoints / "step-0", run)
        assert run.optimizer.loss_scale == after
        assert train_step(run, state).state.max_loss_scale is None


def test_kept_batches_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from keel.trainer import loop

    monkeypatch.setattr(loop, "MAX_SKIPPED_FILES", 2)
    run = train(tmp_path, "loss.loss_type=trainer.faults:nan_loss").directory
    assert sorted(path.name for path in (run / "skipped").iterdir()) == ["step-1.json", "step-2.json"]
    assert kinds(run).count("guard/skipped") == 4


def test_updates_that_keep_failing_end_the_run_cleanly_where_it_was_good(tmp_path: Path) -> None:
    more = ["loss.loss_type=trainer.faults:nan_loss", "guards.max_consecutive_nans=3", "guards.on_nans=stop"]
    result = train(tmp_path, *more, "run.max_steps=9")
    assert (result.exit_status, result.steps) == (1, 3)
    severities = {f["code"]: f["severity"] for f in json.loads((result.directory / "findings.json").read_text())}
    assert severities["optim/non-finite"] == "error"
    assert "optim/non-finite" in result.summary["findings"]
    assert "stop" in kinds(result.directory)


@pytest.mark.slow
@pytest.mark.parametrize("unit", ["per_token", "per_sequence"])
def test_a_kl_budget_that_stops_ends_within_the_budget(tmp_path: Path, unit: str) -> None:
    limit = 0.02 if unit == "per_token" else 0.5
    budget = [f"kl.budget.max={limit}", f"kl.budget.unit={unit}", "kl.beta=0", "checkpoint.every=1"]
    result = train(tmp_path, *budget, "run.max_steps=60", "optim.learning_rate=0.002")
    assert result.exit_status == 1
    assert 0 < result.steps < 60
    name = "k3" if unit == "per_token" else "sequence"
    lines = read(result.directory / "metrics.jsonl")
    assert lines[-1]["step"] == result.steps
    assert all(line[f"kl/policy_ref/{name}/mean"] <= limit and not line["guard/over_budget"] for line in lines)
    abandoned = read(result.directory / "abandoned" / "attempt-0" / "metrics.jsonl")
    assert abandoned[-1]["guard/over_budget"] == 1.0
    assert "kl/over-budget" in result.summary["findings"]
    assert json.loads((result.directory / "summary.json").read_text())["accuracy"]["after"] is not None


def test_another_attempt_has_other_problems_and_the_first_has_the_seeds_own() -> None:
    config = small_config("guards.on_step0_kl=warn")  # the same first step twice
    run = build_run(config, build_policy(config)).run
    first, again, second = (
        [group.problem.key for group in train_step(run, State(kl=run.controller.init(), attempt=a)).batch.groups]
        for a in (0, 0, 1)
    )
    assert first == again
    assert not set(first) & set(second)
    assert problem_seed(5, 0) == 5


def test_options_of_the_guards_are_checked() -> None:
    small_config("guards.on_nans=warn")
    with pytest.raises(KeelError, match=r"kl\.budget\.action=rollback with guards\.max_rollbacks=0"):
        small_config("guards.max_rollbacks=0", "kl.budget.max=1", "kl.budget.action=rollback")
    small_config("guards.max_rollbacks=0", "kl.budget.max=1", "kl.budget.action=stop")
    small_config("guards.max_rollbacks=1", "guards.grad_spike=3", "kl.budget.max=1", "kl.budget.action=rollback")
    with pytest.raises(KeelError, match=r"on_nans"):
        small_config("guards.on_nans=ignore")
