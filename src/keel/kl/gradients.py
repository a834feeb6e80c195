"""Gradient forms. One KL value can have several gradients, and only some of them are the gradient of a KL.

A form is written `[weight][*][carrier]`:

    plain        autograd of the estimator itself
    k2           straight-through: the estimator's value, k2's gradient (likewise k1, k3, abs)
    rho          ρ·k; ρ has a gradient
    sg_rho       sg(ρ)·k
    sg_rho*k2    value sg(ρ)·k, gradient of sg(ρ)·k2 (likewise with the other estimators, and with rho)

ρ·k3 and sg(ρ)·k2 have the same gradient ρ·u·s on every sample. sg(ρ)·k2 needs no e^d and avoids cancellation.
Sources: Tang & Munos 2506.09477, Liu et al. 2510.01555, RPG 2505.17508, DeepSeek-V3.2 2512.02556.
"""

from __future__ import annotations

from torch import Tensor

from keel.base.errors import KeelError
from keel.kl.estimators import estimate, get_estimator
from keel.kl.facts import GradientForm
from keel.kl.ratios import DEFAULT_CLAMP, at_least_fp32, importance_ratio, log_ratio, select


def straight_through(value: Tensor, gradient: Tensor) -> Tensor:
    """The value of the first argument with the gradient of the second."""
    return value.detach() + (gradient - gradient.detach())


def weighted_estimate(
    estimator: str,
    form: GradientForm,
    logp: Tensor,
    ref_logp: Tensor,
    old_logp: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    clamp: float | None = DEFAULT_CLAMP,
    ratio_cap: float | None = None,
) -> Tensor:
    """An estimator per token `[B, T]` in the given gradient form; zero outside the mask.

    `old_logp` is log μ, where μ is the policy that drew the samples. None means on-policy: μ is the policy itself, and
    ρ = 1 still has a gradient under `rho`. `ratio_cap` truncates ρ.
    """
    value = estimate(estimator, logp, ref_logp, mask, clamp, old_logp=old_logp)
    return with_form(value, form, logp, ref_logp, old_logp, mask, clamp=clamp, ratio_cap=ratio_cap)


def with_form(
    value: Tensor,
    form: GradientForm,
    logp: Tensor,
    ref_logp: Tensor | None = None,
    old_logp: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    clamp: float | None = DEFAULT_CLAMP,
    ratio_cap: float | None = None,
) -> Tensor:
    """Any per-token KL `[B, T]` (sampled, exact, top-k) in the given gradient form; see `weighted_estimate`.

    A form with a carrier needs `ref_logp`, because the carrier is computed from the sampled tokens.
    """
    if ratio_cap is not None and form.weight is None:
        raise KeelError(f"a ratio cap needs a weighted gradient form, got {str(form)!r}: use rho or sg_rho")
    if value.shape != logp.shape:
        raise KeelError(f"the KL has shape {tuple(value.shape)} but logp has {tuple(logp.shape)}: both must be [B, T]")
    value = select(at_least_fp32(value), mask)
    carrier = None
    if form.carrier is not None:
        if ref_logp is None:
            raise KeelError(f"the gradient form {str(form)!r} needs ref_logp: {form.carrier} is computed from it")
        carrier = get_estimator(form.carrier)(log_ratio(logp, ref_logp, mask, clamp).d)
    if form.weight is None:
        return value if carrier is None else straight_through(value, carrier)
    rho = importance_ratio(logp, logp.detach() if old_logp is None else old_logp, mask, cap=ratio_cap, clamp=clamp)
    if form.weight == "sg_rho":
        rho = rho.detach()
    return rho * value if carrier is None else straight_through(rho * value, rho * carrier)
