"""Sampler mismatch: the engine that sampled and the model that trains disagree a little, and weights repair it.

w = π_train/π_sampler, detached: from `old_logp` (the trainer's, rollout weights) and `sample_logp` (the engine's).
"""

from __future__ import annotations

import torch
from torch import Tensor

from keel.base.errors import KeelError
from keel.kl.ratios import check_mask, importance_ratio
from keel.losses.options import MismatchOptions


def check_mismatch(options: MismatchOptions) -> None:
    """Refuse a floor that is missing or means nothing."""
    if options.kind == "icepop" and options.floor is None:
        raise KeelError("loss.mismatch.kind=icepop needs a floor between 0 and 1: the paper uses floor 0.5, cap 5")
    if options.kind != "icepop" and options.floor is not None:
        raise KeelError(f"loss.mismatch.floor has no meaning with kind={options.kind}: use kind=icepop")


def mismatch_weights(
    old_logp: Tensor, sample_logp: Tensor, mask: Tensor, options: MismatchOptions, *, mask_out: bool = True
) -> Tensor:
    """Weights `[B, T]` for the policy term, detached; 1 outside the mask. A sequence's weight is Π_t w_t.

    A NaN in `sample_logp` (an engine that did not report one) weighs 1: no correction rather than no training. Without
    `mask_out` what `mask` and `icepop` would drop is held at their limits instead: a KL penalty acts on every token.
    """
    check_mask(mask, old_logp.shape)
    check_mismatch(options)
    if options.kind == "none":
        return torch.ones_like(old_logp, dtype=torch.float32)
    old_logp = old_logp.detach()
    sample_logp = torch.where(sample_logp.isnan(), old_logp, sample_logp.detach())
    ratio = importance_ratio(old_logp, sample_logp, mask, level=options.level).expand_as(old_logp)
    floor = options.floor if options.floor is not None else 0.0
    if options.kind == "truncate" or not mask_out:
        weights = ratio.clamp(floor, options.cap)
    else:
        weights = torch.where((ratio >= floor) & (ratio <= options.cap), ratio, torch.zeros_like(ratio))
    return torch.where(mask, weights, torch.ones_like(weights))
