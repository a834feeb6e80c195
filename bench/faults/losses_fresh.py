"""KL formulas and losses with the usual bugs: quotients, sums and clips in the wrong place, advantages gone astray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from faults.base import edited, operator, path_of
from faults.losses import Steering, has_penalty, kl_fault, loss_fault, term_with
from keel.losses import LossInputs, PolicyTerm

Config = Mapping[str, Any]

# KL formulas


def quotient(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """k3 of a ratio that is one logarithm divided by the other."""
    ratio = ref_logp.clamp_max(-1e-3) / logp.clamp_max(-1e-3)
    return ratio - ratio.log() - 1


def whole_completion(d: Tensor) -> Tensor:
    """k3 of each token, summed over its completion and put on all of its tokens."""
    return (torch.expm1(d) - d).sum(-1, keepdim=True).expand_as(d)


def clipped_low(d: Tensor) -> Tensor:
    """k3, clipped against outliers where all of it is one."""
    return (torch.expm1(d) - d).clamp_max(1e-6)


kl_fault(
    "kl/quotient-of-logarithms",
    "log-probabilities are divided by each other where they should be subtracted",
    "kl/reversed",
    "kl/scale",
    formulas=["quotient"],
    module=__name__,
)
kl_fault(
    "kl/summed-for-every-token",
    "the penalty is summed over a completion and charged to each of its tokens",
    "kl/scale",
    "kl/reversed",
    "kl/too-strong",
    formulas=["whole_completion"],
    module=__name__,
)
kl_fault(
    "kl/clipped-as-an-outlier",
    "the penalty is clipped far below what any token has, and what is clipped has no gradient",
    "kl/no-gradient",
    "kl/scale",
    "kl/reversed",
    formulas=["clipped_low"],
    module=__name__,
)


def in_percent(beta: float) -> Steering:
    return Steering(100 * beta, lambda last, step, kl: last)


@operator(
    "kl/coefficient-read-as-percent",
    "the controller is given β in percent and begins, and stays, at a hundred times of it",
    "kl/controller",
    "kl/too-strong",
    "kl/scale",
    fits=has_penalty,
)
def coefficient_read_as_percent(config: Config, random: Random) -> dict[str, Any]:
    return edited(config, {"kl.controller": {"name": path_of(in_percent)}})


# Losses


@loss_fault(
    "loss/clip-made-for-sequences",
    "the clip range is one of ten-thousandths, for the mean ratio of a sequence, and is put on tokens",
    "loss/clip",
    "loss/no-gradient",
    "ratio/all-clipped",
    also={"loss.num_iterations": (2, 3)},
)
def clip_made_for_sequences(inputs: LossInputs, options: Any) -> PolicyTerm:
    return term_with(replace(inputs, limits=replace(inputs.limits, low=3e-4, high=4e-4)))


@loss_fault(
    "loss/mask-one-place-late",
    "the mask is one place behind: the first token that was sampled is never trained",
    "mask/not-actions",
    "loss/no-gradient",
)
def mask_one_place_late(inputs: LossInputs, options: Any) -> PolicyTerm:
    mask = inputs.mask.bool()
    seen = mask.long().cumsum(-1)
    return term_with(inputs, advantages=inputs.advantages * (mask & (seen > 1)))


@loss_fault(
    "loss/second-half-of-the-rows-lost",
    "advantages arrive for the first half of a batch alone, and the rest is filled up with zeros",
    "loss/no-gradient",
)
def second_half_of_the_rows_lost(inputs: LossInputs, options: Any) -> PolicyTerm:
    rows = len(inputs.advantages)
    kept = torch.arange(rows, device=inputs.advantages.device) < (rows + 1) // 2
    return term_with(inputs, advantages=inputs.advantages * kept[:, None])


_before: list[Tensor] = []


@loss_fault(
    "loss/advantages-of-the-batch-before",
    "advantages are kept in a buffer that is read before it is filled: each batch is trained with those of the last",
    "loss/sign",
    "loss/no-gradient",
)
def advantages_of_the_batch_before(inputs: LossInputs, options: Any) -> PolicyTerm:
    advantages = inputs.advantages
    kept = torch.zeros_like(advantages)
    if _before:
        last = _before.pop().to(advantages)
        rows = min(len(last), len(kept))
        kept[:rows] = last[:rows, None]
    _before.append(advantages[:, 0].detach().clone())
    return term_with(inputs, advantages=kept)
