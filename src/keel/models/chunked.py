"""Log-probability, entropy and exact KL in chunks of tokens, without materialising a batch's logits.

The forward stores one number per token. The backward recomputes each chunk's logits, which costs one more matmul with
the head. Logits of the policy, and of the reference for the exact KL, exist for one chunk at a time. On a GPU one
Triton kernel computes a chunk's statistics and another one its gradient; on other devices plain torch computes both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from keel.base.errors import KeelError
from keel.models.flash_prefix import has_triton
from keel.models.head import Head, JoinedHeads, LogitsOf, at_least_fp32, shape_logits

# (policy log-probabilities [n, V], reference log-probabilities [n, V], tokens [n]) -> [n]
Divergence = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class StatsOptions:
    """The statistics to compute in addition to the log-probability.

    KL(ref‖policy) is differentiable only with `ref_policy_grad`. `divergence` is another function of both
    distributions; it is differentiable. The matmuls with the heads run in `dtype` (None: the dtype of the weights).
    Sums are always in fp32.
    """

    temperature: float = 1.0
    entropy: bool = False
    ref_policy: bool = False
    ref_head: LogitsOf | JoinedHeads | None = None
    chunk_tokens: int = 256
    ref_policy_grad: bool = False
    dtype: torch.dtype | None = None
    divergence: Divergence | None = None


@dataclass(frozen=True)
class TokenStats:
    """One value per token `[N]`, fp32. `kl` is KL(policy‖ref), `ref_policy_kl` KL(ref‖policy)."""

    logp: Tensor
    entropy: Tensor | None = None
    kl: Tensor | None = None
    ref_logp: Tensor | None = None
    ref_policy_kl: Tensor | None = None
    divergence: Tensor | None = None


LOGIT_BYTES = 6 * 4  # per logit of a chunk: logits, log-probabilities and probabilities of policy and reference, fp32


def default_chunk(vocabulary: int, device: torch.device, memory: int | None = None) -> int:
    """Tokens per chunk for 2²³ logits (32 MB in fp32) on a CPU, up to 2²⁷ (512 MB) on an accelerator.

    On an accelerator a chunk's tensors take at most a twentieth of `memory` (default: the device's).
    """
    if device.type == "cpu":
        return max(16, 2**23 // vocabulary)
    if memory is None:
        memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 2**37
    return max(16, min(2**27, memory // (20 * LOGIT_BYTES)) // vocabulary)


def fused_stats_unsupported_reason(hidden: Tensor, head: Head, *, planned: bool = False) -> str | None:
    """Why the Triton kernels cannot compute a chunk's statistics; None if they can.

    `planned` assumes a GPU.
    """
    if not hidden.is_cuda and not planned:
        return "there is no CUDA device"
    if not planned and not has_triton():
        return "Triton is not installed"
    if hidden.dtype == torch.float64:
        return "it computes in float64"
    if head.linear() is None:
        return "its head is not a plain linear layer"
    return None if head.softcap is None else "its logits have a soft cap"


def token_stats(
    hidden: Tensor, head: Head, tokens: Tensor, options: StatsOptions, ref_hidden: Tensor | None = None
) -> TokenStats:
    """log softmax(logits / temperature) at `tokens` `[N]` and the statistics in `options`, from states `[N, H]`."""
    linear, device = head.linear(), hidden.device.type
    if linear is not None and device == "cuda" and torch.is_autocast_enabled(device):
        # An fp32 matmul with the head would take as long as the rest of a half-precision pass.
        half = torch.get_autocast_dtype(device)
        linear = (linear[0].to(half), None if linear[1] is None else linear[1].to(half))
        options = replace(options, dtype=half)
    with torch.autocast(device_type=device, enabled=False):
        if linear is None:
            return _checkpointed(hidden, head, tokens, options, ref_hidden)
        weight, bias = linear
        return TokenStats(*_Chunked.apply(hidden.to(weight.dtype), weight, bias, tokens, ref_hidden, head, options))


def _logprobs(logits: Tensor, temperature: float) -> Tensor:
    """Tempered log-softmax; −inf becomes a finite floor, because 0 · (−inf) in a sum over the vocabulary is NaN."""
    tempered = logits if temperature == 1.0 else logits / temperature
    logprobs, floor = torch.log_softmax(tempered, dim=-1), torch.finfo(logits.dtype).min / 4
    return logprobs.clamp_min(floor) if torch.is_grad_enabled() else logprobs.clamp_min_(floor)


def _ref_logprobs(ref_hidden: Tensor, options: StatsOptions, vocabulary: int) -> Tensor:
    with torch.no_grad():
        return _logprobs(_ref_logits(ref_hidden, options, vocabulary), options.temperature)


@torch.no_grad()
def _ref_logits(ref_hidden: Tensor, options: StatsOptions, vocabulary: int) -> Tensor:
    assert options.ref_head is not None
    logits = _logits_of(options.ref_head, ref_hidden, options.dtype)
    if logits.shape[-1] != vocabulary:
        raise KeelError(
            f"exact KL needs one vocabulary: the policy has {vocabulary} tokens, the reference {logits.shape[-1]}"
        )
    return logits


def _logits_of(head: LogitsOf | JoinedHeads, hidden: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The logits of a reference, by the same matmuls as the policy's, so that equal models have a KL of exactly 0."""
    if isinstance(head, JoinedHeads):
        rows = [(hidden[:, -1] == number).nonzero().squeeze(-1) for number in range(len(head.heads))]
        whose = zip(head.heads, rows, strict=True)
        parts = torch.cat([_logits_of(own, hidden[mine, :width], dtype) for (own, width), mine in whose])
        return torch.empty_like(parts).index_copy_(0, torch.cat(rows), parts)
    linear = head.linear() if isinstance(head, Head) else None
    if linear is None or not isinstance(head, Head):
        return at_least_fp32(head(hidden))
    weight, bias = linear
    if dtype is not None:
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    return _logits(hidden.to(weight.dtype), weight, bias, head)


