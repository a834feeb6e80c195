"""Value estimators of KL(policy‖reference) from tokens that the policy sampled.

Each is a function of d = log p − log π alone. `keel.kl.facts` lists their expected *gradients*.
Source: Schulman, http://joschu.net/blog/kl-approx.html
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from keel.base.errors import KeelError, unknown
from keel.kl.custom import arity, custom_estimator, is_custom, takes_ratio
from keel.kl.ratios import DEFAULT_CLAMP, at_least_fp32, check_mask, finite_floor, log_ratio, select

Estimator = Callable[[Tensor], Tensor]


def k1(d: Tensor) -> Tensor:
    """k1 = −d. Unbiased for KL(π‖p), but with high variance and of either sign."""
    return -d


def k2(d: Tensor) -> Tensor:
    """k2 = d²/2. Biased as a value; its gradient in the loss is that of KL(π‖p)."""
    return 0.5 * d.square()


def k3(d: Tensor) -> Tensor:
    """k3 = e^d − 1 − d ≥ 0. Unbiased for KL(π‖p) if E_π[p/π] = 1. Its plain gradient is that of KL(p‖π)."""
    return torch.expm1(d) - d


def absolute(d: Tensor) -> Tensor:
    """|d| ≥ k1. It estimates no KL. Its gradient in the loss is that of ‖π − p‖₁, twice the total variation."""
    return d.abs()


ESTIMATORS: Mapping[str, Estimator] = MappingProxyType({"k1": k1, "k2": k2, "k3": k3, "abs": absolute})


def get_estimator(name: str) -> Estimator:
    """The named estimator. The error for an unknown name suggests a similar one."""
    if name not in ESTIMATORS:
        raise unknown("estimator", name, ESTIMATORS)
    return ESTIMATORS[name]


def estimate(
    name: str,
    logp: Tensor,
    ref_logp: Tensor,
    mask: Tensor | None = None,
    clamp: float | None = DEFAULT_CLAMP,
    *,
    old_logp: Tensor | None = None,
) -> Tensor:
    """The named estimator per token `[B, T]`, in nats, zero outside the mask, with its plain autograd gradient.

    For a user's own estimator (`module:attr`), the difference of the first two arguments is the clamped log-ratio.
    """
    d = log_ratio(logp, ref_logp, mask, clamp).d
    if not is_custom(name):
        return get_estimator(name)(d)
    logp = finite_floor(select(logp, mask))
    old = logp.detach() if old_logp is None else finite_floor(select(old_logp, mask))
    return select(custom_estimate(name, d, logp, old), mask)


def custom_estimate(name: str, d: Tensor, logp: Tensor, old_logp: Tensor) -> Tensor:
    """The values `[B, T]` of a user's own estimator; d = log p − log π."""
    function = custom_estimator(name)
    arguments = (d,) if takes_ratio(function) else (logp, logp + d, old_logp)[: arity(function)]
    return call_checked(name, function, *arguments).to(logp.dtype)


def call_checked(name: str, function: Callable[..., object], *arguments: Tensor) -> Tensor:
    """Call a user's function and check that it returns one value per token."""
    like = arguments[0]
    try:
        result = function(*arguments)
    except (Exception, SystemExit) as error:
        cause = f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
        raise KeelError(f"{name} raised {cause}: it is called with (logp, ref[, old]), each [B, T]") from None
    if not isinstance(result, Tensor):
        raise KeelError(f"{name} returned {type(result).__name__}: return a tensor of shape {tuple(like.shape)}")
    if result.shape != like.shape:
        raise KeelError(
            f"{name} returned shape {tuple(result.shape)} for inputs of {tuple(like.shape)}: "
            "return one value a token, before any mean or mask"
        )
    if not result.is_floating_point() or result.layout != torch.strided or result.device != like.device:
        raise KeelError(
            f"{name} returned a {result.layout} tensor of {result.dtype} on {result.device}: "
            "return an ordinary floating-point tensor on the device of its inputs"
        )
    return result


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the mask. For an empty mask, the mean and its gradient are 0."""
    check_mask(mask, values.shape)
    return select(at_least_fp32(values), mask).sum() / mask.sum().clamp_min(1)
