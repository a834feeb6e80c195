"""Policy terms: their inputs, and `[B, T]` losses per token before reduction, one function per surrogate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keel.base.errors import unknown
from keel.kl.ratios import clamp_straight_through, finite_floor, importance_ratio, log_ratio, select
from keel.losses.options import Limits, SapoOptions, SharedLossOptions


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


def policy_gradient(inputs: LossInputs, options: SharedLossOptions) -> PolicyTerm:
    """−A·log π: the plain policy gradient, without a ratio. Correct on-policy only."""
    ratio = importance_ratio(inputs.logp, inputs.old_logp, inputs.mask)
    return PolicyTerm(-inputs.advantages * finite_floor(select(inputs.logp, inputs.mask)), ratio)


def clipped(inputs: LossInputs, options: SharedLossOptions) -> PolicyTerm:
    """−min(ρA, clip(ρ, 1−ε_low, 1+ε_high)A) (PPO 1707.06347), with ρ capped at δ if δ is set (INTELLECT-2).

    Without δ, ρ has no upper bound if the advantage is negative.
    """
    ratio, limits, advantages = inputs.ratio(), inputs.limits, inputs.advantages
    inside = ratio.clamp(1 - limits.low, 1 + limits.high)
    outer = ratio if options.delta is None else ratio.clamp_max(options.delta)
    loss = -torch.minimum(outer * advantages, inside * advantages)
    low = (ratio < 1 - limits.low) & (advantages < 0)
    high = (ratio > 1 + limits.high) & (advantages > 0)
    return PolicyTerm(loss, ratio, low, high)


def cispo(inputs: LossInputs, options: SharedLossOptions) -> PolicyTerm:
    """−sg(min(ρ, ε_high))·A·log π (MiniMax-M1 2506.13585). It clips the weight, so every token keeps its gradient."""
    ratio, cap = inputs.ratio(), inputs.limits.high
    weight = ratio.clamp_max(cap).detach()
    high = (ratio > cap) & (inputs.advantages > 0)
    loss = -weight * inputs.advantages * finite_floor(select(inputs.logp, inputs.mask))
    return PolicyTerm(loss, ratio, clipped_high=high)


def gmpo(inputs: LossInputs, options: SharedLossOptions) -> PolicyTerm:
    """−A·(Π_t ρ̂_t)^{1/|o|} (GMPO 2507.20673). Log-ratios are clipped per token: above if A > 0, below if A < 0."""
    limits, advantages, mask = inputs.limits, inputs.advantages, inputs.mask
    log_rho = -log_ratio(inputs.logp, inputs.old_logp, mask, clamp=None).d
    low, high = (log_rho < -limits.low) & (advantages < 0), (log_rho > limits.high) & (advantages > 0)
    clipped_log_rho = torch.where(
        advantages > 0,
        log_rho.clamp_max(limits.high),
        torch.where(advantages < 0, log_rho.clamp_min(-limits.low), log_rho),
    )
    mean = select(clipped_log_rho, mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp_min(1)
    weight = clamp_straight_through(mean, 20.0)[0].exp()
    return PolicyTerm(-weight * advantages, clamp_straight_through(log_rho, 20.0)[0].exp(), low, high)


def sapo(inputs: LossInputs, options: SapoOptions) -> PolicyTerm:
    """−(4/τ)·σ(τ(ρ−1))·A (SAPO 2511.20347). A soft gate replaces the clip; τ depends on the advantage's sign."""
    ratio = inputs.ratio()
    tau = torch.where(inputs.advantages > 0, options.sapo_temperature_pos, options.sapo_temperature_neg)
    return PolicyTerm(-torch.sigmoid(tau * (ratio - 1)) * 4 / tau * inputs.advantages, ratio)
