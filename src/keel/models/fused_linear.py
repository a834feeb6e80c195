"""One half-precision matmul for several linear layers of the same input; each weight is cast once per update.

Autocast casts every weight in every microbatch and the input once per layer. It rounds every gradient to half precision
and casts it back. For small models on a GPU these kernel launches take longer than the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from keel.models.flash_prefix import flash_dtype
from keel.models.head import is_plain_linear

T = TypeVar("T")
Cast = tuple[Tensor, Tensor | None]  # weight and bias

# Casts with the versions of their parameters, by layers and dtype
Casts = dict[tuple[tuple[nn.Linear, ...], torch.dtype], tuple[list[int], Cast]]

_passes: list[Casts] = []


def cast_weights_once(items: Iterable[T]) -> Iterator[T]:
    """Yield the items. During the loop, each weight is cast to half precision only if it has changed."""
    casts: Casts = {}
    _passes.append(casts)
    try:
        yield from items
    finally:
        _passes[:] = [other for other in _passes if other is not casts]


def fused_linears(x: Tensor, *linears: nn.Module) -> Tensor | None:
    """The concatenated `linear(x)` of plain fp32 layers under half-precision autocast; None for other layers or dtypes.

    Gradients of weights and of an fp32 input are summed in fp32 and never rounded to half precision.
    """
    dtype = flash_dtype(x)
    plain = tuple(linear for linear in linears if is_plain_linear(linear) and linear.weight.dtype == torch.float32)
    biases = [linear.bias for linear in plain if linear.bias is not None]
    if len(plain) < len(linears) or len(biases) not in (0, len(plain)):
        return None
    if dtype not in (torch.float16, torch.bfloat16):
        return None
    if not torch.is_grad_enabled():
        return functional.linear(x.to(dtype), *_cast(plain, dtype))
    y: Tensor = _JointProduct.apply(x, plain, dtype, *(linear.weight for linear in plain), *biases)
    return y


class _JointProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, linears: tuple[nn.Linear, ...], dtype: torch.dtype, *parameters: Tensor) -> Tensor:
        weight, bias = _cast(linears, dtype)
        half = x.to(dtype)
        ctx.save_for_backward(half, weight)
        ctx.sizes, ctx.input_dtype, ctx.has_bias = [len(linear.weight) for linear in linears], x.dtype, bias is not None
        return functional.linear(half, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        grad, flat = grad.flatten(0, -2), x.flatten(0, -2)
        d_x, gradients = None, [None] * (len(ctx.sizes) * (1 + ctx.has_bias))
        if ctx.needs_input_grad[0]:
            d_x = product(grad, weight, ctx.input_dtype).view_as(x)
        if any(ctx.needs_input_grad[3:]):
            parts = [product(grad.t(), flat, torch.float32)]
            parts += [grad.sum(0, dtype=torch.float32)] if ctx.has_bias else []
            gradients = [part for whole in parts for part in whole.split(ctx.sizes)]
        return d_x, None, None, *gradients


def _cast(linears: tuple[nn.Linear, ...], dtype: torch.dtype) -> Cast:
    casts: Casts = _passes[-1] if _passes else {}
    biases = [linear.bias for linear in linears if linear.bias is not None]
    versions = [parameter._version for parameter in (*(linear.weight for linear in linears), *biases)]
    if casts.get((linears, dtype), (None,))[0] != versions:
        weight = torch.cat([linear.weight for linear in linears]) if len(linears) > 1 else linears[0].weight
        bias = torch.cat([bias.to(dtype) for bias in biases]) if biases else None
        casts[linears, dtype] = versions, (weight.to(dtype), bias)
    return casts[linears, dtype][1]


def product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix product a b, summed in fp32 and rounded once."""
    if a.dtype == dtype:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    with torch.autocast(a.device.type, enabled=False):
        return a.to(dtype) @ b.to(dtype)
