"""Advantage scale, one update and truncation: hand-computed figures, and exactly restored weights."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from doctor.schooled import schooled_config
from keel.base.types import Reward
from keel.doctor.keel_subject import KeelSubject, build_subject
from keel.doctor.probes.collection import probe_truncation
from keel.doctor.probes.objective import amplification, group_spreads, probe_advantage, token_weights
from keel.doctor.probes.update import loss_gradients, one_digit, probe_update, scored, undone, with_signal
from keel.losses.reductions import get_reduction
from keel.models.fingerprint import fingerprint


@pytest.fixture(scope="module")
def setup() -> KeelSubject:
    return build_subject(schooled_config())


def rewarded(setup: KeelSubject, *totals: float) -> KeelSubject:
    """The same batch with other rewards, equal in every group."""
    groups = tuple(replace(group, rewards=tuple(Reward(total) for total in totals)) for group in setup.groups)
    return replace(setup, batch=setup.pack(groups))


def test_spreads_and_amplification_by_hand() -> None:
    rewards = torch.tensor([0.0, 1.0, 0.5, 0.5, 0.2, 0.24])
    spread = group_spreads(rewards, torch.tensor([0, 0, 1, 1, 2, 2]))
    # two values a and b have std |a − b|/√2; the middle group has no spread and is left out
    torch.testing.assert_close(spread, torch.tensor([0.04, 1.0], dtype=torch.float64) / math.sqrt(2))
    figures = amplification(spread, rewards, "group")
    assert figures["amplification_max"] == pytest.approx(1 / (0.04 / math.sqrt(2) + 1e-4))
    assert amplification(spread, rewards, "none")["amplification_max"] == 1.0


def test_a_tiny_spread_is_an_error_only_where_it_is_divided_by(setup: KeelSubject) -> None:
    tight = rewarded(setup, 0.5, 0.5, 0.5, 0.51)
    assert [f.code for f in probe_advantage(tight).findings] == ["advantage/amplified"]
    plain = replace(tight, built=replace(tight.built, run=replace(tight.run)))
    plain.run.loss = tight.run.loss.model_copy(update={"scale_rewards": "none"})
    assert not probe_advantage(plain).findings


def test_equal_rewards_have_nothing_to_divide_by(setup: KeelSubject) -> None:
    outcome = probe_advantage(rewarded(setup, 1.0, 1.0, 1.0, 1.0))
    assert not outcome.findings
    assert outcome.figures["groups_with_spread"] == 0


@pytest.mark.parametrize(("reduction", "bias"), [("sequence_mean", 4.0), ("token_mean", 1.0), ("constant", 1.0)])
def test_the_weight_of_a_token_in_short_and_long_completions(reduction: str, bias: float) -> None:
    mask = torch.tensor([[True] * 2 + [False] * 6, [True] * 8])
    weights = token_weights(mask, get_reduction(reduction), 10)
    assert (weights[0, 0] / weights[1, 0]).item() == pytest.approx(bias)
    assert weights[0, 5].item() == 0.0


def test_an_update_is_measured_and_undone_bit_for_bit(setup: KeelSubject) -> None:
    before = fingerprint(setup.policy.model)
    outcome = probe_update(setup)
    assert fingerprint(setup.policy.model) == before
    assert setup.run.optimizer.updates == 0
    assert not setup.run.optimizer.inner.state
    assert all(parameter.grad is None for parameter in setup.policy.model.parameters())
    figures = outcome.figures
    # a small step: KL grows with its square
    first, rate = setup.of_batch["update"], setup.run.optimizer.schedule(0)
    assert first.kl(2 * rate) / figures["kl_after"] == pytest.approx(4.0, rel=0.05)
    assert figures["kl_after"] / first.kl(rate / 2) == pytest.approx(4.0, rel=0.05)
    assert not outcome.findings


def test_undone_brings_moments_and_schedule_back(setup: KeelSubject) -> None:
    optimizer = setup.run.optimizer
    schedule, before = optimizer.schedule, fingerprint(setup.policy.model)

    def move_and_fail() -> None:
        with undone(optimizer):
            for parameter in optimizer.parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.schedule = lambda update: 9.0
            optimizer.step()
            assert fingerprint(setup.policy.model) != before
            raise RuntimeError("on the way")

    with pytest.raises(RuntimeError, match="on the way"):
        move_and_fail()
    assert fingerprint(setup.policy.model) == before
    assert optimizer.schedule is schedule
    assert optimizer.updates == 0


def test_rewards_that_do_not_differ_still_show_the_learning_rate(setup: KeelSubject) -> None:
    outcome = probe_update(rewarded(setup, 1.0, 1.0, 1.0, 1.0))
    assert outcome.figures["real_rewards"] == 0.0
    assert outcome.figures["kl_after"] > 0


def test_the_advised_learning_rate_passes() -> None:
    findings = probe_update(build_subject(schooled_config("optim.learning_rate=0.02"))).findings
    assert [finding.code for finding in findings] == ["optim/lr-too-high"]
    advised = findings[0].advice.split(",")[0].removeprefix("set ")
    assert not probe_update(build_subject(schooled_config(advised))).findings


def test_a_reward_that_is_not_a_number_makes_the_update_non_finite(setup: KeelSubject) -> None:
    outcome = probe_update(rewarded(setup, math.nan, 1.0, 0.0, 0.5))
    assert [finding.code for finding in outcome.findings] == ["optim/non-finite"]


def test_prompts_at_the_limit_are_counted() -> None:
    cut = build_subject(schooled_config("data={max_prompt_length: 6, truncation: left}"))
    outcome = probe_truncation(cut)
    assert outcome.figures["prompts_cut"] == 1.0
    assert [(finding.code, finding.severity) for finding in outcome.findings] == [("prompt/truncated", "error")]


def test_lengths_of_an_ordinary_batch(setup: KeelSubject) -> None:
    outcome = probe_truncation(setup)
    lengths = [len(c.tokens) for g in setup.groups for c in g.completions]
    assert outcome.figures["longest_completion"] == max(lengths)
    assert not outcome.findings


def test_a_loss_scale_changes_nothing_but_the_precision(setup: KeelSubject, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp16 multiplies the loss and divides in the step by the same number, so norm and KL do not change."""
    plain = probe_update(setup).figures
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scaler.scale(torch.zeros(()))
    monkeypatch.setattr(setup.run.optimizer, "scaler", scaler)
    scaled = probe_update(setup).figures
    assert scaled == pytest.approx(plain, rel=1e-3)
    assert scaler.get_scale() == 2.0**16


def test_a_scale_that_overflows_is_lowered(setup: KeelSubject, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, _ = with_signal(scored(setup), setup)
    gradients, _ = loss_gradients(setup, batch)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    scaler.scale(torch.zeros(()))
    monkeypatch.setattr(setup.run.optimizer, "scaler", scaler)
    lowered, _ = loss_gradients(setup, batch)
    for before, after in zip(gradients, lowered, strict=True):
        assert before is not None
        assert after is not None
        torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-7)


def test_a_rate_is_rounded_down_to_one_digit():
    for exponent in range(-8, 2):
        for digit in range(1, 10):
            rate = float(f"{digit}e{exponent}")
            assert one_digit(rate) == rate
            assert one_digit(1.09 * rate) == rate
