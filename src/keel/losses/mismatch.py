"""Sampler mismatch: the engine that sampled and the model that trains disagree a little, and weights repair it.

w = π_train/π_sampler, detached: from `old_logp` (the trainer's, rollout weights) and `sample_logp` (the engine's).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keel.base.errors import KeelError, unknown
from keel.kl.ratios import check_mask, importance_ratio

KINDS = ("none", "truncate", "mask", "icepop")


@dataclass(frozen=True)
class MismatchSpec:
    """How to weigh: `truncate` to at most `cap`; `mask` away above `cap`; `icepop` masks outside [`floor`, `cap`]."""

    kind: str = "truncate"
    cap: float = 2.0
    floor: float | None = None
    level: str = "token"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown("mismatch kind", self.kind, KINDS)
        if self.level not in ("token", "sequence"):
            raise unknown("mismatch level", self.level, ("token", "sequence"))
        if self.cap < 1:
            raise KeelError(f"loss.mismatch.cap must be at least 1, got {self.cap}")
        if self.kind == "icepop" and not (self.floor is not None and 0 <= self.floor <= 1):
            raise KeelError("loss.mismatch.kind=icepop needs a floor between 0 and 1: the paper uses floor 0.5, cap 5")
        if self.kind != "icepop" and self.floor is not None:
            raise KeelError(f"loss.mismatch.floor has no meaning with kind={self.kind}: use kind=icepop")


def mismatch_weights(
    old_logp: Tensor, sample_logp: Tensor, mask: Tensor, spec: MismatchSpec, *, mask_out: bool = True
) -> Tensor:
    """Weights `[B, T]` for the policy term, detached; 1 outside the mask. A sequence's weight is Π_t w_t.

    A NaN in `sample_logp` (an engine that did not report one) weighs 1: no correction rather than no training. Without
    `mask_out` what `mask` and `icepop` would drop is held at their limits instead: a KL penalty acts on every token.
    """
    check_mask(mask, old_logp.shape)
    if spec.kind == "none":
        return torch.ones_like(old_logp, dtype=torch.float32)
    old_logp = old_logp.detach()
    sample_logp = torch.where(sample_logp.isnan(), old_logp, sample_logp.detach())
    ratio = importance_ratio(old_logp, sample_logp, mask, level=spec.level).expand_as(old_logp)
    floor = spec.floor if spec.floor is not None else 0.0
    if spec.kind == "truncate" or not mask_out:
        weights = ratio.clamp(floor, spec.cap)
    else:
        weights = torch.where((ratio >= floor) & (ratio <= spec.cap), ratio, torch.zeros_like(ratio))
    return torch.where(mask, weights, torch.ones_like(weights))
