"""Losses that users wrote themselves: bounds and masks the wrong way round, shapes that cancel, values that are cut."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from faults.losses import loss_fault, term_with
from keel.kl.ratios import finite_floor, select
from keel.losses.policy import LossInputs, PolicyTerm


def is_action(inputs: LossInputs) -> Tensor:
    """The mask as truth values, whatever type it has."""
    return inputs.mask.bool()


@loss_fault(
    "loss/clip-bounds-swapped",
    "the clip's lower bound is above its upper one, so that it gives the upper one for every ratio",
    "loss/clip",
    "loss/no-gradient",
)
def clip_bounds_swapped(inputs: LossInputs, options: Any) -> PolicyTerm:
    ratio, limits = inputs.ratio(), inputs.limits
    inside = ratio.clamp(1 + limits.high, 1 - limits.low)
    return PolicyTerm(-torch.minimum(ratio * inputs.advantages, inside * inputs.advantages), ratio)


@loss_fault(
    "loss/mask-upside-down",
    "the mask is that of what to leave out, and all that the model wrote is left out",
    "loss/no-gradient",
    "mask/not-actions",
)
def mask_upside_down(inputs: LossInputs, options: Any) -> PolicyTerm:
    term = term_with(inputs)
    return PolicyTerm(term.loss * ~is_action(inputs), term.ratio)


@loss_fault(
    "loss/advantage-centred-over-tokens",
    "the mean that is taken off the advantages is each row's own, and nothing is left of them",
    "loss/no-gradient",
    "loss/sign",
)
def advantage_centred_over_tokens(inputs: LossInputs, options: Any) -> PolicyTerm:
    return term_with(inputs, advantages=inputs.advantages - inputs.advantages.mean(-1, keepdim=True))


@loss_fault(
    "loss/advantage-squashed-above-zero",
    "a sigmoid brings the advantages between zero and one, so that bad answers are made likelier too",
    "loss/sign",
)
def advantage_squashed_above_zero(inputs: LossInputs, options: Any) -> PolicyTerm:
    return term_with(inputs, advantages=inputs.advantages.sigmoid())


@loss_fault(
    "loss/cut-as-an-outlier",
    "every token's loss is cut to a hundredth, as if it were a spike, and what is cut has no gradient",
    "loss/no-gradient",
    "loss/clip",
)
def cut_as_an_outlier(inputs: LossInputs, options: Any) -> PolicyTerm:
    term = term_with(inputs)
    return PolicyTerm(term.loss.clamp(-0.01, 0.01), term.ratio)


@loss_fault(
    "loss/advantages-summed-over-rows",
    "what should be summed along a row, as rewards to go are, is summed from row to row",
    "loss/sign",
    "loss/scale",
)
def advantages_summed_over_rows(inputs: LossInputs, options: Any) -> PolicyTerm:
    return term_with(inputs, advantages=inputs.advantages.cumsum(0))


@loss_fault(
    "loss/divided-by-the-probability",
    "what is weighed by one over the old probability is the log-probability, so that rare tokens rule",
    "loss/scale",
    "loss/clip",
)
def divided_by_the_probability(inputs: LossInputs, options: Any) -> PolicyTerm:
    old = finite_floor(select(inputs.old_logp, inputs.mask)).clamp_min(-12.0)
    logp = finite_floor(select(inputs.logp, inputs.mask))
    return PolicyTerm(-(-old).exp().detach() * inputs.advantages * logp, inputs.ratio())


@loss_fault(
    "loss/old-policy-one-place-off",
    "the old log-probabilities are those of the token before",
    "loss/clip",
    "loss/scale",
    "loss/no-gradient",
    "scoring/shifted",
)
def old_policy_one_place_off(inputs: LossInputs, options: Any) -> PolicyTerm:
    return term_with(inputs, old_logp=inputs.old_logp.roll(1, -1))
