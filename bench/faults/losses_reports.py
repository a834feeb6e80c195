"""Losses, KL formulas and controllers as their users report them: weights with a gradient, dual clips, integers."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from faults.base import edited, lookalike
from faults.losses import Steering, Strength, controller_fault, has_penalty, is_clipped, kl_fault, loss_fault, term_with
from keel.losses import LossInputs, PolicyTerm
from keel.losses.recipes import LOSSES

# Policy terms


@loss_fault(
    "loss/weight-not-detached",
    "ratio times log-probability, where the ratio should be detached: what is less likely than 1/e goes the wrong way",
    "loss/sign",
    "loss/scale",
)
def weight_not_detached(inputs: LossInputs, options: Any) -> PolicyTerm:
    ratio = inputs.ratio()
    return PolicyTerm(-ratio * inputs.logp * inputs.advantages, ratio)


def dual_clip(inputs: LossInputs, bound: float) -> PolicyTerm:
    """grpo's term, whose loss of a bad token is at most `bound` times its advantage."""
    term = term_with(inputs)
    most = -bound * inputs.advantages
    return replace(term, loss=torch.where(inputs.advantages < 0, torch.minimum(term.loss, most), term.loss))


@loss_fault(
    "loss/dual-clip-below-one",
    "the second clip, for bad tokens, is below 1, so that every one of them is held",
    "loss/no-gradient",
    "loss/clip",
    strength=(0.5, 0.8),
)
def dual_clip_below_one(inputs: LossInputs, options: Strength) -> PolicyTerm:
    return dual_clip(inputs, options.strength)


@loss_fault(
    "loss/surest-half-only",
    "the mask for tokens at which texts fork is upside down: only those that the policy is surest of are trained",
    "loss/no-gradient",
    "mask/not-actions",
)
def surest_half_only(inputs: LossInputs, options: Any) -> PolicyTerm:
    middle = inputs.old_logp[inputs.mask.bool()].median()
    return term_with(inputs, advantages=inputs.advantages * (inputs.old_logp > middle))


@loss_fault(
    "loss/advantage-as-integer",
    "advantages are stored as integers: those under one are 0 and are not trained",
    "loss/no-gradient",
    "loss/scale",
)
def advantage_as_integer(inputs: LossInputs, options: Any) -> PolicyTerm:
    return term_with(inputs, advantages=inputs.advantages.trunc())


# KL formulas


def reference_one_place_off(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """k2 against the reference's log-probability of the token before."""
    return 0.5 * (logp - ref_logp.roll(1, -1)).square()


def k1_cut_at_zero(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """log π − log p where it is above zero, so that no log shows a negative KL."""
    return (logp - ref_logp).clamp_min(0.0)


kl_fault(
    "kl/reference-one-place-off",
    "the reference's log-probabilities are those of the token before, as where its logits are not cut at the end",
    "kl/reversed",
    "kl/at-start",
    "kl/scale",
    formulas=["reference_one_place_off"],
    module=__name__,
)
kl_fault(
    "kl/k1-cut-at-zero",
    "log-ratios below zero are set to zero, so that the KL looks positive and only half of the tokens are held",
    "kl/reversed",
    "kl/scale",
    formulas=["k1_cut_at_zero"],
    module=__name__,
)

# Controllers


@controller_fault(
    "kl/controller-horizon-too-short",
    "the horizon is a tenth of a batch: a KL below its target turns β's sign, and one above it trebles β",
    target=(0.02, 0.1),
)
def horizon_too_short(beta: float, target: float = 0.05) -> Steering:
    return Steering(beta, lambda last, step, kl: last * (1 + 10 * max(-0.2, min(0.2, kl / target - 1))))


# Healthy


def dual_clip_at_three(inputs: LossInputs, options: Any) -> PolicyTerm:
    return dual_clip(inputs, 3.0)


dual_clip_recipe = replace(LOSSES["grpo"], term=dual_clip_at_three, takes_delta=False)


@lookalike("loss with a second clip far out for bad tokens", is_clipped)
def healthy_dual_clip(config: Any, random: Random) -> dict[str, Any]:
    return edited(config, {"loss.loss_type": "faults.losses_reports:dual_clip_recipe"})


def clamped_far_out(d: Tensor) -> Tensor:
    """k3 with the clamps of another trainer, which nothing reaches."""
    d = d.clamp(-20.0, 20.0)
    return (torch.expm1(d) - d).clamp(-10.0, 10.0)


@lookalike("estimator equal to k3, with clamps that nothing reaches", has_penalty)
def healthy_clamped_estimator(config: Any, random: Random) -> dict[str, Any]:
    changed = edited(config, {"kl.estimator": "faults.losses_reports:clamped_far_out", "kl.exact": False})
    changed["kl"].pop("gradient", None)
    return changed
