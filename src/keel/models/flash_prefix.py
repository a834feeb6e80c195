"""Shared-prefix attention by flash kernels: two calls a layer, whatever the lengths.

The first call lets every prompt and every completion attend to itself, the second lets the completions of a group
attend to its prompt. Both are parts of one softmax, joined by their log-sum-exp. Backward, flash attention takes the
probabilities from the log-sum-exp it is given and the rest from the output: given those of the joined softmax, each
call returns its own part of the gradient, and the parts add up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from keel.models.segments import Segments


class Kernels(NamedTuple):
    """Attention `(out [N, H, D], log-sum-exp [H, N])` over runs of tokens, and its gradients by q, k and v."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


class Runs(NamedTuple):
    """The runs of one call: queries of a run attend to the keys of the run with the same number."""

    query_bounds: Tensor
    key_bounds: Tensor
    longest_query: int
    longest_key: int
    causal: bool


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, runs: Runs, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *runs[:4], 0.0, runs.causal, False, scale=scale)
    return out, lse


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, runs: Runs, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, *runs[:4], 0.0, runs.causal, no_dropout, no_dropout, scale=scale
    )
    return gradients


FLASH = Kernels(_flash_forward, _flash_backward)
LARGEST_HEAD = 256


def flash_dtype(query: Tensor) -> torch.dtype:
    """The dtype in which attention computes: autocast's where that is on."""
    device = query.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype


def why_not_flash(
    like: Tensor, head_size: int | None = None, dropout: float = 0.0, *, planned: bool = False
) -> str | None:
    """Why the flash kernels cannot compute where and as `like` does, with heads of this size; None where they can.

    `planned`: it will be on a GPU, which is taken for a new one.
    """
    dtype = flash_dtype(like)
    if not like.is_cuda and not planned:
        return "there is no CUDA device"
    if not planned and torch.cuda.get_device_capability(like.device) < (8, 0):
        return "the GPU is older than Ampere"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in {str(dtype).removeprefix('torch.')}"
    if head_size is not None and (head_size % 8 or head_size > LARGEST_HEAD):
        return f"its heads have size {head_size}"
    return "its attention has dropout" if dropout else None


def flash_attend(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float, kernels: Kernels = FLASH
) -> Tensor:
    """Attention of rows `[R, H, L, D]` over `[R, K, L, D]`, as `[R, L, H, D]`; differentiable."""
    rows, _, length, _ = query.shape
    dtype = flash_dtype(query)
    q, k, v = (x.transpose(1, 2).flatten(0, 1).to(dtype) for x in (query, key, value))
    out: Tensor = _FlashPrefix.apply(q, k, v, segments, scale, kernels)
    return out.view(rows, length, *out.shape[1:])


class _FlashPrefix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, kernels: Kernels
    ) -> Tensor:
        own, to_prompt = _both_runs(segments)
        out, lse = kernels.forward(q, k, v, own, scale)
        at = segments.completions
        if len(at):
            keys, values = (x.index_select(0, segments.prompts) for x in (k, v))
            more, more_lse = kernels.forward(q.index_select(0, at), keys, values, to_prompt, scale)
            own_lse = lse.index_select(1, at)
            joined = torch.logaddexp(own_lse, more_lse)
            shares = ((part - joined).exp().t().unsqueeze(-1) for part in (own_lse, more_lse))
            parts = (out.index_select(0, at), more)
            out.index_copy_(0, at, sum(x * share for x, share in zip(parts, shares, strict=True)).to(out.dtype))  # type: ignore[union-attr]
            lse.index_copy_(1, at, joined)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.segments, ctx.scale, ctx.kernels = segments, scale, kernels
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        segments: Segments = ctx.segments
        own, to_prompt = _both_runs(segments)
        grad = grad.contiguous()
        d_q, d_k, d_v = ctx.kernels.backward(grad, q, k, v, out, lse, own, ctx.scale)
        at, prompts = segments.completions, segments.prompts
        if len(at):
            keys, values = (x.index_select(0, prompts) for x in (k, v))
            queries, part, part_grad = (x.index_select(0, at) for x in (q, out, grad))
            part_lse = lse.index_select(1, at)
            more = ctx.kernels.backward(part_grad, queries, keys, values, part, part_lse, to_prompt, ctx.scale)
            d_q.index_add_(0, at, more[0])
            d_k.index_add_(0, prompts, more[1])
            d_v.index_add_(0, prompts, more[2])
        return d_q, d_k, d_v, None, None, None


def _both_runs(s: Segments) -> tuple[Runs, Runs]:
    """Of the call within prompts and completions, and of that from completions to prompts."""
    own = Runs(s.bounds, s.bounds, s.longest, s.longest, causal=True)
    return own, Runs(s.completion_bounds, s.prompt_bounds, s.longest_completions, s.longest_prompt, causal=False)
