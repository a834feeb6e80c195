"""The first step's check: a wrong pass, reference or sampler stops the run before anything is trained on."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import keel
from keel.models.scorer import ScoreRows
from keel.reference.kinds import build_reference
from keel.rollout.native.engine import NativeEngine
from keel.run.build import build_policy
from keel.trainer.guards import Step0Limits, step0_limits, step0_violations
from keel.trainer.options import GuardLimits
from trainer.small import small_config
from trainer.test_guards import kinds, read, train

HERE = "trainer.test_step0"


def plain(model: Any, rows: ScoreRows, temperature: float) -> Tensor:
    out = model(input_ids=rows.tokens, attention_mask=rows.attention_mask, position_ids=rows.position_ids)
    logp = (out.logits[:, :-1].float() / temperature).log_softmax(-1)
    return rows.completion(logp.gather(-1, rows.tokens[:, 1:, None]).squeeze(-1))


def right_scorer(model: Any, rows: ScoreRows, *, temperature: float) -> Tensor:
    return plain(model, rows, temperature)


def wrong_in_training(model: Any, rows: ScoreRows, *, temperature: float) -> Tensor:
    """The pass with gradients computes something else, as a kernel with a race did."""
    logp = plain(model, rows, temperature)
    return logp - 0.2 * (rows.tokens[:, :1] % 2) if torch.is_grad_enabled() else logp


def wrong_in_both(model: Any, rows: ScoreRows, *, temperature: float) -> Tensor:
    """An error that policy and reference share."""
    return plain(model, rows, 2 * temperature)


def hidden_from_the_prompt(model: Any, rows: ScoreRows, *, temperature: float) -> Tensor:
    """The error of the chess system: the loss mask serves as the attention mask."""
    mask = torch.zeros_like(rows.attention_mask)
    for row, length in enumerate(rows.prompt_lengths.tolist()):
        mask[row, length - 1 :] = rows.attention_mask[row, length - 1 :]
    return plain(model, replace(rows, attention_mask=mask), temperature)


class Stale(NativeEngine):
    """An engine that samples with other weights than the policy's."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__(model, tokenizer, copy=True)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))

    def sync(self, policy: Any, version: int | None = None) -> None:
        pass


