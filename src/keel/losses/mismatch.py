"""Sampler mismatch: what sampled and the model that trains are not the same distribution, and weights repair it.

w = π_old/μ, detached: from `old_logp` (the trainer's, as the step begins) and what drew the tokens, μ: the engine's
numbers, its older weights, its filters. With the ratio π/π_old of the policy term it is the decoupled objective (Hilton
et al. 2110.00641): μ may be any age, π_old is what the clip is about.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keel.base.errors import KeelError
from keel.base.metrics import EffectiveSampleSize, Mean, Metric
from keel.base.types import Batch
from keel.kl.ratios import check_mask, importance_ratio, select
from keel.losses.options import MismatchOptions, check_mismatch


def behaviour_logp(batch: Batch, old_logp: Tensor, level: str = "token") -> Tensor | None:
    """log μ `[B, T]` of what drew the tokens, as far as the engine reported it and `old_logp` elsewhere; None without.

    A token's includes the filters: it was drawn from what they left. A sequence's does not, since the kept mass of all
    its tokens together vanishes with its length.
    """
    drawn = batch.sample_logp
    if batch.filtered_logp is not None and level == "token":
        drawn = batch.filtered_logp if drawn is None else _first_known(batch.filtered_logp, drawn)
    return None if drawn is None else _first_known(drawn, old_logp.detach())


def drawn_by_other(batch: Batch, level: str = "token") -> bool:
    """Whether the old policy did not draw the samples: stale or filtered ones; a sequence's ratio knows no filters."""
    return batch.stale or (batch.filtered_logp is not None and level == "token")


def kl_behaviour_logp(batch: Batch, logp: Tensor, level: str = "token") -> Tensor | None:
    """log μ that the KL term's ratios ρ = π/μ are taken against: the old policy's (None: `logp` itself, on-policy).

    Where samples are stale or filtered the old policy did not draw them, and what did takes its place.
    """
    if not drawn_by_other(batch, level):
        return batch.old_logp
    behaviour = behaviour_logp(batch, logp if batch.old_logp is None else batch.old_logp, level)
    if behaviour is None:
        raise KeelError("stale samples need sample_logp: without the sampler's log-probabilities nothing weighs them")
    return behaviour


def _first_known(first: Tensor, second: Tensor) -> Tensor:
    return torch.where(first.isnan(), second, first)


def mismatch_ratio(old_logp: Tensor, sample_logp: Tensor, mask: Tensor, level: str = "token") -> Tensor:
    """w = π_old/μ `[B, T]` without any limit, detached; 1 outside the mask and where `sample_logp` is NaN."""
    check_mask(mask, old_logp.shape)
    old_logp = old_logp.detach()
    sample_logp = _first_known(sample_logp.detach(), old_logp)
    return importance_ratio(old_logp, sample_logp, mask, level=level).expand_as(old_logp)


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
    ratio = mismatch_ratio(old_logp, sample_logp, mask, options.level)
    if options.kind == "truncate" or not mask_out:
        weights = ratio.clamp(_floor(options), options.cap)
    else:
        weights = torch.where(_within(ratio, options), ratio, torch.zeros_like(ratio))
    return torch.where(mask, weights, torch.ones_like(weights))


def mismatch_metrics(
    old_logp: Tensor, sample_logp: Tensor | None, mask: Tensor, options: MismatchOptions
) -> dict[str, Metric]:
    """Effective sample size of the weights before any limit, and the share of tokens beyond the limits.

    Measured whatever `kind` is: they say what the correction meets, or would meet.
    """
    tokens = mask.sum()
    if sample_logp is None:
        return {"mismatch/ess": EffectiveSampleSize(tokens, tokens, tokens), "mismatch/capped_fraction": Mean(0.0, 1.0)}
    ratio = mismatch_ratio(old_logp, sample_logp, mask, options.level)
    weights = select(ratio.double(), mask)
    return {
        "mismatch/ess": EffectiveSampleSize(weights.sum(), weights.square().sum(), tokens),
        "mismatch/capped_fraction": Mean((~_within(ratio, options) & mask).sum(), tokens),
    }


def _floor(options: MismatchOptions) -> float:
    return options.floor if options.floor is not None else 0.0


def _within(ratio: Tensor, options: MismatchOptions) -> Tensor:
    return (ratio >= _floor(options)) & (ratio <= options.cap)
