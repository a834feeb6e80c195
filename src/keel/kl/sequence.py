"""KL of whole sequences. A token changes the KL of later tokens. Per-token losses ignore this; these losses include it.

∇KL_seq = E Σ_t (Σ_{j≥t} u_j) s_t. Each function is a loss and returns one value per sequence, `[B]`, in nats per
sequence. Unless noted, its autograd gradient is unbiased for ∇KL_seq(π‖p) on samples from the policy. With `old_logp`,
the sequence's ratio weights the loss, and the gradient is unbiased on samples from μ.
"""

from __future__ import annotations

from torch import Tensor

from keel.base.errors import KeelError, unknown
from keel.kl.estimators import k2, k3
from keel.kl.facts import over_vocabulary
from keel.kl.ratios import (
    DEFAULT_CLAMP,
    at_least_fp32,
    check_mask,
    clamp_straight_through,
    finite_floor,
    importance_ratio,
    log_ratio,
    select,
)


def reward_to_go(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Σ_{j≥t} values_j along the last dimension, over the mask."""
    if mask is not None:
        check_mask(mask, values.shape)
    return select(values, mask).flip(-1).cumsum(-1).flip(-1)


def score(logp: Tensor, mask: Tensor | None) -> Tensor:
    """Zero with the gradient of log π. Multiplied by a detached coefficient, it is a score-function term."""
    logp = finite_floor(select(logp, mask))
    return logp - logp.detach()


def _sequence_weight(logp: Tensor, old_logp: Tensor | None, mask: Tensor | None, cap: float | None) -> Tensor | float:
    if old_logp is None:
        return 1.0
    return importance_ratio(logp, old_logp, mask, level="sequence", cap=cap).detach().squeeze(-1)


def k1_to_go(
    logp: Tensor,
    ref_logp: Tensor,
    mask: Tensor | None = None,
    old_logp: Tensor | None = None,
    *,
    clamp: float | None = DEFAULT_CLAMP,
    ratio_cap: float | None = None,
) -> Tensor:
    """k1 in the reward, written as a loss: value Σu, gradient Σ_t sg(Σ_{j≥t} u_j) s_t."""
    u = -log_ratio(logp, ref_logp, mask, clamp).d.detach()
    per_sequence = (u + reward_to_go(u) * score(logp, mask)).sum(-1)
    return _sequence_weight(logp, old_logp, mask, ratio_cap) * per_sequence


def k2_sequence(
    logp: Tensor,
    ref_logp: Tensor,
    mask: Tensor | None = None,
    old_logp: Tensor | None = None,
    *,
    clamp: float | None = DEFAULT_CLAMP,
    ratio_cap: float | None = None,
) -> Tensor:
    """½(Σu)² with the gradient (Σu)·Σ_t s_t. As for k2 of one token, the gradient is unbiased, the value is biased."""
    d = log_ratio(logp, ref_logp, mask, clamp).d.sum(-1)
    return _sequence_weight(logp, old_logp, mask, ratio_cap) * k2(d)


def k3_sequence(
    logp: Tensor,
    ref_logp: Tensor,
    mask: Tensor | None = None,
    old_logp: Tensor | None = None,
    *,
    clamp: float | None = DEFAULT_CLAMP,
    ratio_cap: float | None = None,
) -> Tensor:
    """k3 of the sequence's log-ratio. The value is unbiased; the gradient is that of KL_seq(p‖π)."""
    d, _ = clamp_straight_through(log_ratio(logp, ref_logp, mask, clamp).d.sum(-1), clamp)
    return _sequence_weight(logp, old_logp, mask, ratio_cap) * k3(d)


def rao_blackwell(
    kl_per_token: Tensor,
    logp: Tensor,
    mask: Tensor | None = None,
    old_logp: Tensor | None = None,
    *,
    ratio_cap: float | None = None,
) -> Tensor:
    """Per-token KL plus a score-function term of later tokens' KL: gradient Σ_t ∇KL_t + (Σ_{j>t} KL_j)·s_t.

    `kl_per_token` `[B, T]` is a divergence over the vocabulary, with gradient. The value is Σ_t KL_t. The gradient is
    unbiased for that of E[Σ_t KL_t]. For the exact KL, this expectation is KL_seq(π‖p). The variance is usually, but
    not always, lower than that of the sampled forms.
    """
    if kl_per_token.shape != logp.shape:
        raise KeelError(
            f"kl_per_token has shape {tuple(kl_per_token.shape)} but logp has {tuple(logp.shape)}: both must be [B, T]"
        )
    if mask is not None:
        check_mask(mask, logp.shape)
    kl = at_least_fp32(select(kl_per_token, mask))
    future = (reward_to_go(kl) - kl).detach()
    per_sequence = (kl + future * score(logp, mask)).sum(-1)
    return _sequence_weight(logp, old_logp, mask, ratio_cap) * per_sequence


SEQUENCE_ESTIMATORS = {"k1": k1_to_go, "k2": k2_sequence, "k3": k3_sequence}


def sequence_estimate(
    estimator: str,
    logp: Tensor,
    ref_logp: Tensor,
    mask: Tensor | None = None,
    old_logp: Tensor | None = None,
    *,
    exact_kl: Tensor | None = None,
    clamp: float | None = DEFAULT_CLAMP,
    ratio_cap: float | None = None,
) -> Tensor:
    """The sequence-level loss `[B]` of an estimator.

    For an estimator over the vocabulary, it is the Rao-Blackwell form of `exact_kl`, the divergence per token.
    """
    if over_vocabulary(estimator):
        if exact_kl is None:
            raise KeelError(f"the sequence level of {estimator} needs its values per token: score with kl.exact=true")
        return rao_blackwell(exact_kl, logp, mask, old_logp, ratio_cap=ratio_cap)
    if estimator not in SEQUENCE_ESTIMATORS:
        raise unknown("sequence-level estimator", estimator, [*SEQUENCE_ESTIMATORS, "exact"])
    return SEQUENCE_ESTIMATORS[estimator](logp, ref_logp, mask, old_logp, clamp=clamp, ratio_cap=ratio_cap)
