"""Sampler mismatch: importance weights for the difference between the sampler and the trained model.

w = π_old/μ, detached. π_old is the trainer's policy at the start of the step (`old_logp`). μ is the sampler, which
differs by numerics, older weights and filters. Together with the policy term's ratio π/π_old, this is the decoupled
objective (Hilton et al. 2110.00641): μ may have any age, and the clip is around π_old.
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
    """log μ `[B, T]` of the sampler; None without `sample_logp`. Tokens without a reported value get `old_logp`.

    At token level μ is the filtered distribution. At sequence level it is the unfiltered one, because the product of
    the kept masses tends to 0 with the length.
    """
    sampled = batch.sample_logp
    if batch.filtered_logp is not None and level == "token":
        sampled = batch.filtered_logp if sampled is None else _fill_nan(batch.filtered_logp, sampled)
    return None if sampled is None else _fill_nan(sampled, old_logp.detach())


def sampled_off_policy(batch: Batch, level: str = "token") -> bool:
    """Whether the samples are not from the old policy: stale samples and, at token level, filtered ones."""
    return batch.stale or (batch.filtered_logp is not None and level == "token")


def kl_behaviour_logp(batch: Batch, logp: Tensor, level: str = "token") -> Tensor | None:
    """log μ for the KL term's ratios ρ = π/μ.

    μ is the old policy (on-policy: None), or the sampler for stale or filtered samples.
    """
    if not sampled_off_policy(batch, level):
        return batch.old_logp
    behaviour = behaviour_logp(batch, logp if batch.old_logp is None else batch.old_logp, level)
    if behaviour is None:
        raise KeelError("stale samples need sample_logp: without the sampler's log-probabilities they have no weights")
    return behaviour


def _fill_nan(first: Tensor, second: Tensor) -> Tensor:
    return torch.where(first.isnan(), second, first)


def mismatch_ratio(old_logp: Tensor, sample_logp: Tensor, mask: Tensor, level: str = "token") -> Tensor:
    """w = π_old/μ `[B, T]`, unclipped, detached. Tokens outside the mask or with NaN `sample_logp` count as w = 1."""
    check_mask(mask, old_logp.shape)
    old_logp = old_logp.detach()
    sample_logp = _fill_nan(sample_logp.detach(), old_logp)
    return importance_ratio(old_logp, sample_logp, mask, level=level).expand_as(old_logp)


def mismatch_weights(
    old_logp: Tensor, sample_logp: Tensor, mask: Tensor, options: MismatchOptions, *, mask_out: bool = True
) -> Tensor:
    """Weights `[B, T]` for the policy term, detached; 1 outside the mask. A sequence's weight is Π_t w_t.

    A NaN in `sample_logp` means that the engine reported no value; its weight is 1. Without `mask_out`, the kinds
    `mask` and `icepop` clamp weights to their limits instead of dropping tokens, because a KL penalty acts on every
    token.
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
    """The effective sample size of the unclipped weights, and the fraction of tokens beyond the limits.

    The kind `none` has no limits.
    """
    tokens = mask.sum()
    if sample_logp is None:
        return {"mismatch/ess": EffectiveSampleSize(tokens, tokens, tokens), "mismatch/capped_fraction": Mean(0.0, 1.0)}
    ratio = mismatch_ratio(old_logp, sample_logp, mask, options.level)
    weights = select(ratio.double(), mask)
    capped = mask.new_zeros(()) if options.kind == "none" else ~_within(ratio, options) & mask
    return {
        "mismatch/ess": EffectiveSampleSize(weights.sum(), weights.square().sum(), tokens),
        "mismatch/capped_fraction": Mean(capped.sum(), tokens),
    }


def _floor(options: MismatchOptions) -> float:
    return options.floor if options.floor is not None else 0.0


def _within(ratio: Tensor, options: MismatchOptions) -> Tensor:
    return (ratio >= _floor(options)) & (ratio <= options.cap)
