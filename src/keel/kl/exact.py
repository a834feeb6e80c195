"""Divergences over the vocabulary: the exact KL in both directions, JSD, and the KL truncated to the top k tokens.

All functions take normalised log-probabilities `[..., V]` and return `[...]` in nats.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from keel.base.errors import KeelError
from keel.kl.ratios import check_same_shape, finite_floor

if TYPE_CHECKING:
    from keel.kl.options import KLTermOptions

# (policy log-probabilities [..., V], reference log-probabilities [..., V], sampled tokens [...]) -> [...]
Divergence = Callable[[Tensor, Tensor, Tensor], Tensor]

DIRECTIONS = ("policy_ref", "ref_policy")


def _finite(policy: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Check both, convert them to one dtype (at least fp32), and replace −inf by a finite floor."""
    check_same_shape(policy_logprobs=policy, ref_logprobs=reference)
    dtype = torch.promote_types(policy.dtype, reference.dtype)
    return finite_floor(policy.to(dtype)), finite_floor(reference.to(dtype))


def exact_kl(policy_logprobs: Tensor, ref_logprobs: Tensor, direction: str = "policy_ref") -> Tensor:
    """Σ_v π_v (log π_v − log p_v), or Σ_v p_v (log p_v − log π_v) for `ref_policy`. No sampling, no variance."""
    if direction not in DIRECTIONS:
        raise KeelError(f"unknown direction {direction!r}: known: {', '.join(DIRECTIONS)}")
    policy, reference = _finite(policy_logprobs, ref_logprobs)
    first, second = (policy, reference) if direction == "policy_ref" else (reference, policy)
    return (first.exp() * (first - second)).sum(dim=-1)


def jsd(policy_logprobs: Tensor, ref_logprobs: Tensor, weight: float = 0.5) -> Tensor:
    """Generalised Jensen-Shannon divergence with weight w: (1−w) KL(π‖m) + w KL(p‖m), m = (1−w) π + w p.

    At w = ½ it is symmetric and at most log 2. Divided by w it tends to KL(p‖π) as w → 0, and divided by 1−w to
    KL(π‖p) as w → 1. Source: GKD 2306.13649, whose β is w.
    """
    if not 0 < weight < 1:
        raise KeelError(
            f"the JSD's weight is {weight:g}: it must be between 0 and 1; at the limits use exact or exact_reverse"
        )
    policy, reference = _finite(policy_logprobs, ref_logprobs)
    mixture = torch.logaddexp(policy + math.log1p(-weight), reference + math.log(weight))
    own = (policy.exp() * (policy - mixture)).sum(dim=-1)
    return (1 - weight) * own + weight * (reference.exp() * (reference - mixture)).sum(dim=-1)


def _split(policy: Tensor, reference: Tensor, k: int, of: str) -> tuple[Tensor, Tensor]:
    """The top k tokens of policy or reference as a boolean mask `[..., V]` (the head), and the head sum of the KL."""
    vocabulary = policy.shape[-1]
    if not 0 < k < vocabulary:
        raise KeelError(f"k is {k}: it must be from 1 to {vocabulary - 1}, one less than the vocabulary")
    index = {"policy": policy, "reference": reference}[of].detach().topk(k, dim=-1).indices
    head = torch.zeros_like(policy, dtype=torch.bool).scatter_(-1, index, True)
    terms = policy.exp() * (policy - reference)
    return head, torch.where(head, terms, torch.zeros_like(terms)).sum(dim=-1)


def _log_tail(logprobs: Tensor, head: Tensor) -> Tensor:
    """log of the probability outside the head, summed directly because 1 − Π loses precision."""
    floor = torch.finfo(logprobs.dtype).min
    return torch.logsumexp(torch.where(head, torch.full_like(logprobs, floor), logprobs), dim=-1)


def topk_kl(policy_logprobs: Tensor, ref_logprobs: Tensor, k: int, of: str = "policy") -> Tensor:
    """KL of the (k+1)-category distribution: the top k tokens of policy or reference, and one bucket for all others.

    Σ_head π u + (1−Π) log((1−Π)/(1−P)). It is never negative and a lower bound of the exact KL. The head sum alone has
    neither property.
    """
    policy, reference = _finite(policy_logprobs, ref_logprobs)
    head, head_sum = _split(policy, reference, k, of)
    log_policy_tail, log_ref_tail = _log_tail(policy, head), _log_tail(reference, head)
    return head_sum + log_policy_tail.exp() * (log_policy_tail - log_ref_tail)


def topk_kl_unbiased(
    policy_logprobs: Tensor, ref_logprobs: Tensor, tokens: Tensor, k: int, of: str = "policy"
) -> Tensor:
    """The exact head sum, plus u of the sampled token if it is outside the head.

    Value and gradient are unbiased for KL(π‖p). The gradient is Σ_head π u s, plus u_y·s_y for a token y outside the
    head. Terms without u are left out: their expectation is E[s] = 0, and without them the gradient of equal
    distributions is 0 on every sample.
    `tokens` holds one token per distribution, or several `[..., S]` with a value for each.
    """
    policy, reference = _finite(policy_logprobs, ref_logprobs)
    several = tokens.dim() == policy.dim()
    if (tokens.shape[:-1] if several else tokens.shape) != policy.shape[:-1] or tokens.is_floating_point():
        raise KeelError(
            f"tokens must be integer ids of shape {tuple(policy.shape[:-1])}, got {tokens.dtype} {tuple(tokens.shape)}"
        )
    head, _ = _split(policy, reference, k, of)
    u = (policy - reference).detach()
    head_sum = torch.where(head, policy.exp() * u, torch.zeros_like(u)).sum(dim=-1, keepdim=True)
    index = tokens.long() if several else tokens.long().unsqueeze(-1)
    logp = policy.gather(-1, index)
    tail = u.gather(-1, index) * (1 + logp - logp.detach())
    values = head_sum + torch.where(head.gather(-1, index), torch.zeros_like(tail), tail)
    return values if several else values.squeeze(-1)


def penalty_divergence(kl: KLTermOptions, top_of: str = "policy") -> Divergence | None:
    """The divergence of jsd, topk or topk_unbiased; None for others. Exact scores always include both exact KLs.

    `top_of` selects whose top tokens `topk` and `topk_unbiased` use: "policy" or "reference".
    """
    if kl.estimator == "jsd":
        return lambda policy, ref, tokens: jsd(policy, ref, kl.jsd_weight)
    if kl.estimator == "topk":
        return lambda policy, ref, tokens: topk_kl(policy, ref, kl.topk, top_of)
    return partial(topk_kl_unbiased, k=kl.topk, of=top_of) if kl.estimator == "topk_unbiased" else None
