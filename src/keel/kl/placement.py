"""The three placements of a KL penalty: in the reward, the advantage or the loss. Pure functions."""

from __future__ import annotations

from torch import Tensor

from keel.base.errors import KeelError, unknown
from keel.kl.estimators import weighted_estimate, with_form
from keel.kl.facts import LEVELS, Pairing, over_vocabulary
from keel.kl.ratios import DEFAULT_CLAMP, check_mask, importance_ratio, select
from keel.kl.sequence import reward_to_go, score, sequence_estimate


def reward_penalty(kl: Tensor, action_mask: Tensor, beta: float) -> Tensor:
    """The penalty added to each reward: −β·Σ_t KL_t `[B]`, before the group is normalised.

    If the advantage is then divided by the group's standard deviation σ, **the effective coefficient is β/σ**: at
    σ = 0.04 a β of 0.01 acts like 0.25. To avoid this, disable the division, or place the term in the advantage, which
    is after the division. `kl` `[B, T]` is detached; k1 has the correct gradient here.
    """
    check_mask(action_mask, kl.shape)
    return 0.0 - beta * select(kl.detach(), action_mask).sum(-1)


def advantage_penalty(kl: Tensor, action_mask: Tensor, beta: float, *, level: str = "token") -> Tensor:
    """The penalty added to each advantage after normalisation: −β·KL_t `[B, T]`, at sequence level −β·Σ_{j≥t} KL_j.

    At token level each token is penalised for its own KL, and at sequence level also for the KL of all later tokens.
    """
    check_mask(action_mask, kl.shape)
    if level not in LEVELS:
        raise unknown("level", level, LEVELS)
    penalty = select(kl.detach(), action_mask)
    return select(0.0 - beta * (reward_to_go(penalty) if level == "sequence" else penalty), action_mask)


def kl_score_loss(
    kl_advantages: Tensor,
    logp: Tensor,
    action_mask: Tensor,
    *,
    old_logp: Tensor | None = None,
    ratio_cap: float | None = None,
) -> Tensor:
    """A penalty in the reward or the advantage as a loss: −ρ_t·A_t `[B, T]`, where A is the penalty's advantages.

    `kl_advantages` are `[B]` or `[B, T]`. The gradient is −ρ_t·A_t·s_t with the token's ratio under every loss. The
    policy term's sequence ratio, clip and mask do not change the penalty. ρ is truncated at `ratio_cap`; the gradient
    stays nonzero above it.
    """
    check_mask(action_mask, logp.shape)
    if kl_advantages.dim() == 1:
        kl_advantages = kl_advantages.unsqueeze(-1)
    if kl_advantages.shape[0] != logp.shape[0] or kl_advantages.shape[-1] not in (1, logp.shape[-1]):
        raise KeelError(
            f"kl_advantages has shape {tuple(kl_advantages.shape)}, logp {tuple(logp.shape)}: give [B] or [B, T]"
        )
    old_logp = logp.detach() if old_logp is None else old_logp
    rho = importance_ratio(logp, old_logp, action_mask, cap=ratio_cap).detach()
    return select(-rho * kl_advantages.detach() * (1 + score(logp, action_mask)), action_mask)


def kl_loss(
    pairing: Pairing,
    logp: Tensor,
    ref_logp: Tensor | None,
    action_mask: Tensor,
    *,
    old_logp: Tensor | None = None,
    exact_kl: Tensor | None = None,
    clamp: float | None = DEFAULT_CLAMP,
    ratio_cap: float | None = None,
) -> Tensor:
    """The KL term for placement in the loss, before its reduction and before β.

    At token level it is `[B, T]` in nats per token, at sequence level `[B]` in nats per sequence. `exact_kl` `[B, T]`
    is the full-vocabulary KL in the estimator's direction.
    """
    check_mask(action_mask, logp.shape)
    if pairing.placement != "loss":
        raise KeelError(f"kl_loss is for kl.placement=loss, got {pairing.placement}: use kl_score_loss")
    if over_vocabulary(pairing.estimator):
        if exact_kl is None:
            raise KeelError(f"kl.estimator={pairing.estimator} needs the exact per-token KL: set kl.exact=true")
        if exact_kl.shape != logp.shape:
            raise KeelError(f"exact_kl has shape {tuple(exact_kl.shape)} but logp has {tuple(logp.shape)}: both [B, T]")
        if pairing.level == "token":
            return with_form(
                exact_kl, pairing.form, logp, ref_logp, old_logp, action_mask, clamp=clamp, ratio_cap=ratio_cap
            )
    if pairing.level == "sequence":
        return sequence_estimate(
            pairing.estimator,
            logp,
            logp.detach() if ref_logp is None else ref_logp,
            action_mask,
            old_logp,
            exact_kl=exact_kl,
            clamp=clamp,
            ratio_cap=ratio_cap,
        )
    if ref_logp is None:
        raise KeelError(f"kl.estimator={pairing.estimator} needs ref_logp: score the batch with the reference first")
    return weighted_estimate(
        pairing.estimator, pairing.form, logp, ref_logp, old_logp, action_mask, clamp=clamp, ratio_cap=ratio_cap
    )
