"""Log-ratios. Only this module checks, upcasts, masks and clamps log-probabilities.

Notation of this package: π is the policy, p the reference, and μ the policy that drew the samples. d = log p − log π,
u = −d, s = ∇log π, ρ = π/μ, and sg is stop-gradient. Tensors are `[B, T]`, aligned to the token that they score.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keel.base.errors import KeelError
from keel.kl.options import DEFAULT_CLAMP


@dataclass(frozen=True)
class LogRatio:
    """d = log p − log π, zero outside the mask, and a mask of the tokens where d was clamped."""

    d: Tensor
    clamped: Tensor


def at_least_fp32(x: Tensor) -> Tensor:
    """Convert fp16 and bf16 to fp32; leave fp32 and fp64 unchanged (`keel verify` runs in fp64)."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def finite_floor(x: Tensor) -> Tensor:
    """Convert to at least fp32, and −inf to the most negative finite number: 0 · (−inf) and −inf − (−inf) are NaN."""
    x = at_least_fp32(x)
    return x.clamp_min(torch.finfo(x.dtype).min)


def check_mask(mask: Tensor, shape: torch.Size, name: str = "action_mask") -> None:
    """Refuse a mask that is not boolean or does not have the shape of the values."""
    if mask.dtype != torch.bool:
        raise KeelError(f"{name} must be boolean, got {str(mask.dtype).removeprefix('torch.')}: pass {name}.bool()")
    if mask.shape != shape:
        raise KeelError(f"{name} has shape {tuple(mask.shape)}, the values have {tuple(shape)}: both must be [B, T]")


def check_same_shape(**tensors: Tensor) -> torch.Size:
    """Refuse tensors of different shapes or without a floating dtype; return the shape."""
    (first_name, first), *rest = tensors.items()
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.")
            raise KeelError(f"{name} must be floating point, got {kind}: pass log-probabilities, not token ids")
    for name, tensor in rest:
        if tensor.shape != first.shape:
            raise KeelError(
                f"{name} has shape {tuple(tensor.shape)} but {first_name} has {tuple(first.shape)}: "
                "both must be [B, T], aligned to the token they score"
            )
    return first.shape


def select(x: Tensor, mask: Tensor | None) -> Tensor:
    """x where the mask is true, 0 elsewhere, by `where`, because NaN · 0 = NaN."""
    return x if mask is None else torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


def clamp_straight_through(x: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    """Clamp the value to ±limit with a straight-through gradient, so that clamped tokens keep their gradient."""
    if limit is None:
        return x, torch.zeros_like(x, dtype=torch.bool)
    bound = torch.finfo(x.dtype).max
    x = x.clamp(-bound, bound)  # a sum of several finite floors can be infinite, and inf − inf is NaN
    return x.clamp(-limit, limit).detach() + (x - x.detach()), x.detach().abs() > limit


def log_ratio(
    logp: Tensor,
    ref_logp: Tensor,
    mask: Tensor | None = None,
    clamp: float | None = DEFAULT_CLAMP,
) -> LogRatio:
    """d = log p − log π per token: at least fp32, zero outside the mask, clamped to ±`clamp` nats in value.

    −inf is first replaced by the most negative finite number, so that a token with probability 0 under both models has
    d = 0 instead of NaN. A NaN inside the mask stays NaN, to make the error visible.
    """
    shape = check_same_shape(logp=logp, ref_logp=ref_logp)
    if clamp is not None and not clamp > 0:
        raise KeelError(f"log_ratio_clamp must be positive or null, got {clamp}: the default is {DEFAULT_CLAMP}")
    if mask is not None:
        check_mask(mask, shape)
    d = finite_floor(select(ref_logp, mask)) - finite_floor(select(logp, mask))
    d, clamped = clamp_straight_through(d, clamp)
    return LogRatio(d, clamped)


def importance_ratio(
    logp: Tensor,
    old_logp: Tensor,
    mask: Tensor | None = None,
    *,
    level: str = "token",
    cap: float | None = None,
    clamp: float | None = DEFAULT_CLAMP,
) -> Tensor:
    """ρ = π/μ per token `[B, T]`, or of the whole sequence `[B, 1]`, with gradient; 1 outside the mask.

    `cap` truncates ρ to min(ρ, cap) with the gradient min(ρ, cap)·s, which is nonzero above the cap.
    """
    if cap is not None and not cap > 0:
        raise KeelError(f"the ratio's cap must be positive or null, got {cap}")
    log_rho = -log_ratio(logp, old_logp, mask, clamp=None).d
    if level == "sequence":
        log_rho = log_rho.sum(dim=-1, keepdim=True)
    elif level != "token":
        raise KeelError(f"unknown ratio level {level!r}: known: token, sequence")
    rho = clamp_straight_through(log_rho, clamp)[0].exp()
    return rho if cap is None else rho * (cap / rho).clamp_max(1.0).detach()
