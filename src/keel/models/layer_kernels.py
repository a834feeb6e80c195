"""Triton kernels of a model's layers: rotation and merging around flash attention, and silu(gate) · up.

Import on a GPU only. For rotation and merging, one program handles all heads of one token's queries and keys. Results
are computed in fp32 and rounded once. No kernel stores to a pointer that it loads from, because one warp may store
before another has loaded.
"""

# mypy: ignore-errors
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate_heads(
    x,
    stride,
    more,
    out,
    cos,
    sin,
    token,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    ROTATE: tl.constexpr,
    BACK: tl.constexpr,
):
    """out = x, or x + more if `ADD`, rotated if `ROTATE`. `BACK` uses the transposed rotation."""
    half: tl.constexpr = SIZE // 2
    heads = tl.arange(0, HEAD_BLOCK)[:, None]
    columns = tl.arange(0, HALF_BLOCK)[None, :]
    inside = (heads < HEADS) & (columns < half)
    first = token * HEADS * SIZE + heads * SIZE + columns
    second = first + half
    x += token * stride + heads * SIZE + columns
    x1 = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(x + half, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x1 += tl.load(more + first, mask=inside, other=0.0).to(tl.float32)
        x2 += tl.load(more + second, mask=inside, other=0.0).to(tl.float32)
    if ROTATE:
        at = token * SIZE + columns
        in_half = columns < half
        cos1 = tl.load(cos + at, mask=in_half, other=0.0).to(tl.float32)
        cos2 = tl.load(cos + at + half, mask=in_half, other=0.0).to(tl.float32)
        sin1 = tl.load(sin + at, mask=in_half, other=0.0).to(tl.float32)
        sin2 = tl.load(sin + at + half, mask=in_half, other=0.0).to(tl.float32)
        if BACK:
            y1 = x1 * cos1 + x2 * sin2
            y2 = x2 * cos2 - x1 * sin1
        else:
            y1 = x1 * cos1 - x2 * sin1
            y2 = x2 * cos2 + x1 * sin2
        x1 = y1
        x2 = y2
    tl.store(out + first, x1, mask=inside)
    tl.store(out + second, x2, mask=inside)


@triton.jit
def _rotate_kernel(
    q,
    k,
    v,
    q_stride,
    k_stride,
    v_stride,
    q_out,
    k_out,
    v_out,
    cos,
    sin,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    _rotate_heads(q, q_stride, q, q_out, cos, sin, token, HEADS, SIZE, HEAD_BLOCK, HALF_BLOCK, False, True, False)
    _rotate_heads(k, k_stride, k, k_out, cos, sin, token, KV_HEADS, SIZE, KV_BLOCK, HALF_BLOCK, False, True, False)
    _rotate_heads(v, v_stride, v, v_out, cos, sin, token, KV_HEADS, SIZE, KV_BLOCK, HALF_BLOCK, False, False, False)


@triton.jit
def _add_gradients_kernel(
    d_q,
    d_k,
    d_v,
    more_q,
    more_k,
    more_v,
    q_out,
    k_out,
    v_out,
    cos,
    sin,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    ROTATE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row: tl.constexpr = HEADS * SIZE
    kv_row: tl.constexpr = KV_HEADS * SIZE
    _rotate_heads(d_q, row, more_q, q_out, cos, sin, token, HEADS, SIZE, HEAD_BLOCK, HALF_BLOCK, ADD, ROTATE, True)
    _rotate_heads(d_k, kv_row, more_k, k_out, cos, sin, token, KV_HEADS, SIZE, KV_BLOCK, HALF_BLOCK, ADD, ROTATE, True)
    if ADD:
        _rotate_heads(
            d_v, kv_row, more_v, v_out, cos, sin, token, KV_HEADS, SIZE, KV_BLOCK, HALF_BLOCK, True, False, True
        )


@triton.jit(do_not_specialize=["tokens"])
def _join_kernel(
    part,
    part_lse,
    more,
    more_lse,
    in_completion,
    out,
    out_lse,
    tokens,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEAD_BLOCK)
    at = heads * tokens + token
    columns = tl.arange(0, SIZE_BLOCK)[None, :]
    cells = token * HEADS * SIZE + heads[:, None] * SIZE + columns
    inside = (heads[:, None] < HEADS) & (columns < SIZE)
    lse = tl.load(part_lse + at, mask=heads < HEADS, other=0.0)
    value = tl.load(part + cells, mask=inside, other=0.0).to(tl.float32)
    if tl.load(in_completion + token):
        other = tl.load(more_lse + at, mask=heads < HEADS, other=0.0)
        top = tl.maximum(lse, other)
        joined = top + tl.log(tl.exp(lse - top) + tl.exp(other - top))
        value *= tl.exp(lse - joined)[:, None]
        value += tl.load(more + cells, mask=inside, other=0.0).to(tl.float32) * tl.exp(other - joined)[:, None]
        lse = joined
    tl.store(out_lse + at, lse, mask=heads < HEADS)
    tl.store(out + cells, value, mask=inside)


def _sizes(q: Tensor, k: Tensor) -> dict[str, int]:
    """Number of query heads, number of KV heads and head size, each with the next power of two."""
    (_, heads, size), kv_heads = q.shape, k.shape[1]
    blocks = {"HEAD_BLOCK": heads, "KV_BLOCK": kv_heads, "HALF_BLOCK": size // 2}
    sizes = {"HEADS": heads, "KV_HEADS": kv_heads, "SIZE": size}
    return sizes | {name: triton.next_power_of_2(count) for name, count in blocks.items()}


def rotate(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """`TorchKernels.rotate` in Triton. The heads of a token must be contiguous."""
    inputs = (q, k, v)
    strides = tuple(x.stride(0) for x in inputs)
    rotated = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs)
    _rotate_kernel[(len(q),)](*inputs, *strides, *rotated, cos, sin, **_sizes(q, k))
    return rotated


def join(part: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor, in_completion: Tensor) -> tuple[Tensor, Tensor]:
    """`TorchKernels.join` in Triton."""
    tokens, heads, size = part.shape
    blocks = {"HEAD_BLOCK": triton.next_power_of_2(heads), "SIZE_BLOCK": triton.next_power_of_2(size)}
    joined = torch.empty_like(part), torch.empty_like(lse)
    inputs = (part, lse, more, more_lse, in_completion)
    _join_kernel[(tokens,)](*inputs, *joined, tokens, HEADS=heads, SIZE=size, **blocks)
    return joined


def add_gradients(
    parts: tuple[Tensor, ...], more: tuple[Tensor, ...] | None, cos: Tensor | None, sin: Tensor | None
) -> tuple[Tensor, ...]:
    """`TorchKernels.add_gradients` in Triton."""
    d_q, d_k, d_v = parts
    if more is None and cos is None:
        return parts
    rotation = (d_q, d_q) if cos is None else (cos, sin)
    flags = {"ADD": more is not None, "ROTATE": cos is not None}
    sums = torch.empty_like(d_q), torch.empty_like(d_k), torch.empty_like(d_v) if more is not None else d_v
    _add_gradients_kernel[(len(d_q),)](*parts, *(more or parts), *sums, *rotation, **_sizes(d_q, d_k), **flags)
    return sums


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