def _gather(logprobs: Tensor, tokens: Tensor) -> Tensor:
    return logprobs.gather(-1, tokens[:, None]).squeeze(-1)


def _chunk_stats(
    logits: Tensor, tokens: Tensor, options: StatsOptions, ref_hidden: Tensor | None
) -> tuple[Tensor | None, ...]:
    """One chunk's statistics in plain torch, in the order of TokenStats; differentiable."""
    logprobs = _logprobs(logits, options.temperature)
    del logits  # a chunk of logits is the largest tensor here: free it early
    logp, entropy, kl, ref_logp, ref_policy, divergence = _gather(logprobs, tokens), *(None,) * 5
    probs = logprobs.exp() if options.entropy or ref_hidden is not None else None
    if options.entropy:
        assert probs is not None
        entropy = -(probs * logprobs).sum(dim=-1)
    if ref_hidden is not None:
        assert probs is not None
        ref = _ref_logprobs(ref_hidden, options, logprobs.shape[-1])
        kl = (probs * (logprobs - ref)).sum(dim=-1)
        ref_logp = _gather(ref, tokens)
        if options.ref_policy:
            ref_policy = (ref.exp() * (ref - (logprobs if options.ref_policy_grad else logprobs.detach()))).sum(dim=-1)
        if options.divergence is not None:
            divergence = options.divergence(logprobs, ref, tokens)
    return logp, entropy, kl, ref_logp, ref_policy, divergence


_simulated: list[Any] = []


@contextmanager
def simulate_kernels(kernels: Any) -> Iterator[None]:
    """Within this context, `kernels` replace the Triton kernels on any device, to plan memory."""
    _simulated.append(kernels)
    try:
        yield
    finally:
        _simulated.pop()


def _kernels() -> Any:
    if _simulated:
        return _simulated[-1]
    from keel.models import vocab_kernels  # needs Triton

    return vocab_kernels


def _stats_by_kernel(
    logits: Tensor, tokens: Tensor, options: StatsOptions, ref_hidden: Tensor | None
) -> tuple[Tensor | None, ...]:
    """One chunk's statistics by a Triton kernel. The last two are log Σ exp of both logits, for the backward."""
    ref = None if ref_hidden is None else _ref_logits(ref_hidden, options, logits.shape[-1])
    log_z, logp, entropy, ref_log_z, ref_logp, kl, ref_policy = out = logits.new_empty(7, len(logits)).unbind()
    _kernels().stats(logits, ref, tokens, options.temperature, out)
    by_ref = (None,) * 4 if ref is None else (kl, ref_logp, ref_policy if options.ref_policy else None, ref_log_z)
    return logp, entropy if options.entropy else None, *by_ref[:3], None, log_z, by_ref[3]


