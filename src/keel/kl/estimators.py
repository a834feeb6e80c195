"""Value estimators of KL(policy‖reference) from tokens that the policy sampled, and forms of their gradients.

Built-in estimators are functions of d = log p − log π (Schulman, http://joschu.net/blog/kl-approx.html). A user's own,
`module:attr`, is a function of d, of (logp, ref_logp) or of (logp, ref_logp, old_logp). Parameters follow the name:
`module:attr(width=0.5)`. They are part of the name because the audit verifies the function with these values only.

One KL value can have several gradients, and only some of them are the gradient of a KL; `keel.kl.facts` lists their
expectations. A form is written `[weight][*][carrier]`:

    plain        autograd of the estimator itself
    k2           straight-through: the estimator's value, k2's gradient (likewise k1, k3, abs)
    rho          ρ·k; ρ has a gradient
    sg_rho       sg(ρ)·k
    sg_rho*k2    value sg(ρ)·k, gradient of sg(ρ)·k2 (likewise with the other estimators, and with rho)

ρ·k3 and sg(ρ)·k2 have the same gradient ρ·u·s on every sample. sg(ρ)·k2 needs no e^d and avoids cancellation.
Sources: Tang & Munos 2506.09477, Liu et al. 2510.01555, RPG 2505.17508, DeepSeek-V3.2 2512.02556.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from keel.base.errors import KeelError, unknown
from keel.base.parts import import_object, part_arguments
from keel.kl.facts import CUSTOM_SPEC, GradientForm, is_custom
from keel.kl.ratios import DEFAULT_CLAMP, at_least_fp32, check_mask, finite_floor, importance_ratio, log_ratio, select

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

    A user's own estimator (`module:attr`) of (logp, ref_logp) gets logp + d as ref_logp, where d is clamped.
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
            "return one value per token, before any mean or mask"
        )
    if not result.is_floating_point() or result.layout != torch.strided or result.device != like.device:
        raise KeelError(
            f"{name} returned a {result.layout} tensor of {result.dtype} on {result.device}: "
            "return an ordinary floating-point tensor on the device of its inputs"
        )
    return result


def custom_estimator(name: str) -> Callable[..., object]:
    """The user's function, bound to the parameters in its name."""
    match = CUSTOM_SPEC.fullmatch(name)
    path, text = (name, None) if match is None else (match["path"], match["params"])
    function: Callable[..., object] = import_object(path, "kl.estimator")
    params = {} if text is None else _parameters(name, text)
    if not params:
        return function
    tensors = 1 if takes_ratio(partial(function, **params)) else arity(function)
    return partial(function, **part_arguments(f"kl.estimator {path}", function, params, positional=tensors))


def _parameters(name: str, text: str) -> dict[str, Any]:
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError(text)
        return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, ValueError):
        raise KeelError(f"kl.estimator={name}: write parameters as module:attr(name=value, …)") from None


def takes_ratio(function: Callable[..., object]) -> bool:
    """Whether the function takes one tensor, the log-ratio d."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in callables have no signature
        return False
    positional = [
        p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ]
    return len(positional) == 1


def arity(function: Callable[..., object]) -> int:
    """2 for (logp, ref), 3 for (logp, ref, old).

    A third parameter counts as `old` if it has no default or its name starts with `old`. `clamp=10.0` does not count.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # a built-in without a signature: assume three parameters
        return 3
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 3:
        return 3 if any(p.kind is p.VAR_POSITIONAL for p in parameters) else 2
    third = positional[2]
    return 3 if third.default is third.empty or third.name.startswith("old") else 2


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the mask. For an empty mask, the mean and its gradient are 0."""
    check_mask(mask, values.shape)
    return select(at_least_fp32(values), mask).sum() / mask.sum().clamp_min(1)


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
