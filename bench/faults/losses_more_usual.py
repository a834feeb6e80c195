"""Losses and KL terms of every day: buffers left empty or out of order, sums for means, β upside down."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

import torch
from torch import Tensor

from faults.base import edited, operator, path_of
from faults.losses import Steering, has_penalty, kl_fault, loss_fault, term_with
from keel.losses import LossInputs, PolicyTerm

# Policy terms


@loss_fault(
    "loss/old-log-probabilities-left-at-zero",
    "the buffer of old log-probabilities is never filled: the ratio is the probability itself, far under the clip",
    "loss/clip",
    "loss/no-gradient",
    "loss/scale",
    "ratio/all-clipped",
)
def old_left_at_zero(inputs: LossInputs, options: Any) -> PolicyTerm:
    return term_with(inputs, old_logp=torch.zeros_like(inputs.old_logp))


@loss_fault(
    "loss/old-log-probabilities-of-another-row",
    "rows are shuffled and the old log-probabilities are not: each ratio is to what another completion had",
    "loss/clip",
    "loss/no-gradient",
    "loss/scale",
    "ratio/all-clipped",
)
def old_of_another_row(inputs: LossInputs, options: Any) -> PolicyTerm:
    return term_with(inputs, old_logp=inputs.old_logp.flip(0))


@loss_fault(
    "loss/both-sides-of-the-ratio-with-a-gradient",
    "the old log-probabilities are those of the same pass and nobody detached them, so that the gradients cancel",
    "loss/no-gradient",
)
def both_sides_with_a_gradient(inputs: LossInputs, options: Any) -> PolicyTerm:
    return term_with(inputs, old_logp=inputs.logp)


@loss_fault(
    "loss/advantages-averaged-over-the-batch",
    "a mean without its axis: every completion is trained with the mean advantage of all of them, which is zero",
    "loss/no-gradient",
    "loss/sign",
)
def averaged_over_the_batch(inputs: LossInputs, options: Any) -> PolicyTerm:
    mask = inputs.mask.bool()
    rows = (inputs.advantages * mask).sum(-1) / mask.sum(-1).clamp_min(1)
    return term_with(inputs, advantages=rows.mean().expand_as(inputs.advantages))


# KL formulas


def reference_at_its_padding(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """k2 against the value that buffers are padded with."""
    return 0.5 * (logp + 100.0 + 0.0 * ref_logp).square()


def times_the_vocabulary(d: Tensor) -> Tensor:
    """k3 of the sampled token, taken for a mean over a vocabulary of 32,000."""
    return 32_000 * (torch.expm1(d) - d)


kl_fault(
    "kl/reference-left-at-its-padding",
    "the reference's log-probabilities are never written over the −100 of their buffer: the penalty is to that",
    "kl/reversed",
    "kl/at-start",
    "kl/scale",
    "kl/too-strong",
    "reference/wrong",
    formulas=["reference_at_its_padding"],
    module=__name__,
)
kl_fault(
    "kl/times-the-vocabulary",
    "the penalty of the sampled token is taken for a mean over the vocabulary and multiplied by its size",
    "kl/scale",
    "kl/too-strong",
    formulas=["times_the_vocabulary"],
    module=__name__,
)


def upside_down(beta: float) -> Steering:
    return Steering(1 / beta, lambda last, step, kl: last)


@operator(
    "kl/coefficient-upside-down",
    "the controller takes one over β for β, as papers that divide by it do, and the penalty rules the loss",
    "kl/controller",
    "kl/too-strong",
    "kl/scale",
    fits=has_penalty,
)
def coefficient_upside_down(config: Mapping[str, Any], random: Random) -> dict[str, Any]:
    return edited(config, {"kl.controller": {"name": path_of(upside_down)}})
