"""Two flash calls joined by their log-sum-exp equal attention by the mask of the row, values and gradients.

Without a GPU the kernels are stand-ins with the same signatures: plain formulas in float64.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from keel.base.types import Completion, Group, Problem
from keel.models.flash_prefix import Kernels, VarlenArguments, flash_attend, flash_unsupported_reason
from keel.models.pack import PackedBatch, pack


def by_run(runs: VarlenArguments) -> list[tuple[slice, slice]]:
    queries, keys = (list(pairwise(bounds.tolist())) for bounds in (runs.cu_seqlens_q, runs.cu_seqlens_k))
    assert max(b - a for a, b in queries) == runs.max_seqlen_q
    assert max(b - a for a, b in keys) == runs.max_seqlen_k
    return [(slice(*q), slice(*k)) for q, k in zip(queries, keys, strict=True)]


def scores_of(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    """`[H, Q, K]`, with heads repeated; hidden pairs are −inf."""
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)) * scale
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1) & causal
    return scores.masked_fill(hidden, -torch.inf)


def forward(q: Tensor, k: Tensor, v: Tensor, runs: VarlenArguments, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = torch.full_like(q, torch.nan), q.new_full((q.shape[1], len(q)), torch.nan)
    for at, keys in by_run(runs):
        scores = scores_of(q[at], k[keys], runs.causal, scale)
        values = v[keys].repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        out[at], lse[:, at] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values), scores.logsumexp(-1)
    return out, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, runs: VarlenArguments, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As a flash kernel does it: probabilities by the log-sum-exp that is given, whatever softmax it is of."""
    repeats = q.shape[1] // k.shape[1]
    d_q, d_k, d_v = (torch.full_like(x, torch.nan) for x in (q, k, v))
    for at, keys in by_run(runs):
        probs = (scores_of(q[at], k[keys], runs.causal, scale) - lse[:, at, None]).exp()
        values, wide_keys = (x[keys].repeat_interleave(repeats, dim=1) for x in (v, k))
        d_scores = probs * (torch.einsum("qhd,khd->hqk", grad[at], values) - (grad * out)[at].sum(-1).t()[..., None])
        d_q[at] = torch.einsum("hqk,khd->qhd", d_scores, wide_keys) * scale
        wide_d_k = torch.einsum("hqk,qhd->khd", d_scores, q[at]) * scale
        wide_d_v = torch.einsum("hqk,qhd->khd", probs, grad[at])
        d_k[keys], d_v[keys] = (x.unflatten(1, (-1, repeats)).sum(2) for x in (wide_d_k, wide_d_v))
    return d_q, d_k, d_v


def batch(shapes: list[tuple[int, tuple[int, ...]]], max_row_tokens: int | None) -> PackedBatch:
    def completion(count: int) -> Completion:
        zeros = (0.0,) * count
        return Completion((1,) * count, (True,) * count, zeros, zeros, "", "length")

    groups = [Group(Problem(str(p), ""), (1,) * p, tuple(completion(n) for n in ns)) for p, ns in shapes]
    return pack(groups, 0, max_row_tokens=max_row_tokens)


SHAPES = {
    "ragged": [(12, (5, 9, 1)), (3, (7, 7)), (6, (1, 0, 4))],
    "one group": [(4, (3, 8))],
    "no completion has an input token": [(5, (1, 0)), (2, (1,))],
    "some groups have none": [(5, (1, 0)), (2, (6,)), (3, (0, 1)), (1, (2, 2))],
}


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("max_row_tokens", [None, 30, 200])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_mask(shape: str, max_row_tokens: int | None, kv_heads: int) -> None:
    packed = batch(SHAPES[shape], max_row_tokens)
    rows, length = packed.input_ids.shape
    generator = torch.Generator().manual_seed(3)

    def random(heads: int) -> Tensor:
        return torch.randn(rows, heads, length, 8, generator=generator, dtype=torch.float64, requires_grad=True)

    inputs = [random(4), random(kv_heads), random(kv_heads)]
    real = (packed.prefix >= 0)[:, :, None, None]
    weight = torch.randn(rows, length, 4, 8, generator=generator, dtype=torch.float64) * real
    wide = [x.repeat_interleave(4 // x.shape[1], dim=1) for x in inputs]
    expected = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=packed.mask_4d(), scale=0.3)
    expected = expected.transpose(1, 2)
    gradients = torch.autograd.grad((expected * weight).sum(), inputs)
    tokens = (x.transpose(1, 2).flatten(0, 1) for x in inputs)
    out = flash_attend(*tokens, packed.segments, 0.3, kernels=Kernels(forward, backward)).view_as(expected)
    torch.testing.assert_close(out * real, expected * real, atol=1e-12, rtol=1e-10)
    for mine, theirs in zip(torch.autograd.grad((out * weight).sum(), inputs), gradients, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize(
    ("like", "options", "reason"),
    [
        (torch.float32, {}, "it computes in float32"),
        (torch.bfloat16, {"head_size": 20}, "its heads have size 20"),
        (torch.bfloat16, {"head_size": 512}, "its heads have size 512"),
        (torch.float16, {"dropout": 0.1}, "its attention has dropout"),
        (torch.bfloat16, {"head_size": 64}, None),
    ],
)
def test_what_the_kernels_cannot_take_is_named(like: torch.dtype, options: dict[str, Any], reason: str | None) -> None:
    assert flash_unsupported_reason(torch.zeros(1, dtype=like), planned=True, **options) == reason
    assert flash_unsupported_reason(torch.zeros(1, dtype=like), **options) == "there is no CUDA device"


def test_autocast_decides_the_dtype() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert flash_unsupported_reason(torch.zeros(1), planned=True) is None
