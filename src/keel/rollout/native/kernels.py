"""Triton kernels of a decode step: what stands between its matrix products, a few launches a layer.

Imported on a GPU alone. Activations are rows `[B, features]`; everything is computed in fp32 and rounded once.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

KEY_BLOCK = 64  # keys that an attention kernel reads at a time
SPLIT_KEYS = 512  # keys of a prompt that one program reads: longer prompts are read by several


@triton.jit
def _norm_kernel(
    x,
    residual,
    weight,
    bias,
    out,
    eps,
    offset,
    width,
    ADD: tl.constexpr,
    CENTRED: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    value = tl.load(residual + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(x + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        value = value.to(residual.dtype.element_ty).to(tl.float32)
        tl.store(residual + row * width + columns, value, mask=inside)
    if CENTRED:
        value = tl.where(inside, value - tl.sum(value, 0) / width, 0.0)
    value *= tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    value *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) + offset
    if BIAS:
        value += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, value, mask=inside)


def norm(
    x: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    offset: float = 0.0,
    centred: bool = False,
) -> Tensor:
    """residual += x in place (where there is an x), then its RMS norm, or layer norm where `centred`."""
    rows, width = residual.shape
    out = torch.empty_like(residual)
    _norm_kernel[(rows,)](
        residual if x is None else x,
        residual,
        weight,
        weight if bias is None else bias,
        out,
        eps,
        offset,
        width,
        ADD=x is not None,
        CENTRED=centred,
        BIAS=bias is not None,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4 if width <= 2048 else 8,
    )
    return out


@triton.jit
def _activate_kernel(
    gate, up, out, gate_stride, up_stride, width, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    value = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if KIND == "silu":
        value = value / (1 + tl.exp(-value))
    elif KIND == "gelu_tanh":
        inner = 0.7978845608028654 * (value + 0.044715 * value * value * value)
        value = value / (1 + tl.exp(-2 * inner))
    elif KIND == "gelu":
        value = 0.5 * value * (1 + tl.erf(value * 0.7071067811865476))
    elif KIND == "relu":
        value = tl.maximum(value, 0.0)
    if GATED:
        value *= tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, value, mask=inside)


def activate(gate: Tensor, up: Tensor | None, kind: str) -> Tensor:
    """act(gate) · up, or act(gate) alone; rows may lie apart."""
    rows, width = gate.shape
    out = torch.empty(rows, width, dtype=gate.dtype, device=gate.device)
    other = gate if up is None else up
    _activate_kernel[(rows, triton.cdiv(width, 1024))](
        gate, other, out, gate.stride(0), other.stride(0), width, KIND=kind, GATED=up is not None, BLOCK=1024
    )
    return out


@triton.jit
def _store_kernel(
    qkv,
    cos,
    sin,
    q_weight,
    k_weight,
    cache,
    lengths,
    eps,
    offset,
    qkv_stride,
    cache_row,
    cache_head,
    cache_column,
    cache_kind,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    ROTATE: tl.constexpr,
    NORM: tl.constexpr,
    HALF: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half = tl.arange(0, HALF)
    inside = half < SIZE // 2
    source = qkv + row * qkv_stride + head * SIZE
    low = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + SIZE // 2 + half, mask=inside, other=0.0).to(tl.float32)
    is_value = head >= HEADS + KV_HEADS
    if not is_value:
        if NORM:
            scale = tl.rsqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / SIZE + eps)
            weight = tl.where(head < HEADS, q_weight, k_weight)
            low *= scale * (tl.load(weight + half, mask=inside, other=0.0).to(tl.float32) + offset)
            high *= scale * (tl.load(weight + SIZE // 2 + half, mask=inside, other=0.0).to(tl.float32) + offset)
        if ROTATE:
            cos_low = tl.load(cos + row * SIZE + half, mask=inside, other=0.0).to(tl.float32)
            sin_low = tl.load(sin + row * SIZE + half, mask=inside, other=0.0).to(tl.float32)
            cos_high = tl.load(cos + row * SIZE + SIZE // 2 + half, mask=inside, other=0.0).to(tl.float32)
            sin_high = tl.load(sin + row * SIZE + SIZE // 2 + half, mask=inside, other=0.0).to(tl.float32)
            turned = low * cos_low - high * sin_low
            high = high * cos_high + low * sin_high
            low = turned
    if head < HEADS:
        tl.store(source + half, low, mask=inside)
        tl.store(source + SIZE // 2 + half, high, mask=inside)
    else:
        column = tl.load(lengths + row).to(tl.int64)
        kind = tl.where(is_value, 1, 0).to(tl.int64)
        kv_head = head - HEADS - kind * KV_HEADS
        target = cache + kind * cache_kind + row * cache_row + kv_head * cache_head + column * cache_column
        tl.store(target + half, low, mask=inside)
        tl.store(target + SIZE // 2 + half, high, mask=inside)


def rotate_and_store(
    qkv: Tensor,
    tables: tuple[Tensor, Tensor] | None,
    norms: tuple[Tensor, Tensor, float, float] | None,
    cache: Tensor,
    lengths: Tensor,
    heads: int,
    kv_heads: int,
    size: int,
) -> None:
    """Norm and rotate the queries of `qkv` `[B, (heads + 2 kv_heads)·D]` in place and its keys; store keys and values
    in `cache` `[2, B, kv_heads, T, D]` at each row's column `lengths` `[B]`."""
    cos, sin = tables if tables is not None else (qkv, qkv)
    q_weight, k_weight, eps, offset = norms if norms is not None else (qkv, qkv, 0.0, 0.0)
    _store_kernel[(len(qkv), heads + 2 * kv_heads)](
        qkv,
        cos,
        sin,
        q_weight,
        k_weight,
        cache,
        lengths,
        eps,
        offset,
        qkv.stride(0),
        cache.stride(1),
        cache.stride(2),
        cache.stride(3),
        cache.stride(0),
        HEADS=heads,
        KV_HEADS=kv_heads,
        SIZE=size,
        ROTATE=tables is not None,
        NORM=norms is not None,
        HALF=triton.next_power_of_2(size // 2),
        num_warps=1,
    )


@triton.jit
def _attend_block(q, k, v, inside, peak, total, out, scale):
    """One block of keys into a running softmax, in base 2."""
    scores = tl.where(inside[None, :], tl.dot(q, tl.trans(k), input_precision="ieee") * scale, -float("inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(peak - higher)
    total = total * shrink + tl.sum(weights, 1)
    out = out * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return higher, total, out


@triton.jit(do_not_specialize=["rows", "width", "tiles"])
def _prompt_kernel(
    q,
    keys,
    values,
    slots,
    prompt_lengths,
    part,
    part_lse,
    scale,
    q_stride,
    k_group,
    k_head,
    k_column,
    v_group,
    v_head,
    v_column,
    rows,
    width,
    tiles,
    REPEATS: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    tile, split = tl.program_id(2) % tiles, tl.program_id(2) // tiles
    member = tile * M + tl.arange(0, M)
    slot, repeat = member // REPEATS, member % REPEATS
    row = tl.load(slots + group * width + slot, mask=slot < width, other=-1).to(tl.int64)
    real = row >= 0
    head = kv_head * REPEATS + repeat
    d = tl.arange(0, D)
    queries = tl.load(
        q + row[:, None] * q_stride + head[:, None] * SIZE + d[None, :],
        mask=real[:, None] & (d < SIZE)[None, :],
        other=0.0,
    )
    length = tl.load(prompt_lengths + group)
    start = split * SPLIT
    stop = tl.minimum(length, start + SPLIT)
    peak = tl.full([M], -1e30, tl.float32)
    total = tl.zeros([M], tl.float32)
    out = tl.zeros([M, D], tl.float32)
    k_base, v_base = group * k_group + kv_head * k_head, group * v_group + kv_head * v_head
    for first in range(start, stop, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < stop
        mask = inside[:, None] & (d < SIZE)[None, :]
        k = tl.load(keys + k_base + column[:, None] * k_column + d[None, :], mask=mask, other=0.0)
        v = tl.load(values + v_base + column[:, None] * v_column + d[None, :], mask=mask, other=0.0)
        peak, total, out = _attend_block(queries, k, v, inside, peak, total, out, scale)
    entry = (split * rows + row) * HEADS + head
    safe = tl.where(total > 0, total, 1.0)
    tl.store(part_lse + entry, tl.where(total > 0, peak + tl.log2(safe), -1e30), mask=real)
    tl.store(part + entry[:, None] * SIZE + d[None, :], out / safe[:, None], mask=real[:, None] & (d < SIZE)[None, :])


@triton.jit(do_not_specialize=["rows", "splits"])
def _suffix_kernel(
    q,
    cache,
    starts,
    lengths,
    part,
    part_lse,
    out,
    scale,
    q_stride,
    c_kind,
    c_row,
    c_head,
    c_column,
    rows,
    splits,
    REPEATS: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    repeat = tl.arange(0, M)
    real = repeat < REPEATS
    head = kv_head * REPEATS + repeat
    d = tl.arange(0, D)
    wide = real[:, None] & (d < SIZE)[None, :]
    queries = tl.load(q + row * q_stride + head[:, None] * SIZE + d[None, :], mask=wide, other=0.0)
    start, stop = tl.load(starts + row), tl.load(lengths + row) + 1
    peak = tl.full([M], -1e30, tl.float32)
    total = tl.zeros([M], tl.float32)
    attended = tl.zeros([M, D], tl.float32)
    base = row * c_row + kv_head * c_head
    for first in range(start, stop, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = column < stop
        at = base + column[:, None] * c_column + d[None, :]
        mask = inside[:, None] & (d < SIZE)[None, :]
        k = tl.load(cache + at, mask=mask, other=0.0)
        v = tl.load(cache + c_kind + at, mask=mask, other=0.0)
        peak, total, attended = _attend_block(queries, k, v, inside, peak, total, attended, scale)
    for split in range(splits):
        entry = (split * rows + row) * HEADS + head
        lse = tl.load(part_lse + entry, mask=real, other=-1e30)
        value = tl.load(part + entry[:, None] * SIZE + d[None, :], mask=wide, other=0.0)
        higher = tl.maximum(peak, lse)
        shrink, share = tl.exp2(peak - higher), tl.exp2(lse - higher)
        total = total * shrink + share
        attended = attended * shrink[:, None] + value * share[:, None]
        peak = higher
    tl.store(out + (row * HEADS + head[:, None]) * SIZE + d[None, :], attended / total[:, None], mask=wide)


def attend(
    qkv: Tensor,
    prompt_keys: Tensor,
    prompt_values: Tensor,
    slots: Tensor,
    prompt_lengths: Tensor,
    cache: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    heads: int,
) -> Tensor:
    """Attention of each row's newest query over its prompt, which a group reads once, and its own suffix; `[B, H·D]`.

    Prompts are `[G, kv_heads, P, D]` of `prompt_lengths` `[G]`; `slots` `[G, W]` are the rows of each, −1 for none.
    The suffix of a row is in `cache` `[2, B, kv_heads, T, D]` from column `starts` up to and with `lengths`.
    """
    rows, (_, _, kv_heads, _, size) = len(qkv), cache.shape
    repeats, splits = heads // kv_heads, triton.cdiv(prompt_keys.shape[2], SPLIT_KEYS)
    groups, width = slots.shape
    part = torch.empty(splits, rows, heads, size, dtype=torch.float32, device=qkv.device)
    part_lse = torch.empty(splits, rows, heads, dtype=torch.float32, device=qkv.device)
    out = torch.empty(rows, heads * size, dtype=qkv.dtype, device=qkv.device)
    d, base2 = max(16, triton.next_power_of_2(size)), scale * 1.4426950408889634
    tile = 16 if width * repeats <= 16 else 64  # few sizes: each is compiled once
    tiles = triton.cdiv(width * repeats, tile)
    _prompt_kernel[(groups, kv_heads, splits * tiles)](
        qkv,
        prompt_keys,
        prompt_values,
        slots,
        prompt_lengths,
        part,
        part_lse,
        base2,
        qkv.stride(0),
        *prompt_keys.stride()[:3],
        *prompt_values.stride()[:3],
        rows,
        width,
        tiles,
        REPEATS=repeats,
        HEADS=heads,
        SIZE=size,
        D=d,
        M=tile,
        SPLIT=SPLIT_KEYS,
        BLOCK=KEY_BLOCK,
        num_warps=4,
    )
    _suffix_kernel[(rows, kv_heads)](
        qkv,
        cache,
        starts,
        lengths,
        part,
        part_lse,
        out,
        base2,
        qkv.stride(0),
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        cache.stride(3),
        rows,
        splits,
        REPEATS=repeats,
        HEADS=heads,
        SIZE=size,
        D=d,
        M=max(16, triton.next_power_of_2(repeats)),
        BLOCK=KEY_BLOCK,
        num_warps=4,
    )
    return out


@triton.jit
def _mass_kernel(logits, out, factor, vocabulary, blocks, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    offset = tl.arange(0, BLOCK)
    token = block * SIZE + offset
    inside = (offset < SIZE) & (token < vocabulary)
    value = tl.load(logits + row * vocabulary + token, mask=inside, other=-float("inf")).to(tl.float32) * factor
    peak = tl.max(value, 0)
    safe = tl.where(peak > -float("inf"), peak, 0.0)
    total = tl.sum(tl.exp(value - safe), 0)
    tl.store(out + row * blocks + block, tl.where(total > 0, safe + tl.log(total), -float("inf")))


def log_masses(logits: Tensor, temperature: float, blocks: int, size: int) -> Tensor:
    """The log of the probability of each block of `size` tokens, times a constant of the row; `[B, blocks]`, fp32."""
    rows, vocabulary = logits.shape
    out = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
    _mass_kernel[(rows, blocks)](
        logits, out, 1 / temperature, vocabulary, blocks, SIZE=size, BLOCK=triton.next_power_of_2(size), num_warps=1
    )
    return out
