"""Losses that depend on old and new log-probabilities other than by their ratio at each token."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import Tensor

from doctor.schooled import schooled_config
from keel.doctor.keel_subject import build_subject
from keel.doctor.probes.objective import ratio_findings
from keel.losses import LOSSES, LossInputs, LossOptions, PolicyTerm
from keel.losses.policy import clipped


def weighed(inputs: LossInputs, options: LossOptions, weights: Tensor) -> PolicyTerm:
    term = clipped(inputs, options)
    return replace(term, loss=term.loss * weights.detach())


def one_place_off(inputs: LossInputs, options: LossOptions) -> PolicyTerm:
    return clipped(replace(inputs, old_logp=inputs.old_logp.roll(1, -1)), options)


def of_another_row(inputs: LossInputs, options: LossOptions) -> PolicyTerm:
    return clipped(replace(inputs, old_logp=inputs.old_logp.roll(1, 0)), options)


def by_one_over_p(inputs: LossInputs, options: LossOptions) -> PolicyTerm:
    return weighed(inputs, options, (-inputs.old_logp).exp())


def by_p(inputs: LossInputs, options: LossOptions) -> PolicyTerm:
    return weighed(inputs, options, inputs.logp.exp())


def by_surprise(inputs: LossInputs, options: LossOptions) -> PolicyTerm:
    """Correct: tokens are weighted by their NLL."""
    return weighed(inputs, options, -inputs.old_logp)


def by_doubt(inputs: LossInputs, options: LossOptions) -> PolicyTerm:
    """Correct: confident tokens have a smaller weight."""
    return weighed(inputs, options, (1 - inputs.logp.exp()) ** 2)


def by_what_came_before(inputs: LossInputs, options: LossOptions) -> PolicyTerm:
    """Correct: the ratio of all earlier tokens, without the token itself."""
    step = (inputs.logp.detach() - inputs.old_logp) * inputs.mask
    return PolicyTerm(-(step.cumsum(-1) - step).exp() * inputs.advantages * inputs.logp, inputs.ratio())


def for_long_rows(inputs: LossInputs, options: LossOptions) -> PolicyTerm:
    """Correct, but raises on short rows."""
    if inputs.logp.shape[-1] < 100:
        raise ValueError("what is this?")
    return clipped(inputs, options)


def found(loss: str) -> list[tuple[str, str]]:
    setup = build_subject(schooled_config(f"loss.loss_type={loss}"))
    return [(f.code, f.severity) for f in ratio_findings(setup, {})]


@pytest.mark.parametrize(
    ("name", "code", "severity"),
    [
        ("one_place_off", "loss/clip", "error"),
        ("of_another_row", "loss/clip", "error"),
        ("by_one_over_p", "loss/scale", "warning"),
        ("by_p", "loss/scale", "warning"),
    ],
)
def test_what_is_no_ratio_of_a_token_to_itself_is_named(name: str, code: str, severity: str) -> None:
    assert found(f"doctor.test_ratios:{name}") == [(code, severity)]


@pytest.mark.parametrize("name", ["by_surprise", "by_doubt", "by_what_came_before", "for_long_rows"])
def test_weights_that_may_be_meant_are_not_judged(name: str) -> None:
    assert found(f"doctor.test_ratios:{name}") == []


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_keels_own_losses_are_of_ratios(name: str) -> None:
    assert found(name) == []
