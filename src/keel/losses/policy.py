"""Policy terms: `[B, T]` losses per token before reduction, one function per surrogate."""

from __future__ import annotations

import torch
from torch import Tensor

from keel.base.errors import KeelError
from keel.kl.ratios import clamp_straight_through, finite_floor, importance_ratio, log_ratio, select
from keel.losses.inputs import LossInputs, PolicyTerm
from keel.losses.options import LossOptions, SapoOptions, SharedLossOptions
from keel.losses.recipes import declared_options, get_loss, resolve_limits


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


def policy_term(
    loss: LossOptions, logp: Tensor, old_logp: Tensor | None, advantages: Tensor, mask: Tensor
) -> PolicyTerm:
    """The per-token policy loss `[B, T]`. On the batch's first update `old_logp` is None."""
    if advantages.dim() == 1:
        advantages = advantages.unsqueeze(-1)
    if advantages.shape[0] != logp.shape[0] or advantages.shape[-1] not in (1, logp.shape[-1]):
        raise KeelError(f"advantages has shape {tuple(advantages.shape)}, logp {tuple(logp.shape)}: give [B] or [B, T]")
    old_logp = logp.detach() if old_logp is None else old_logp
    advantages = advantages.to(logp.device).expand_as(logp)
    inputs = LossInputs(logp, old_logp, advantages, mask, resolve_limits(loss))
    return get_loss(loss.loss_type).term(inputs, declared_options(loss))