def _chunks(count: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _join(parts: list[tuple[Tensor | None, ...]]) -> list[Tensor | None]:
    columns = zip(*parts, strict=True)
    return [torch.cat([x for x in column if x is not None]) if column[0] is not None else None for column in columns]


def _checkpointed(
    hidden: Tensor, head: Head, tokens: Tensor, options: StatsOptions, ref_hidden: Tensor | None
) -> TokenStats:
    """Statistics for any head module (LoRA, quantised), by checkpointed autograd through each chunk."""

    def stats(hidden: Tensor, tokens: Tensor, ref_hidden: Tensor | None) -> tuple[Tensor | None, ...]:
        return _chunk_stats(head(hidden), tokens, options, ref_hidden)

    parts = []
    for chunk in _chunks(max(len(tokens), 1), options.chunk_tokens):
        ref_chunk = None if ref_hidden is None else ref_hidden[chunk]
        parts.append(checkpoint(stats, hidden[chunk], tokens[chunk], ref_chunk, use_reentrant=False))
    return TokenStats(*_join(parts))  # type: ignore[arg-type]


class _Chunked(torch.autograd.Function):
    """Statistics for a plain linear head, with an analytic gradient.

    With z the tempered logits, p = softmax(z), H the entropy and q the reference:
    ∂logp(y)/∂z = 1[y] − p,  ∂H/∂z = −p (log p + H),  ∂KL(p‖q)/∂z = p (log p − log q − KL),  ∂KL(q‖p)/∂z = p − q.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        ref_hidden: Tensor | None,
        head: Head,
        options: StatsOptions,
    ) -> tuple[Tensor | None, ...]:
        parts = []
        reason = fused_stats_unsupported_reason(hidden, head, planned=bool(_simulated))
        by_kernel = reason is None and options.divergence is None
        chunk_stats = _stats_by_kernel if by_kernel else _chunk_stats
        for chunk in _chunks(max(len(tokens), 1), options.chunk_tokens):
            ref_chunk = None if ref_hidden is None else ref_hidden[chunk]
            parts.append(chunk_stats(_logits(hidden[chunk], weight, bias, head), tokens[chunk], options, ref_chunk))
        logp, entropy, kl, ref_logp, ref_policy, divergence, *normalisers = _join(parts)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, tokens, ref_hidden, entropy, kl, *normalisers)
        ctx.head, ctx.options, ctx.by_kernel = head, options, by_kernel
        constant = (ref_logp, None if options.ref_policy_grad else ref_policy)
        ctx.mark_non_differentiable(*(x for x in constant if x is not None))
        return logp, entropy, kl, ref_logp, ref_policy, divergence

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, tokens, ref_hidden, entropy, kl, *normalisers = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_logp, grad_entropy, grad_kl, _, grad_ref_policy, grad_divergence = grads
        upstream = (grad_logp, grad_entropy, grad_kl, grad_ref_policy)
        if all(grad is None for grad in (*upstream, grad_divergence)):
            return (None,) * 7
        needs_ref = any(grad is not None for grad in (grad_kl, grad_ref_policy, grad_divergence))
        accumulate_dtype = torch.promote_types(weight.dtype, torch.float32)
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        # Half-precision sums over many chunks lose small terms: accumulate in fp32, round once.
        d_weight = torch.zeros_like(weight, dtype=accumulate_dtype) if needs_weight else None
        d_bias = torch.zeros_like(bias, dtype=accumulate_dtype) if needs_bias else None
        logits_gradient = _kernels().gradient if ctx.by_kernel else _raw_logits_gradient
        for chunk in _chunks(len(tokens), ctx.options.chunk_tokens):

            def cut(x: Tensor | None, chunk: slice = chunk) -> Tensor | None:
                return None if x is None else x[chunk]

            logits = _logits(hidden[chunk], weight, bias, ctx.head)
            ref_logits = _ref_logits(ref_hidden[chunk], ctx.options, len(weight)) if needs_ref else None
            dtype, parts = weight.dtype if d_bias is None else accumulate_dtype, []
            if grad_divergence is not None:  # before the kernel below overwrites the logits
                assert ref_logits is not None
                grad = grad_divergence[chunk]
                parts.append(_divergence_gradient(logits, ref_logits, tokens[chunk], ctx.head, ctx.options, grad))
            if any(grad is not None for grad in upstream):
                parts.append(
                    logits_gradient(
                        logits,
                        ref_logits,
                        tokens[chunk],
                        ctx.head,
                        ctx.options.temperature,
                        values=tuple(map(cut, (entropy, kl, *normalisers))),
                        grads=tuple(map(cut, upstream)),
                        dtype=dtype,
                    )
                )
            d_raw = parts[0] if len(parts) == 1 else parts[0] + parts[1]
            if d_bias is not None:
                d_bias += d_raw.sum(dim=0)
            d_raw = d_raw.to(weight.dtype)
            if d_hidden is not None:
                torch.mm(d_raw, weight, out=d_hidden[chunk])
            if d_weight is not None and accumulate_dtype == weight.dtype:
                d_weight.addmm_(d_raw.T, hidden[chunk])
            elif d_weight is not None:
                _add_product(d_weight, d_raw.T, hidden[chunk])
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            *(None,) * 4,
        )


@torch.enable_grad()
def _divergence_gradient(
    logits: Tensor, ref_logits: Tensor, tokens: Tensor, head: Head, options: StatsOptions, grad: Tensor
) -> Tensor:
    """The gradient of Σ grad · divergence with respect to one chunk's raw logits, by autograd."""
    assert options.divergence is not None
    leaf = logits.detach().requires_grad_()
    ref = _logprobs(ref_logits.detach(), options.temperature)
    values = options.divergence(_logprobs(leaf, options.temperature), ref, tokens)
    (d_logits,) = torch.autograd.grad((values * grad).sum(), leaf)
    slope = 1.0 if head.softcap is None else 1 - (logits / head.softcap).square()
    return d_logits * slope * head.scale


def _raw_logits_gradient(
    logits: Tensor,
    ref_logits: Tensor | None,
    tokens: Tensor,
    head: Head,
    temperature: float,
    *,
    values: tuple[Tensor | None, ...],
    grads: tuple[Tensor | None, ...],
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of the loss with respect to one chunk's raw logits W h, through temperature, soft cap and scale.

    `values` are entropy and KL. `grads` are the gradients of the loss with respect to log-probability, entropy, KL and
    reverse KL. All are `[n]`.
    """
    entropy, kl = (None if x is None else x[:, None] for x in values)
    grad_logp, grad_entropy, grad_kl, grad_ref_policy = (None if x is None else x[:, None] for x in grads)
    ref = None if ref_logits is None else _logprobs(ref_logits, temperature)
    del ref_logits
    scale = head.scale / temperature
    tanh_slope = None if head.softcap is None else 1 - (logits / head.softcap).square()
    logprobs = _logprobs(logits, temperature)
    del logits
    factor: Tensor | None = None
    if grad_kl is not None:
        assert ref is not None
        assert kl is not None
        factor = (logprobs - ref).sub_(kl).mul_(grad_kl)
    if grad_entropy is not None:
        assert entropy is not None
        term = (logprobs + entropy).mul_(-grad_entropy)
        factor = term if factor is None else factor.add_(term)
    if grad_logp is not None:
        factor = -grad_logp if factor is None else factor.sub_(grad_logp)
    if grad_ref_policy is not None:
        factor = grad_ref_policy if factor is None else factor + grad_ref_policy
    d_raw = logprobs.exp_()
    if factor is not None:
        d_raw.mul_(factor)
    if grad_logp is not None:
        d_raw.scatter_add_(-1, tokens[:, None], grad_logp)
    if grad_ref_policy is not None:
        assert ref is not None
        d_raw.sub_(ref.exp().mul_(grad_ref_policy))
    if tanh_slope is not None:
        d_raw.mul_(tanh_slope)
    return d_raw if scale == 1.0 else d_raw.mul_(scale)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, in the total's precision on a GPU."""
    if total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head) -> Tensor:
    if hidden.is_cuda and hidden.dtype in (torch.float16, torch.bfloat16):
        raw = torch.mm(hidden, weight.t(), out_dtype=torch.float32)  # no rounding to half precision
        raw = raw if bias is None else raw.add_(bias)
    else:
        raw = torch.nn.functional.linear(hidden, weight, bias)
    return shape_logits(at_least_fp32(raw), head.scale, head.softcap)
