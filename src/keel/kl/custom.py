"""A user's own estimator, `module:attr`: a function of d, of (logp, ref_logp) or of (logp, ref_logp, old_logp)."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from keel.base.errors import KeelError
from keel.base.imports import import_object


def custom_estimate(name: str, d: Tensor, logp: Tensor, old_logp: Tensor) -> Tensor:
    """The values `[B, T]` of a user's own estimator; `d` is its distance between reference and policy."""
    function = import_object(name, "kl.estimator")
    arguments = (d,) if takes_ratio(function) else (logp, logp + d, old_logp)[: arity(function)]
    return call_checked(name, function, *arguments).to(logp.dtype)


def call_checked(name: str, function: Callable[..., object], *arguments: Tensor) -> Tensor:
    """What a user's function returns, which must be one value a token."""
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


def takes_ratio(function: Callable[..., object]) -> bool:
    """Whether it takes one tensor, the log-ratio d."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in callables have none
        return False
    positional = [
        p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ]
    return len(positional) == 1


def arity(function: Callable[..., object]) -> int:
    """2 for (logp, ref), 3 where a third positional parameter is `old`.

    It is taken for that only if it has no default or says so by its name: `clamp=10.0` is not ours to fill.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # built without a signature: assume the full one
        return 3
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) < 3:
        return 3 if any(p.kind is p.VAR_POSITIONAL for p in parameters) else 2
    third = positional[2]
    return 3 if third.default is third.empty or third.name.startswith("old") else 2
