"""KL over the vocabulary: exact in both directions, and truncated to the top k tokens.

All take log-probabilities `[..., V]` (normalised) and return `[...]` in nats.
"""

from __future__ import annotations

import torch
from torch import Tensor

from keel.base.errors import KeelError
from keel.kl.ratios import check_same_shape, finite_floor

DIRECTIONS = ("policy_ref", "ref_policy")


def _finite(policy: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """Both checked, in one dtype of fp32 at least, and finite."""
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


def _split(policy: Tensor, reference: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The policy's k likeliest tokens as a boolean head mask `[..., V]`, and the head's part of the exact KL."""
    vocabulary = policy.shape[-1]
    if not 0 < k < vocabulary:
        raise KeelError(f"k must be between 1 and the vocabulary less one ({vocabulary - 1}), got {k}")
    index = policy.detach().topk(k, dim=-1).indices
    head = torch.zeros_like(policy, dtype=torch.bool).scatter_(-1, index, True)
    terms = policy.exp() * (policy - reference)
    return head, torch.where(head, terms, torch.zeros_like(terms)).sum(dim=-1)


def _log_tail(logprobs: Tensor, head: Tensor) -> Tensor:
    """log of the probability outside the head, summed directly: 1 − Π would cancel."""
    floor = torch.finfo(logprobs.dtype).min
    return torch.logsumexp(torch.where(head, torch.full_like(logprobs, floor), logprobs), dim=-1)


def topk_kl(policy_logprobs: Tensor, ref_logprobs: Tensor, k: int) -> Tensor:
    """KL of the (k+1)-category distribution: the policy's top k tokens and one bucket for all others.

    Σ_head π u + (1−Π) log((1−Π)/(1−P)). Never negative, and a lower bound of the exact KL. The head sum alone is
    neither: it is no KL and can be negative.
    """
    policy, reference = _finite(policy_logprobs, ref_logprobs)
    head, head_sum = _split(policy, reference, k)
    log_policy_tail, log_ref_tail = _log_tail(policy, head), _log_tail(reference, head)
    return head_sum + log_policy_tail.exp() * (log_policy_tail - log_ref_tail)


def topk_kl_unbiased(policy_logprobs: Tensor, ref_logprobs: Tensor, tokens: Tensor, k: int) -> Tensor:
    """Exact head plus, for a sampled token outside it, that token's own u: unbiased for KL(π‖p), value and gradient.

    The tail's expectation is Σ_tail π u, whose gradient is E[1{y∉head}(u_y + 1) s_y]: plain autograd of u_y would
    give s_y alone, so the score-function part u_y·s_y is added with zero value.
    """
    policy, reference = _finite(policy_logprobs, ref_logprobs)
    if tokens.shape != policy.shape[:-1] or tokens.is_floating_point():
        raise KeelError(
            f"tokens must be integer ids of shape {tuple(policy.shape[:-1])}, got {tokens.dtype} {tuple(tokens.shape)}"
        )
    head, head_sum = _split(policy, reference, k)
    index = tokens.long().unsqueeze(-1)
    logp = policy.gather(-1, index).squeeze(-1)
    u = logp - reference.gather(-1, index).squeeze(-1)
    tail = u + u.detach() * (logp - logp.detach())
    in_head = head.gather(-1, index).squeeze(-1)
    return head_sum + torch.where(in_head, torch.zeros_like(tail), tail)
