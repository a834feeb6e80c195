"""LoRA layers in bfloat16 without fp32 copies: y = W x + s · B (A x), with A x and the sum in the dtype of the pass.

peft keeps A and B in fp32 and converts the input of every layer for them. In a 7B model these copies take about as much
memory as all other activations, and each adapter costs six kernels. Here the products run in bfloat16, and the
gradients of A and B are summed in fp32. float16 keeps peft's forward: small gradients would underflow.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from keel.models.adapters import adapter_layers
from keel.models.flash_prefix import flash_dtype
from keel.models.fused_linear import product
from keel.models.head import is_plain_linear

TRIAL_SHARE = 0.5  # size of the adapters' output in a trial, as a share of the layer's output; training gives less
_LARGEST_STD = 10.0  # upper limit of the std of B in a trial


class LowRank(NamedTuple):
    """A LoRA layer: its base layer, and A `[r, in]`, B `[out, r]` and the scale s of its active adapter."""

    base: nn.Module
    down: Tensor
    up: Tensor
    scale: float


def low_rank(module: Any) -> LowRank | None:
    """The adapter of a layer if exactly one is active and it is plain and unmerged; otherwise None."""
    if not is_lora_linear(module) or module.disable_adapters or module.merged:
        return None
    active = [name for name in module.active_adapters if name in module.lora_A]
    if len(active) != 1 or active[0] in module.lora_variant or module.lora_bias.get(active[0]):
        return None
    name = active[0]
    if not all(is_plain_linear(holder[name]) for holder in (module.lora_A, module.lora_B)):
        return None
    if module.training and not isinstance(module.lora_dropout[name], nn.Identity):
        return None
    return LowRank(module.base_layer, module.lora_A[name].weight, module.lora_B[name].weight, module.scaling[name])


def is_lora_linear(module: Any) -> bool:
    """Whether a module is peft's LoRA around a linear layer, quantised or not."""
    kind = type(module)
    return kind.__module__.startswith("peft.tuners.lora.") and kind.__name__.startswith("Linear")


def lora_forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The bfloat16 forward of a LoRA layer; the class's own forward if the layer or dtype is unsupported."""
    dtype = flash_dtype(x)
    adapter = None if args or kwargs or dtype != torch.bfloat16 else low_rank(self)
    if adapter is None:
        result: Tensor = type(self).forward(self, x, *args, **kwargs)
        return result
    y: Tensor = adapter.base(x)
    own = y.to(dtype) if is_plain_linear(adapter.base) else y.to(dtype, copy=True)  # a hook or a kernel may hold it
    return add_low_rank(own.contiguous(), x, adapter).to(y.dtype)


def add_low_rank(y: Tensor, x: Tensor, adapter: LowRank) -> Tensor:
    """y + s · B (A x), in place; differentiable with respect to y, x, A and B."""
    if not torch.is_grad_enabled():
        return _add(y, x.to(y.dtype), adapter.down, adapter.up, adapter.scale)[0]
    out: Tensor = _AddLowRank.apply(y, x, adapter.down, adapter.up, adapter.scale)
    return out


def _add(y: Tensor, x: Tensor, down: Tensor, up: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """y + s · B (A x) in place, and A x."""
    inner = x.flatten(0, -2) @ down.to(x.dtype).t()
    rows = y.view(-1, y.shape[-1])
    rows.addmm_(inner, up.to(x.dtype).t(), alpha=scale)
    return y, inner


class _AddLowRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
        half = x.to(y.dtype)
        out, inner = _add(y, half, down.detach(), up.detach(), scale)
        ctx.mark_dirty(y)
        ctx.save_for_backward(half, inner, down, up)
        ctx.scale, ctx.input_dtype = scale, x.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, inner, down, up = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        d_inner = (rows @ up.to(rows.dtype)) * ctx.scale
        d_x = d_down = d_up = None
        if ctx.needs_input_grad[1]:
            d_x = product(d_inner, down.to(rows.dtype), ctx.input_dtype).view_as(x)
        if ctx.needs_input_grad[2]:
            d_down = product(d_inner.t(), x.flatten(0, -2), down.dtype)
        if ctx.needs_input_grad[3]:
            d_up = product(rows.t(), inner, up.dtype) * ctx.scale
        return grad, d_x, d_down, d_up, None


@contextmanager
def trial_adapters(model: nn.Module, share: float = TRIAL_SHARE) -> Iterator[None]:
    """Within this context, the model is in evaluation mode, and plain LoRA adapters with B = 0 have seeded values.

    An adapter with B = 0 changes nothing, so a fast path that left it out would pass every trial. All bits are restored
    afterwards.
    """
    before: list[tuple[Tensor, Tensor]] = []
    generators: dict[torch.device, torch.Generator] = {}
    modes = [(module, module.training) for module in model.modules()]
    model.eval()  # in training mode a layer with dropout has no fast path to try
    try:
        for _, layer in adapter_layers(model):
            adapter = low_rank(layer)
            if adapter is None or type(adapter.up) is not nn.Parameter or bool(adapter.up.detach().any()):
                continue
            before.append((adapter.up, adapter.up.detach().clone()))
            device = adapter.up.device
            generator = generators.setdefault(device, torch.Generator(device).manual_seed(0))
            with torch.no_grad():
                adapter.up.normal_(std=_trial_std(adapter, share), generator=generator)
        yield
    finally:
        with torch.no_grad():
            for weight, values in before:
                weight.copy_(values)
        for module, mode in modes:
            module.training = mode


def _trial_std(adapter: LowRank, share: float) -> float:
    """The std of B at which the adapter's output is `share` of its layer's output, for independent inputs."""
    weight = getattr(adapter.base, "weight", None)
    known = isinstance(weight, Tensor) and weight.is_floating_point()
    size = float(weight[:64].detach().float().std()) if known and weight is not None else 0.02
    inner = float(adapter.down.detach().float().std()) * len(adapter.down) ** 0.5 * adapter.scale
    return min(share * size / max(inner, 1e-12), _LARGEST_STD)