def at_start(run: Path) -> list[dict[str, Any]]:
    return [event for event in read(run / "events.jsonl") if event["kind"] in ("kl/at-start", "sampler/mismatch")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        [],
        ["kl.estimator=exact"],
        ["kl.beta=0"],
        ["reference.kind=ema"],
        ["model.lora.r=2"],
        ["optim.minibatches=3"],
        ["loss.num_iterations=2"],
        ["optim.precision=bfloat16", "kl.estimator=exact"],
        ["rollout.temperature=0.7", "rollout.top_k=5"],
        ["rollout.max_staleness=1"],
        [f"model.scorer={HERE}:right_scorer"],
        ["model.lora.r=2", "model.lora.dropout=0.5"],
    ],
    ids=lambda options: " ".join(options) or "default",
)
def test_a_sound_run_passes(options, tmp_path):
    result = train(tmp_path, *options)
    assert result.stopped is None
    assert at_start(result.directory) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "code", "metric"),
    [
        ([f"model.scorer={HERE}:wrong_in_training"], "kl/at-start", "kl/policy_ref/k3/mean"),
        ([f"model.scorer={HERE}:wrong_in_both"], "sampler/mismatch", "kl/sampler_policy/k3/mean"),
        ([f"model.scorer={HERE}:hidden_from_the_prompt"], "sampler/mismatch", "kl/sampler_policy/k3/mean"),
        ([f"rollout.engine={HERE}:Stale"], "sampler/mismatch", "kl/sampler_policy/k3/mean"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_a_fault_stops_the_run_at_its_first_step(options, code, metric, tmp_path):
    result = train(tmp_path / "stop", *options)
    assert result.exit_status == 1
    assert not (result.directory / "metrics.jsonl").exists()  # no update was made
    stop = next(event for event in read(result.directory / "events.jsonl") if event["kind"] == "stop")
    assert stop["code"] == code
    assert "\n" not in result.stopped
    for part in (metric, "keel doctor", "guards.on_step0_kl=warn"):
        assert part in result.stopped
    assert not (result.directory / "checkpoints" / "step-1").exists()
    assert code in {finding["code"] for finding in json.loads((result.directory / "findings.json").read_text())}
    warned = train(tmp_path / "warn", *options, "guards.on_step0_kl=warn")
    assert warned.stopped is None
    assert len(read(warned.directory / "metrics.jsonl")) == 4
    assert code in kinds(warned.directory)
    assert "stop" not in kinds(warned.directory)


@pytest.mark.parametrize("guards", [[], ["guards.on_nans=stop"]], ids=["with step-0", "without"])
def test_a_stopped_run_that_is_resumed_is_checked_again(guards, tmp_path):
    options = [f"model.scorer={HERE}:wrong_in_training", *guards]
    first = train(tmp_path, *options)
    again = keel.train(first.directory, resume=True)
    assert again.stopped == first.stopped
    warned = keel.train(first.directory, overrides=["guards.on_step0_kl=warn"], resume=True)
    assert warned.stopped is None
    assert [line["step"] for line in read(first.directory / "metrics.jsonl")] == [1, 2, 3, 4]


def nan_at_first(model: Any, rows: ScoreRows, *, temperature: float) -> Tensor:
    return plain(model, rows, temperature) * float("nan")


def test_numbers_that_are_none_are_no_agreement(tmp_path):
    assert train(tmp_path, f"model.scorer={HERE}:nan_at_first").exit_status == 1


def limits(reference: Any = "frozen", **more: Any) -> Step0Limits:
    loaded = build_policy(small_config(*more.pop("options", ())))
    made = build_reference(reference, loaded) if isinstance(reference, str) else reference
    settings = {"amp_dtype": None, "same_modules": True, "weighed": False, **more}
    return step0_limits(loaded.model, made, GuardLimits(), **settings)


def test_limits_follow_precision_dropout_reference_and_sampler():
    exact, rounded = GuardLimits.kl_at_start_fp32, GuardLimits.kl_at_start
    warning, error = GuardLimits.sampler_kl_warning, GuardLimits.sampler_kl_error
    assert (exact, rounded) == (1e-6, 1e-3)
    assert limits() == Step0Limits(exact, exact)
    assert limits(same_modules=False) == Step0Limits(exact, warning)
    assert limits(same_modules=False, weighed=True) == Step0Limits(exact, error)
    assert limits(amp_dtype=torch.bfloat16) == Step0Limits(rounded, warning)
    assert limits(options=["model.dtype=bfloat16"]) == Step0Limits(rounded, warning)
    assert limits(options=["model.lora.r=2", "model.lora.dropout=0.1"]) == Step0Limits(None, None)
    assert limits(reference=None) == Step0Limits(None, exact)
    assert limits(reference=object()) == Step0Limits(None, exact)  # a user's own: its weights may be others


@pytest.mark.parametrize("bounds", [Step0Limits(1e-6, 1e-6), Step0Limits(1e-3, 0.01)])
def test_the_kl_that_a_racing_kernel_gave_is_a_violation(bounds):
    """0.039 nats per token in the shape of a 7B model, whose weights were equal."""
    line = {"kl/policy_ref/k3/mean": 0.039, "kl/sampler_policy/k3/mean": 0.02}
    found = step0_violations(line, bounds, "stop", "advice")
    assert [(violation.code, violation.action) for violation in found] == [
        ("kl/at-start", "stop"),
        ("sampler/mismatch", "stop"),
    ]
    assert "0.039" in found[0].message
    rounding = {"kl/policy_ref/k3/mean": 0.9 * bounds.reference, "kl/policy_ref/exact/mean": -0.9 * bounds.reference}
    assert step0_violations(rounding, bounds, "stop", "") == []
    for wrong in (1.1 * bounds.reference, math.inf, math.nan):
        assert (
            "exact" in step0_violations({**rounding, "kl/policy_ref/exact/mean": wrong}, bounds, "stop", "")[0].message
        )
    assert step0_violations(line, Step0Limits(None, None), "stop", "") == []
