"""Norms and gated activations of a model on a GPU as one kernel each, forward and backward.

Written out, an RMS norm is six passes over its input and a gated activation two, and nearly as many backward: in a
training pass of a small or middle-sized model they take as long as the matrix products. A module is replaced only
where its numbers have been found to be the same on random input.
"""

from __future__ import annotations

import importlib.util
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_GATED = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def fuse_modules(model: nn.Module) -> int:
    """Replace the forward of modules that have a fused form, in place; how many. Weights and names stay."""
    if not next(model.parameters()).is_cuda:
        return 0
    count = 0
    agreeing: dict[tuple[Any, ...], bool] = {}
    for module in model.modules():
        forward = _fused_forward(module)
        if forward is None:
            continue
        parameter = next(module.parameters())
        kind = (type(module), parameter.shape, parameter.dtype)
        if kind not in agreeing:
            agreeing[kind] = _agrees(module, forward)
        if agreeing[kind]:
            module.forward = MethodType(forward, module)
            count += 1
    return count


def _fused_forward(module: nn.Module) -> Any:
    names = {name for name, _ in module.named_children()}
    if hasattr(module, "variance_epsilon") and not names and [n for n, _ in module.named_parameters()] == ["weight"]:
        return _rms_norm
    silu = names == _GATED and type(module.act_fn).__name__ in ("SiLU", "SiLUActivation")
    return _gated_mlp if silu and importlib.util.find_spec("triton") is not None else None


def _rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    return functional.rms_norm(
        hidden_states, self.weight.shape, self.weight.to(hidden_states.dtype), self.variance_epsilon
    )


def _gated_mlp(self: Any, x: Tensor) -> Tensor:
    from keel.models.gated import gated_silu

    y: Tensor = self.down_proj(gated_silu(self.gate_proj(x), self.up_proj(x)))
    return y


@torch.no_grad()
def _agrees(module: Any, forward: Any) -> bool:
    """Whether the fused form gives the module's own numbers, to what rounding allows."""
    parameter = next(module.parameters())
    width = parameter.shape[-1]
    generator = torch.Generator(parameter.device).manual_seed(0)
    x = torch.randn(64, width, generator=generator, device=parameter.device).to(parameter.dtype)
    try:
        expected, result = module(x).float(), forward(module, x).float()
    except Exception:  # whatever a foreign module raises here, its own forward still serves
        return False
    half = parameter.dtype in (torch.float16, torch.bfloat16)
    error = (result - expected).norm() / expected.norm().clamp_min(1e-12)
    return bool(error < (1e-2 if half else 1e-5))
