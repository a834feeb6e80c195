"""Losses, KL formulas and controllers as forks of trainers get them wrong: lengths, discounts, ratios, roundings."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from faults.base import edited, lookalike
from faults.losses import Steering, controller_fault, is_clipped, kl_fault, loss_fault, term_with
from keel.losses import PolicyTerm
from keel.losses.recipes import LOSSES

# Policy terms


@loss_fault("loss/bad-ones-only", "completions above the group's mean are not trained", "loss/no-gradient", "loss/sign")
def bad_ones_only(inputs, options):
    return term_with(inputs, advantages=inputs.advantages.clamp_max(0))


@loss_fault(
    "loss/times-its-own-length", "each completion's loss is multiplied by its own number of tokens", "loss/scale"
)
def times_its_own_length(inputs, options):
    return term_with(inputs, advantages=inputs.advantages * inputs.mask.sum(-1, keepdim=True))


@loss_fault(
    "loss/whitened-again",
    "advantages are centred and scaled once more over whatever rows a microbatch holds, and stretched by ten",
    "loss/scale",
    "loss/sign",
)
def whitened_again(inputs, options):
    chosen = inputs.advantages[inputs.mask.bool()]
    spread = chosen.std().nan_to_num() + 1e-4
    return term_with(inputs, advantages=10 * (inputs.advantages - chosen.mean()) / spread)


@loss_fault(
    "loss/discounted",
    "advantages are discounted by their distance from the end, at a third a token",
    "loss/scale",
    "loss/no-gradient",
)
def discounted(inputs, options):
    left = inputs.mask.flip(-1).cumsum(-1).flip(-1) - 1
    return term_with(inputs, advantages=inputs.advantages * 0.3 ** left.clamp_min(0))


@loss_fault("loss/advantage-clipped", "advantages are clipped to a twentieth", "loss/scale")
def advantage_clipped(inputs, options):
    return term_with(inputs, advantages=inputs.advantages.clamp(-0.05, 0.05))


@loss_fault(
    "loss/log-ratio-for-ratio",
    "the logarithm of the ratio is clipped around 1 where the ratio should be, so that bad completions stay",
    "loss/no-gradient",
    "loss/clip",
)
def log_ratio_for_ratio(inputs, options):
    ratio, limits = inputs.logp - inputs.old_logp, inputs.limits
    inside = ratio.clamp(1 - limits.low, 1 + limits.high)
    return PolicyTerm(-torch.minimum(ratio * inputs.advantages, inside * inputs.advantages), inputs.ratio())


@loss_fault(
    "loss/sequence-ratio-summed",
    "every token has the ratio of its whole completion, not its mean: a token's push grows with the length",
    "loss/scale",
)
def sequence_ratio_summed(inputs, options):
    whole = ((inputs.logp - inputs.old_logp) * inputs.mask).sum(-1, keepdim=True).expand_as(inputs.logp)
    ratio, limits = whole.exp(), inputs.limits
    inside = ratio.clamp(1 - limits.low, 1 + limits.high)
    return PolicyTerm(-torch.minimum(ratio * inputs.advantages, inside * inputs.advantages), ratio)


# KL formulas


def of_probabilities(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """The squared difference of probabilities, not of their logarithms."""
    return 0.5 * (logp.exp() - ref_logp.exp()).square()


def one_sided(d: Tensor) -> Tensor:
    """k3 where the reference likes a token more, and nothing where the policy does."""
    d = d.clamp_min(0.0)
    return torch.expm1(d) - d


def doubled_k3(d: Tensor) -> Tensor:
    return torch.expm1(2 * d) - 2 * d


def weighted_by_the_policy(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """k2 of sampled tokens, weighted by their probability once more."""
    return logp.detach().exp() * 0.5 * (logp - ref_logp).square()


kl_fault(
    "kl/of-probabilities",
    "the penalty is the squared difference of probabilities, which hardly holds what is rare",
    "kl/reversed",
    "kl/scale",
    formulas=["of_probabilities"],
    module=__name__,
)
kl_fault(
    "kl/one-sided",
    "the penalty acts only on tokens that the reference likes more than the policy",
    "kl/reversed",
    "kl/scale",
    formulas=["one_sided"],
    module=__name__,
)
kl_fault(
    "kl/log-ratio-doubled",
    "log-ratios are doubled before k3 is taken, as where both directions are added first",
    "kl/scale",
    "kl/reversed",
    formulas=["doubled_k3"],
    module=__name__,
)
kl_fault(
    "kl/weighted-by-the-policy",
    "sampled tokens are weighted by their probability once more",
    "kl/reversed",
    "kl/scale",
    formulas=["weighted_by_the_policy"],
    module=__name__,
)


# Controllers


@controller_fault(
    "kl/controller-exponential", "β grows by e to the KL over a tiny target at every step", target=(1e-4,)
)
def exponential(beta: float, target: float = 1e-4) -> Steering:
    return Steering(beta, lambda last, step, kl: min(last * math.exp(min(50.0, kl / target)), 1e300))


@controller_fault("kl/controller-rounds-to-zero", "β is kept with no digit after the point, and so is 0", digits=(0,))
def rounds_to_zero(beta: float, digits: int = 0) -> Steering:
    return Steering(beta, lambda last, step, kl: round(last, digits))


# Healthy


def in_logarithms(inputs, options):
    """grpo's term by another road: the clip is put on the log-ratio, at the logarithms of its edges."""
    shift, limits = inputs.logp - inputs.old_logp, inputs.limits
    inside = shift.clamp(math.log(1 - limits.low), math.log(1 + limits.high))
    signed = [shift.exp() * inputs.advantages, inside.exp() * inputs.advantages]
    return PolicyTerm(-torch.minimum(*signed), inputs.ratio())


in_logarithms_recipe = replace(LOSSES["grpo"], term=in_logarithms, takes_delta=False)


@lookalike("loss whose clip is on logarithms", is_clipped)
def healthy_loss_in_logarithms(config: Any, random: Random) -> dict[str, Any]:
    return edited(config, {"loss.loss_type": "faults.losses_wild:in_logarithms_recipe"})
