"""silu(gate) · up as one Triton kernel, forward and backward. Import on a GPU only."""

# mypy: ignore-errors
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


# Triton specialises widths divisible by 16 and then uses wide loads.
@triton.jit
def _forward_kernel(gate, up, out, stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    g = tl.load(gate + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, g / (1 + tl.exp(-g)) * u, mask=inside)


@triton.jit
def _backward_kernel(grad, gate, up, d_gate, d_up, stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    d = tl.load(grad + row * width + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-g))
    tl.store(d_up + row * stride + at, d * g * sigmoid, mask=inside)
    tl.store(d_gate + row * stride + at, d * u * sigmoid * (1 + g * (1 - sigmoid)), mask=inside)


def _launch(kernel, first: Tensor, gate: Tensor, *others: Tensor) -> None:
    """Launch over all rows of the contiguous `first`. Gate, up and their gradients have the row stride of `gate`."""
    width = first.shape[-1]
    rows = first.numel() // max(width, 1)
    if rows:
        block = min(_BLOCK, triton.next_power_of_2(width))
        kernel[(rows, triton.cdiv(width, block))](*others, gate.stride(-2), width, BLOCK=block)


def _gated(gate: Tensor, up: Tensor | None) -> Tensor:
    gate, up = gate.chunk(2, dim=-1) if up is None else (gate, up)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _launch(_forward_kernel, out, gate, gate, up, out)
    return out


class _GatedSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None) -> Tensor:
        gate, up = gate.contiguous(), None if up is None else up.contiguous()
        ctx.save_for_backward(gate, up)
        return _gated(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        gate, up = ctx.saved_tensors
        gradients = torch.empty_like(gate), None if up is None else torch.empty_like(up)
        d_gate, d_up = gradients[0].chunk(2, dim=-1) if up is None else gradients
        gate, up = gate.chunk(2, dim=-1) if up is None else (gate, up)
        grad = grad.contiguous()
        _launch(_backward_kernel, grad, gate, grad, gate, up, d_gate, d_up)
        return gradients


def gated_silu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate) · up for tensors of equal shape and dtype. Without `up`, `gate` holds both, one half each."""
    if torch.is_grad_enabled():
        return _GatedSilu.apply(gate, up)
    return _gated(gate.contiguous(), None if up is None else up.contiguous())
