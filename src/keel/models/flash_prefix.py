"""Shared-prefix attention with flash kernels: two varlen calls per layer.

In the first call every prompt and every completion attends to itself. In the second call a group's completions attend
to its prompt. The log-sum-exp of both calls merges them into one softmax. In the backward, flash attention recomputes
the probabilities from a log-sum-exp. Given the merged one, each call returns its part of the gradient, and the
gradient is the sum of both. Rotation and merging use Triton kernels if Triton is installed, otherwise plain torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from keel.models.head import at_least_fp32
from keel.models.pack import Segments

Rotation = tuple[Tensor, Tensor]  # cosines and sines [N, D] of the tokens' positions


class Kernels(NamedTuple):
    """Varlen attention: a forward that returns `(out [N, H, D], log-sum-exp [H, N])`, and the gradients of q, k, v."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


class VarlenArguments(NamedTuple):
    """Arguments of one varlen call, in which the queries of segment i attend to the keys of segment i."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, runs: VarlenArguments, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *runs[:4], 0.0, runs.causal, False, scale=scale)
    return out, lse


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, runs: VarlenArguments, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    no_dropout = _no_dropout(q.device)
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse, *runs[:4], 0.0, runs.causal, no_dropout, no_dropout, scale=scale
    )
    return gradients


@lru_cache
def _no_dropout(device: torch.device) -> Tensor:
    return torch.zeros(2, dtype=torch.uint64, device=device)


FLASH = Kernels(_flash_forward, _flash_backward)
LARGEST_HEAD = 256


_capability = lru_cache(torch.cuda.get_device_capability)  # called in every layer


@lru_cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def flash_dtype(query: Tensor) -> torch.dtype:
    """The dtype of attention: autocast's if autocast is enabled, otherwise the query's."""
    device = query.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype


def flash_unsupported_reason(
    like: Tensor, head_size: int | None = None, dropout: float = 0.0, *, planned: bool = False
) -> str | None:
    """Why the flash kernels do not support `like`'s device and dtype or this head size; None if they do.

    `planned` assumes a recent GPU.
    """
    dtype = flash_dtype(like)
    if not like.is_cuda and not planned:
        return "there is no CUDA device"
    if not planned and _capability(like.device) < (8, 0):
        return "the GPU is older than Ampere"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in {str(dtype).removeprefix('torch.')}"
    if head_size is not None and (head_size % 8 or head_size > LARGEST_HEAD):
        return f"its heads have size {head_size}"
    return "its attention has dropout" if dropout else None


def flash_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    scale: float,
    rotation: Rotation | None = None,
    kernels: Kernels = FLASH,
) -> Tensor:
    """Attention of queries `[N, H, D]` over keys `[N, K, D]`, both rotated first; differentiable."""
    dtype = flash_dtype(q)
    cos, sin = rotation if rotation is not None else (None, None)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    if not torch.is_grad_enabled():
        return _attend(q, k, v, cos, sin, segments, scale, kernels)[3]
    out: Tensor = _FlashPrefix.apply(q, k, v, cos, sin, segments, scale, kernels)
    return out


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    segments: Segments,
    scale: float,
    kernels: Kernels,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return rotated q, rotated k, v, and the output and log-sum-exp of attention."""
    own, to_prompt = _varlen_arguments(segments)
    around = _rotate_and_join(q)
    q, k, v = (x.contiguous() for x in (q, k, v)) if cos is None else around.rotate(q, k, v, cos, sin)
    out, lse = kernels.forward(q, k, v, own, scale)
    if segments.has_completions:
        out, lse = around.join(out, lse, *kernels.forward(q, k, v, to_prompt, scale), segments.in_completion)
    return q, k, v, out, lse


class _FlashPrefix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        _, _, _, cos, sin, ctx.segments, ctx.scale, ctx.kernels = inputs
        saved = _attend(*inputs)
        ctx.save_for_backward(*saved, cos, sin)
        return saved[3]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse, cos, sin = ctx.saved_tensors
        own, to_prompt = _varlen_arguments(ctx.segments)
        inputs = (grad.contiguous(), q, k, v, out, lse)
        parts = ctx.kernels.backward(*inputs, own, ctx.scale)
        more = ctx.kernels.backward(*inputs, to_prompt, ctx.scale) if ctx.segments.has_completions else None
        return (*_rotate_and_join(q).add_gradients(parts, more, cos, sin), *(None,) * 5)


def _varlen_arguments(s: Segments) -> tuple[VarlenArguments, VarlenArguments]:
    """Arguments of the call within prompts and completions, and of the call from completions to prompts."""
    own = VarlenArguments(s.cu_seqlens, s.cu_seqlens, s.max_seqlen, s.max_seqlen, causal=True)
    return own, VarlenArguments(s.cu_seqlens_q, s.cu_seqlens_k, s.max_seqlen_q, s.max_seqlen_k, causal=False)


class TorchKernels:
    """Rotation and merging in plain torch."""

    @staticmethod
    def rotate(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotate q and k: x cos + (−x₂, x₁) sin, where x₁ and x₂ are the halves of a head.

        The rotation is computed in fp32 and rounded once. The results are contiguous. The inputs may be views of one
        tensor.
        """

        def rotated(x: Tensor) -> Tensor:
            first, second = at_least_fp32(x).chunk(2, dim=-1)
            return (x * cos[:, None].float() + torch.cat((-second, first), dim=-1) * sin[:, None].float()).to(x.dtype)

        return rotated(q), rotated(k), v.contiguous()

    @staticmethod
    def join(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor, in_completion: Tensor) -> tuple[Tensor, Tensor]:
        """Merge two parts of a softmax at completion tokens. Other tokens have only the first part."""
        joined = torch.where(in_completion, torch.logaddexp(lse, more_lse), lse)
        share, more_share = ((part - joined).exp().t().unsqueeze(-1) for part in (lse, more_lse))
        return torch.where(in_completion[:, None, None], (out * share + more * more_share).to(out.dtype), out), joined

    @staticmethod
    def add_gradients(
        parts: tuple[Tensor, ...], more: tuple[Tensor, ...] | None, cos: Tensor | None, sin: Tensor | None
    ) -> tuple[Tensor, ...]:
        """The gradients of q, k and v before the rotation, summed over both calls."""
        if more is not None:
            parts = tuple(part + other for part, other in zip(parts, more, strict=True))
        if cos is None or sin is None:
            return parts
        swapped = torch.cat(tuple(reversed(sin.chunk(2, dim=-1))), dim=-1)
        d_q, d_k, d_v = parts
        return TorchKernels.rotate(d_q, d_k, d_v, cos, -swapped)


def _rotate_and_join(like: Tensor) -> Any:
    if not like.is_cuda or not has_triton():
        return TorchKernels
    from keel.models import layer_kernels

    return layer_kernels
