"""Policy terms: `[B, T]` losses per token, before any reduction. One function a surrogate, one table of losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from keel.base.errors import KeelError, unknown
from keel.kl.ratios import clamp_through, finite_floor, importance_ratio, log_ratio, select

SAPO_TEMPERATURES = (1.0, 1.05)


@dataclass(frozen=True)
class LossSpec:
    """Which policy loss, with its limits. None means the loss's own default (see `LOSSES`)."""

    loss_type: str = "grpo"
    epsilon: float | None = None
    epsilon_high: float | None = None
    delta: float | None = None
    importance_sampling_level: str | None = None
    entropy_coef: float = 0.0
    sapo_temperature_pos: float = SAPO_TEMPERATURES[0]
    sapo_temperature_neg: float = SAPO_TEMPERATURES[1]


@dataclass(frozen=True)
class PolicyTerm:
    """The loss per token `[B, T]`, the ratio behind it, and which tokens the clip held back."""

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


@dataclass(frozen=True)
class Limits:
    """Clip limits with the loss's defaults filled in."""

    low: float
    high: float
    delta: float | None
    level: str


def sequence_ratio(logp: Tensor, old_logp: Tensor, mask: Tensor) -> Tensor:
    """(Π_t ρ_t)^{1/|o|}, `[B, 1]`: GSPO's length-normalised sequence ratio."""
    mean = -log_ratio(logp, old_logp, mask, clamp=None).d.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp_min(
        1
    )
    return clamp_through(mean, 20.0)[0].exp()


def _ratio(logp: Tensor, old_logp: Tensor, mask: Tensor, level: str) -> Tensor:
    if level == "token":
        return importance_ratio(logp, old_logp, mask)
    if level == "sequence":
        return sequence_ratio(logp, old_logp, mask).expand_as(logp)
    raise unknown("importance_sampling_level", level, ["token", "sequence"])


def _never(ratio: Tensor) -> Tensor:
    return torch.zeros_like(ratio, dtype=torch.bool)


def policy_gradient(
    logp: Tensor, old_logp: Tensor, advantage: Tensor, mask: Tensor, limits: Limits, spec: LossSpec
) -> PolicyTerm:
    """−A·log π: the plain policy gradient, without a ratio. Right on-policy only."""
    ratio = importance_ratio(logp, old_logp, mask)
    return PolicyTerm(-advantage * finite_floor(select(logp, mask)), ratio, _never(ratio), _never(ratio))


def clipped(
    logp: Tensor, old_logp: Tensor, advantage: Tensor, mask: Tensor, limits: Limits, spec: LossSpec
) -> PolicyTerm:
    """−min(ρA, clip(ρ, 1−ε_low, 1+ε_high)A) (PPO 1707.06347); δ caps ρ from above on the unclipped side too.

    Without δ a negative advantage leaves ρ unbounded above (INTELLECT-2's two-sided clip bounds it).
    """
    ratio = _ratio(logp, old_logp, mask, limits.level)
    inside = ratio.clamp(1 - limits.low, 1 + limits.high)
    outer = ratio if limits.delta is None else ratio.clamp_max(limits.delta)
    loss = -torch.minimum(outer * advantage, inside * advantage)
    low = (ratio < 1 - limits.low) & (advantage < 0)
    high = (ratio > 1 + limits.high) & (advantage > 0)
    return PolicyTerm(loss, ratio, low, high)


def cispo(
    logp: Tensor, old_logp: Tensor, advantage: Tensor, mask: Tensor, limits: Limits, spec: LossSpec
) -> PolicyTerm:
    """−sg(min(ρ, ε_high))·A·log π (MiniMax-M1 2506.13585): the weight is clipped, every token keeps its gradient."""
    ratio = _ratio(logp, old_logp, mask, limits.level)
    weight = ratio.clamp_max(limits.high).detach()
    high = (ratio > limits.high) & (advantage > 0)
    return PolicyTerm(-weight * advantage * finite_floor(select(logp, mask)), ratio, _never(ratio), high)


