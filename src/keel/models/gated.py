"""silu(gate) · up as one Triton kernel, forward and backward. Imported on a GPU alone."""

# mypy: ignore-errors
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit(do_not_specialize=["count"])
def _forward_kernel(gate, up, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, g / (1 + tl.exp(-g)) * u, mask=inside)


@triton.jit(do_not_specialize=["count"])
def _backward_kernel(grad, gate, up, d_gate, d_up, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    d = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1 / (1 + tl.exp(-g))
    tl.store(d_up + at, d * g * sigmoid, mask=inside)
    tl.store(d_gate + at, d * u * sigmoid * (1 + g * (1 - sigmoid)), mask=inside)


class _GatedSilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        _forward_kernel[(triton.cdiv(out.numel(), _BLOCK),)](gate, up, out, out.numel(), BLOCK=_BLOCK)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        grid = (triton.cdiv(gate.numel(), _BLOCK),)
        _backward_kernel[grid](grad.contiguous(), gate, up, d_gate, d_up, gate.numel(), BLOCK=_BLOCK)
        return d_gate, d_up


def gated_silu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, of tensors of one shape and dtype."""
    return _GatedSilu.apply(gate, up)
