"""Inputs and outputs of policy losses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keel.base.errors import unknown
from keel.kl.ratios import clamp_straight_through, importance_ratio, log_ratio
from keel.losses.options import Limits


@dataclass(frozen=True)
class LossInputs:
    """The inputs of every policy loss, each `[B, T]`, and its clip limits.

    `old_logp` is the old policy's log-probability. On a batch's first update it is the detached `logp`.
    """

    logp: Tensor
    old_logp: Tensor
    advantages: Tensor
    mask: Tensor
    limits: Limits

    def ratio(self) -> Tensor:
        """ρ = π/π_old per token or per sequence (`limits.level`)."""
        if self.limits.level == "token":
            return importance_ratio(self.logp, self.old_logp, self.mask)
        if self.limits.level == "sequence":
            return sequence_ratio(self.logp, self.old_logp, self.mask).expand_as(self.logp)
        raise unknown("importance_sampling_level", self.limits.level, ["token", "sequence"])


@dataclass(frozen=True)
class PolicyTerm:
    """The loss per token `[B, T]`, its ratio, and the tokens that the clip affects (None without a clip)."""

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor | None = None
    clipped_high: Tensor | None = None

    def clipped(self) -> tuple[Tensor, Tensor]:
        """The tokens clipped from below and from above."""
        none = torch.zeros_like(self.ratio, dtype=torch.bool)
        return (
            none if self.clipped_low is None else self.clipped_low,
            none if self.clipped_high is None else self.clipped_high,
        )


def sequence_ratio(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    """(Π_t ρ_t)^{1/|o|}, `[B, 1]`: GSPO's length-normalised sequence ratio."""
    mean = -log_ratio(logp, old_logp, mask, clamp=None).d.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp_min(
        1
    )
    return clamp_straight_through(mean, 20.0)[0].exp()
