"""Triton kernels for all operations of a decode step except matrix products. Import on a GPU only.

Activations are rows `[B, features]`. Results are computed in fp32 and rounded once.
"""

# mypy: ignore-errors
from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from keel.rollout.native.state import (
    ENDED,
    KEY_BLOCK,
    PROMPT_PARTS,
    PROMPT_PROGRAMS,
    SUFFIX_PARTS,
    DecodeState,
    beside,
)
from keel.rollout.sampling import block_shape


@triton.jit
def _norm_kernel(
    x,
    residual,
    weight,
    bias,
    total,
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
        tl.store(total + row * width + columns, value, mask=inside)
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
) -> tuple[Tensor, Tensor]:
    """The sum residual + x (x may be None), and the sum's RMS norm, or its layer norm if `centred`."""
    rows, width = residual.shape
    total, out = residual if x is None else torch.empty_like(residual), torch.empty_like(residual)
    _norm_kernel[(rows,)](
        residual if x is None else x,
        residual,
        weight,
        weight if bias is None else bias,
        total,
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
    return total, out


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
    """act(gate) · up, or act(gate) if `up` is None. Rows need not be contiguous."""
    rows, width = gate.shape
    out = torch.empty(rows, width, dtype=gate.dtype, device=gate.device)
    other = gate if up is None else up
    _activate_kernel[(rows, triton.cdiv(width, 1024))](
        gate, other, out, gate.stride(0), other.stride(0), width, KIND=kind, GATED=up is not None, BLOCK=1024
    )
    return out


@triton.jit
def _attend_block(q, k, v, inside, peak, total, out, scale):
    """Add one block of keys to an online softmax, in base 2."""
    scores = tl.where(inside[None, :], tl.dot(q, tl.trans(k), input_precision="ieee") * scale, -float("inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    shrink = tl.exp2(peak - higher)
    total = total * shrink + tl.sum(weights, 1)
    out = out * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return higher, total, out


@triton.jit
def _rotated(
    qkv,
    cos,
    sin,
    weight,
    row,
    head,
    real,
    d,
    stride,
    eps,
    offset,
    SIZE: tl.constexpr,
    ROTATE: tl.constexpr,
    NORM: tl.constexpr,
):
    """Load the queries or keys `[M, D]` of these rows and heads, and norm and rotate them in fp32."""
    within = d < SIZE
    inside = real[:, None] & within[None, :]
    source = qkv + row[:, None] * stride + head[:, None] * SIZE
    value = tl.load(source + d[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(value * value, 1) / SIZE + eps)
        value *= scale[:, None] * (tl.load(weight + d, mask=within, other=0.0).to(tl.float32) + offset)[None, :]
    if ROTATE:
        low = d < SIZE // 2
        partner = tl.where(low, d + SIZE // 2, d - SIZE // 2)
        other = tl.load(source + partner[None, :], mask=inside, other=0.0).to(tl.float32)
        if NORM:
            paired = tl.load(weight + partner, mask=within, other=0.0).to(tl.float32) + offset
            other *= scale[:, None] * paired[None, :]
        at = row[:, None] * SIZE + d[None, :]
        value *= tl.load(cos + at, mask=inside, other=0.0).to(tl.float32)
        turned = tl.load(sin + at, mask=inside, other=0.0).to(tl.float32) * other
        value += tl.where(low[None, :], -turned, turned)
    return value


@triton.jit
def _store_part(part, part_lse, entry, d, peak, total, out, real, SIZE: tl.constexpr):
    """Store the attention output of a piece of keys, and the log2 of its softmax sum."""
    safe = tl.where(total > 0, total, 1.0)
    tl.store(part_lse + entry, tl.where(total > 0, peak + tl.log2(safe), -1e30), mask=real)
    tl.store(part + entry[:, None] * SIZE + d[None, :], out / safe[:, None], mask=real[:, None] & (d < SIZE)[None, :])


@triton.jit(do_not_specialize=["layer", "rows"])
def _prompt_kernel(
    qkv,
    cos,
    sin,
    q_weight,
    anchor,
    geometry,
    prompt_at,
    items,
    members,
    lengths,
    part,
    part_lse,
    scale,
    eps,
    offset,
    q_stride,
    layer,
    rows,
    HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
    ROTATE: tl.constexpr,
    NORM: tl.constexpr,
):
    """Attention over one piece of a prompt, for a tile of the queries of the prompt's rows."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    kv_head = tl.program_id(1)
    d = tl.arange(0, D)
    within = d < SIZE
    count = tl.load(geometry + 7).to(tl.int32)
    group_stride = tl.multiple_of(tl.load(geometry + 5), ALIGN)
    head_at = kv_head * tl.multiple_of(tl.load(geometry + 6), ALIGN)
    keys = anchor + tl.multiple_of(tl.load(prompt_at + 2 * layer), ALIGN)
    values = anchor + tl.multiple_of(tl.load(prompt_at + 2 * layer + 1), ALIGN)
    for item in range(program, count, programs):
        entry_at = items + item * 8
        group = tl.load(entry_at).to(tl.int64)
        first_row, width, first_query = tl.load(entry_at + 1), tl.load(entry_at + 2), tl.load(entry_at + 3)
        start, stop, piece = tl.load(entry_at + 4), tl.load(entry_at + 5), tl.load(entry_at + 6)
        query = first_query + tl.arange(0, M)
        slot = query // REPEATS
        head = kv_head * REPEATS + query % REPEATS
        row = tl.load(members + first_row + slot, mask=slot < width, other=0).to(tl.int64)
        real = (slot < width) & (tl.load(lengths + row) > 0)
        stop = tl.where(tl.max(real.to(tl.int32), 0) > 0, stop, start)
        queries = _rotated(qkv, cos, sin, q_weight, row, head, real, d, q_stride, eps, offset, SIZE, ROTATE, NORM).to(
            qkv.dtype.element_ty
        )
        peak = tl.full([M], -1e30, tl.float32)
        total = tl.zeros([M], tl.float32)
        out = tl.zeros([M, D], tl.float32)
        base = group * group_stride + head_at
        for first in range(start, stop, BLOCK):
            column = first + tl.arange(0, BLOCK)
            inside = column < stop
            mask = inside[:, None] & within[None, :]
            at = base + column[:, None] * SIZE + d[None, :]
            k = tl.load(keys + at, mask=mask, other=0.0)
            v = tl.load(values + at, mask=mask, other=0.0)
            peak, total, out = _attend_block(queries, k, v, inside, peak, total, out, scale)
        entry = (piece.to(tl.int64) * rows + row) * HEADS + head
        _store_part(part, part_lse, entry, d, peak, total, out, real, SIZE)


@triton.jit(do_not_specialize=["layer", "rows", "splits"])
def _suffix_kernel(
    qkv,
    cos,
    sin,
    q_weight,
    k_weight,
    anchor,
    geometry,
    lengths,
    starts,
    prompt_parts,
    part,
    part_lse,
    out,
    scale,
    eps,
    offset,
    q_stride,
    layer,
    rows,
    splits,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    M_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    PROMPT_PARTS: tl.constexpr,
    ALIGN: tl.constexpr,
    ROTATE: tl.constexpr,
    NORM: tl.constexpr,
):
    """Attention over one piece of a row's own keys.

    Loads and stores of the cache and of the parts never overlap. The program of the first piece stores the newest key,
    and no program loads this key from the cache. If a row's keys are one piece, its program loads the parts of the
    prompt and merges them. If there are several pieces, each program stores its own part and loads no other.
    """
    row = (tl.program_id(0) // splits).to(tl.int64)
    split = tl.program_id(0) % splits
    kv_head = tl.program_id(1)
    d = tl.arange(0, D)
    within = d < SIZE
    repeat = tl.arange(0, M_ROW)
    real = repeat < REPEATS
    head = kv_head * REPEATS + repeat
    wide = real[:, None] & within[None, :]
    result = out + (row * HEADS + head[:, None]) * SIZE + d[None, :]
    newest = tl.load(lengths + row) - 1
    if newest >= 0:
        begin = tl.load(starts + row)
        span = tl.cdiv(tl.cdiv(newest - begin, splits), BLOCK) * BLOCK
        start = begin + split * span
        stop = tl.minimum(newest, start + span)
        all_rows = row + tl.zeros([M_ROW], tl.int64)
        queries = _rotated(
            qkv, cos, sin, q_weight, all_rows, head, real, d, q_stride, eps, offset, SIZE, ROTATE, NORM
        ).to(qkv.dtype.element_ty)
        kind = tl.multiple_of(tl.load(geometry + 2), ALIGN)
        cache = anchor + tl.multiple_of(tl.load(geometry), ALIGN)
        cache += layer * tl.multiple_of(tl.load(geometry + 1), ALIGN)
        cache += row * tl.multiple_of(tl.load(geometry + 3), ALIGN)
        cache += kv_head * tl.multiple_of(tl.load(geometry + 4), ALIGN)
        stores = tl.full([1], 1, tl.int32) > split
        one = row + tl.zeros([1], tl.int64)
        key_head = HEADS + kv_head + tl.zeros([1], tl.int32)
        key = _rotated(qkv, cos, sin, k_weight, one, key_head, stores, d, q_stride, eps, offset, SIZE, ROTATE, NORM).to(
            qkv.dtype.element_ty
        )
        newest_mask = stores[:, None] & within[None, :]
        source = qkv + row * q_stride + (HEADS + KV_HEADS + kv_head) * SIZE
        value = tl.load(source + d[None, :], mask=newest_mask, other=0.0)
        target = cache + newest.to(tl.int64) * SIZE + d[None, :]
        tl.store(target, key, mask=newest_mask)
        tl.store(target + kind, value, mask=newest_mask)
        score = tl.sum(queries.to(tl.float32) * key.to(tl.float32), 1) * scale
        peak = tl.where(split == 0, score, -1e30)
        total = tl.where(split == 0, tl.full([M_ROW], 1.0, tl.float32), 0.0)
        attended = tl.zeros([M_ROW, D], tl.float32) + value.to(tl.float32)
        for first in range(start, stop, BLOCK):
            column = first + tl.arange(0, BLOCK)
            inside = column < stop
            mask = inside[:, None] & within[None, :]
            at = column[:, None].to(tl.int64) * SIZE + d[None, :]
            k = tl.load(cache + at, mask=mask, other=0.0)
            v = tl.load(cache + kind + at, mask=mask, other=0.0)
            peak, total, attended = _attend_block(queries, k, v, inside, peak, total, attended, scale)
        if splits > 1:
            entry = ((PROMPT_PARTS + split).to(tl.int64) * rows + row) * HEADS + head
            _store_part(part, part_lse, entry, d, peak, total, attended, real, SIZE)
        else:
            for piece in range(tl.load(prompt_parts + row)):
                entry = (piece * rows + row) * HEADS + head
                lse = tl.load(part_lse + entry, mask=real, other=-1e30)
                others = tl.load(part + entry[:, None] * SIZE + d[None, :], mask=wide, other=0.0)
                higher = tl.maximum(peak, lse)
                shrink, share = tl.exp2(peak - higher), tl.exp2(lse - higher)
                total = total * shrink + share
                attended = attended * shrink[:, None] + others * share[:, None]
                peak = higher
            tl.store(result, attended / total[:, None], mask=wide)
    elif splits == 1:
        tl.store(result, tl.zeros([M_ROW, D], tl.float32), mask=wide)


@triton.jit(do_not_specialize=["rows", "splits"])
def _merge_kernel(
    part,
    part_lse,
    prompt_parts,
    lengths,
    out,
    rows,
    splits,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    PROMPT_PARTS: tl.constexpr,
    PARTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    piece = tl.arange(0, PARTS)
    d = tl.arange(0, D)
    computed = tl.load(lengths + row) > 0
    own_pieces = tl.where(computed, splits, 0)
    used = (piece >= PROMPT_PARTS) & (piece < PROMPT_PARTS + own_pieces)
    used = used | (piece < tl.where(computed, tl.load(prompt_parts + row), 0))
    entry = (piece.to(tl.int64) * rows + row) * HEADS + head
    lse = tl.load(part_lse + entry, mask=used, other=-1e30)
    used = lse > -1e29
    weight = tl.where(used, tl.exp2(lse - tl.max(lse, 0)), 0.0)
    mask = used[:, None] & (d < SIZE)[None, :]
    value = tl.load(part + entry[:, None] * SIZE + d[None, :], mask=mask, other=0.0)
    total = tl.sum(weight, 0)
    merged = tl.sum(value * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + (row * HEADS + head) * SIZE + d, merged, mask=d < SIZE)


def attend(
    qkv: Tensor,
    tables: tuple[Tensor, Tensor] | None,
    norms: tuple[Tensor, Tensor, float, float] | None,
    state: DecodeState,
    layer: int,
    scale: float,
    heads: int,
    kv_heads: int,
    tile: int,
) -> Tensor:
    """Attention `[B, H·D]` of each row's newest query over its prompt and its own keys. A group reads its prompt once.

    Queries and keys in `qkv` `[B, (heads + 2 kv_heads)·D]` are normed and rotated. The newest keys and values are
    stored. Prompts are split into pieces for parallel programs. With few rows, the rows' own keys are split too.
    """
    rows, size = len(qkv), qkv.shape[1] // (heads + 2 * kv_heads)
    cos, sin = tables if tables is not None else (qkv, qkv)
    q_weight, k_weight, eps, offset = norms if norms is not None else (qkv, qkv, 0.0, 0.0)
    repeats, d = heads // kv_heads, max(16, triton.next_power_of_2(size))
    splits = 1 if rows * kv_heads >= 256 else min(SUFFIX_PARTS, 512 // (rows * kv_heads))
    part = torch.empty(PROMPT_PARTS + splits, rows, heads, size, dtype=torch.float32, device=qkv.device)
    part_lse = torch.empty(PROMPT_PARTS + splits, rows, heads, dtype=torch.float32, device=qkv.device)
    out = torch.empty(rows, heads * size, dtype=qkv.dtype, device=qkv.device)
    numbers = (scale * 1.4426950408889634, eps, offset, qkv.stride(0), layer, rows)  # softmax in base 2
    shape = {"HEADS": heads, "REPEATS": repeats, "SIZE": size, "D": d, "BLOCK": KEY_BLOCK}
    shape |= {"ALIGN": 8 if size % 8 == 0 else 1, "ROTATE": tables is not None, "NORM": norms is not None}
    # If rows have several pieces, a third kernel merges them, and the first two kernels can run concurrently.
    with beside(qkv.device) if splits > 1 else nullcontext(lambda: None) as joined:
        _prompt_kernel[(max(8, 2 * PROMPT_PROGRAMS // kv_heads), kv_heads)](
            qkv,
            cos,
            sin,
            q_weight,
            state.anchor,
            state.geometry,
            state.prompt_at,
            state.items,
            state.members,
            state.lengths,
            part,
            part_lse,
            *numbers,
            M=tile,
            **shape,
            num_warps=4,
            num_stages=2,
        )
    _suffix_kernel[(rows * splits, kv_heads)](
        qkv,
        cos,
        sin,
        q_weight,
        k_weight,
        state.anchor,
        state.geometry,
        state.lengths,
        state.starts,
        state.prompt_parts,
        part,
        part_lse,
        out,
        *numbers,
        splits,
        KV_HEADS=kv_heads,
        M_ROW=max(16, triton.next_power_of_2(repeats)),
        PROMPT_PARTS=PROMPT_PARTS,
        **shape,
        num_warps=4,
        num_stages=2,
    )
    joined()
    if splits > 1:
        _merge_kernel[(rows, heads)](
            part,
            part_lse,
            state.prompt_parts,
            state.lengths,
            out,
            rows,
            splits,
            HEADS=heads,
            SIZE=size,
            D=d,
            PROMPT_PARTS=PROMPT_PARTS,
            PARTS=PROMPT_PARTS + SUFFIX_PARTS,
            num_warps=2 if d >= 128 else 1,
        )
    return out


@triton.jit
def _mass_kernel(logits, out, factor, vocabulary, blocks, SIZE: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    offset = tl.arange(0, BLOCK)
    token = block[:, None] * SIZE + offset[None, :]
    inside = (offset < SIZE)[None, :] & (token < vocabulary)
    value = tl.load(logits + row * vocabulary + token, mask=inside, other=-float("inf")).to(tl.float32) * factor
    peak = tl.max(value, 1)
    safe = tl.where(peak > -float("inf"), peak, 0.0)
    total = tl.sum(tl.exp(value - safe[:, None]), 1)
    mass = tl.where(total > 0, safe + tl.log(tl.where(total > 0, total, 1.0)), -float("inf"))
    tl.store(out + row * blocks + block, mass, mask=block < blocks)


@triton.jit
def _mix(x):
    """SplitMix64's finaliser, as in `keel.models.splitmix`; shifts are logical."""
    x = (((x >> 30) & 0x3FFFFFFFF) ^ x) * -4658895280553007687
    x = (((x >> 27) & 0x1FFFFFFFFF) ^ x) * -7723592293110705685
    return ((x >> 31) & 0x1FFFFFFFF) ^ x


@triton.jit
def _gumbel(stream, index):
    """Gumbel noise of a stream at these indices, in fp64, equal to that of `sampling.gumbel`."""
    bits = (_mix(stream + index * -7046029254386353131) >> 11) & 0x1FFFFFFFFFFFFF
    uniform = (bits.to(tl.float64) + 0.5) * 1.1102230246251565e-16
    return -tl.log(-tl.log(uniform))


@triton.jit(do_not_specialize=["capacity"])
def _draw_kernel(
    logits,
    mass,
    keys,
    positions,
    left,
    lengths,
    stops,
    tokens,
    numbers,
    factor,
    vocabulary,
    blocks,
    capacity,
    SIZE: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    STOPS: tl.constexpr,
    ENDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    stream = _mix(tl.load(keys + row) + _mix((position + 1) * -7046029254386353131))
    block = tl.arange(0, BLOCKS)
    weight = tl.load(mass + row * blocks + block, mask=block < blocks, other=-float("inf"))
    score = weight.to(tl.float64) + _gumbel(stream, block.to(tl.int64) + 1)
    chosen = tl.argmax(tl.where(block < blocks, score, -float("inf")), 0)
    peak = tl.max(weight, 0)
    normaliser = peak + tl.log(tl.sum(tl.exp(weight - peak), 0))
    offset = tl.arange(0, BLOCK)
    token = chosen * SIZE + offset
    inside = (offset < SIZE) & (token < vocabulary)
    value = tl.load(logits + row * vocabulary + token, mask=inside, other=-float("inf")).to(tl.float32) * factor
    score = value.to(tl.float64) + _gumbel(stream, blocks + 1 + offset.to(tl.int64))
    place = tl.argmax(tl.where(inside, score, -float("inf")), 0)
    logp = tl.sum(tl.where(offset == place, value, 0.0), 0) - normaliser
    drawn = (chosen * SIZE + place).to(tl.int64)
    length, remaining = tl.load(lengths + row), tl.load(left + row)
    stop = tl.load(stops + tl.arange(0, STOPS))
    goes_on = (length >= 0) & (remaining > 1) & (tl.max((stop == drawn).to(tl.int32), 0) == 0)
    tl.debug_barrier()  # every warp must have loaded the row's state before it is replaced
    tl.store(numbers + row, drawn.to(tl.float64))
    tl.store(numbers + capacity + row, logp.to(tl.float64))
    tl.store(numbers + 2 * capacity + row, logp.to(tl.float64))
    tl.store(tokens + row, tl.where(goes_on, drawn, 0))
    tl.store(positions + row, position + 1)
    tl.store(left + row, remaining - 1)
    tl.store(lengths + row, tl.where(goes_on, length + 1, ENDED))


def draw(state: DecodeState, rows: int, temperature: float) -> None:
    """`DecodeState.draw` without filters, as two kernels. The noise is computed in the kernel and never stored."""
    vocabulary = state.logits.shape[1]
    blocks, size = block_shape(vocabulary)
    mass = torch.empty(rows, blocks, dtype=torch.float32, device=state.logits.device)
    width, count = triton.next_power_of_2(size), 8
    _mass_kernel[(rows, triton.cdiv(blocks, count))](
        state.logits, mass, 1 / temperature, vocabulary, blocks, SIZE=size, BLOCK=width, COUNT=count, num_warps=4
    )
    _draw_kernel[(rows,)](
        state.logits,
        mass,
        state.keys,
        state.positions,
        state.left,
        state.lengths,
        state.stops,
        state.tokens,
        state.numbers,
        1 / temperature,
        vocabulary,
        blocks,
        state.rows,
        SIZE=size,
        BLOCKS=triton.next_power_of_2(blocks),
        BLOCK=width,
        STOPS=len(state.stops),
        ENDED=ENDED,
        num_warps=4,
    )