def gmpo(logp: Tensor, old_logp: Tensor, advantage: Tensor, mask: Tensor, limits: Limits, spec: LossSpec) -> PolicyTerm:
    """−A·(Π_t ρ̂_t)^{1/|o|} (GMPO 2507.20673): log-ratios clipped per token on the side that the advantage favours."""
    log_rho = -log_ratio(logp, old_logp, mask, clamp=None).d
    low, high = (log_rho < -limits.low) & (advantage < 0), (log_rho > limits.high) & (advantage > 0)
    held = torch.where(
        advantage > 0,
        log_rho.clamp_max(limits.high),
        torch.where(advantage < 0, log_rho.clamp_min(-limits.low), log_rho),
    )
    mean = select(held, mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp_min(1)
    weight = clamp_through(mean, 20.0)[0].exp()
    return PolicyTerm(-weight * advantage, clamp_through(log_rho, 20.0)[0].exp(), low, high)


def sapo(logp: Tensor, old_logp: Tensor, advantage: Tensor, mask: Tensor, limits: Limits, spec: LossSpec) -> PolicyTerm:
    """−(4/τ)·σ(τ(ρ−1))·A (SAPO 2511.20347): a soft gate instead of a clip; τ differs with the advantage's sign."""
    ratio = _ratio(logp, old_logp, mask, limits.level)
    tau = torch.where(advantage > 0, spec.sapo_temperature_pos, spec.sapo_temperature_neg)
    loss = -torch.sigmoid(tau * (ratio - 1)) * 4 / tau * advantage
    return PolicyTerm(loss, ratio, _never(ratio), _never(ratio))


PolicyLoss = Callable[[Tensor, Tensor, Tensor, Tensor, Limits, LossSpec], PolicyTerm]


@dataclass(frozen=True)
class Recipe:
    """A named loss: its surrogate, its reduction, its default limits and the advantage scaling of its paper."""

    term: PolicyLoss
    reduction: str
    low: float = 0.2
    high: float = 0.2
    level: str = "token"
    scale_rewards: str = "group"


LOSSES: dict[str, Recipe] = {
    "policy_gradient": Recipe(policy_gradient, "token_mean"),
    "grpo": Recipe(clipped, "sequence_mean"),
    "bnpo": Recipe(clipped, "local_token_mean"),
    "dr_grpo": Recipe(clipped, "constant", scale_rewards="none"),
    "dapo": Recipe(clipped, "token_mean", high=0.28),
    "gspo": Recipe(clipped, "sequence_mean", low=3e-4, high=4e-4, level="sequence"),
    "cispo": Recipe(cispo, "token_mean", low=0.0, high=5.0),
    "gmpo": Recipe(gmpo, "sequence_mean", low=0.4, high=0.4),
    "sapo": Recipe(sapo, "sequence_mean"),
}


def get_recipe(loss_type: str) -> Recipe:
    """The recipe of that name."""
    if loss_type not in LOSSES:
        raise unknown("loss_type", loss_type, LOSSES)
    return LOSSES[loss_type]


def resolve_limits(spec: LossSpec) -> Limits:
    """The clip limits to use; what the loss would ignore or turn upside down is refused."""
    recipe = get_recipe(spec.loss_type)
    low = recipe.low if spec.epsilon is None else spec.epsilon
    high = spec.epsilon_high if spec.epsilon_high is not None else recipe.high if spec.epsilon is None else spec.epsilon
    level = spec.importance_sampling_level or recipe.level
    if spec.loss_type == "cispo":
        high = recipe.high if spec.epsilon_high is None else spec.epsilon_high
        if spec.epsilon is not None:
            raise KeelError(
                "loss.epsilon has no meaning with cispo, which caps the ratio from above: set loss.epsilon_high"
            )
        if high < 1:
            raise KeelError(f"cispo's epsilon_high caps the ratio itself and must be at least 1, got {high}: try 5.0")
    elif spec.loss_type in ("sapo", "policy_gradient"):
        for name in ("epsilon", "epsilon_high"):
            if getattr(spec, name) is not None:
                raise KeelError(f"loss.{name} has no meaning with {spec.loss_type}, which does not clip: leave it out")
    elif not (low >= 0 and high >= 0):
        raise KeelError(f"loss.epsilon and epsilon_high must not be negative, got {low} and {high}")
    if spec.loss_type != "sapo" and (spec.sapo_temperature_pos, spec.sapo_temperature_neg) != SAPO_TEMPERATURES:
        raise KeelError(f"loss.sapo_temperature has no meaning with {spec.loss_type}: leave it out")
    if min(spec.sapo_temperature_pos, spec.sapo_temperature_neg) <= 0:
        raise KeelError("loss.sapo_temperature_pos and _neg must be positive: the paper uses 1.0 and 1.05")
    if spec.delta is not None:
        if recipe.term is not clipped:
            raise KeelError(f"loss.delta has no meaning with {spec.loss_type}: leave it out")
        if spec.delta <= 1 + high:
            raise KeelError(f"loss.delta must be above 1 + epsilon_high = {1 + high:g}, got {spec.delta:g}")
    if level != recipe.level and recipe.term in (gmpo, policy_gradient):
        raise KeelError(f"loss.importance_sampling_level={level} has no meaning with {spec.loss_type}: leave it out")
    return Limits(low, high, spec.delta, level)


def policy_term(spec: LossSpec, logp: Tensor, old_logp: Tensor | None, advantage: Tensor, mask: Tensor) -> PolicyTerm:
    """The per-token policy loss `[B, T]`; `old_logp` None means that this is the batch's first update."""
    if advantage.dim() == 1:
        advantage = advantage.unsqueeze(-1)
    if advantage.shape[0] != logp.shape[0] or advantage.shape[-1] not in (1, logp.shape[-1]):
        raise KeelError(f"advantages has shape {tuple(advantage.shape)}, logp {tuple(logp.shape)}: give [B] or [B, T]")
    old_logp = logp.detach() if old_logp is None else old_logp
    advantage = advantage.to(logp.device).expand_as(logp)
    return get_recipe(spec.loss_type).term(logp, old_logp, advantage, mask, resolve_limits(spec), spec)
