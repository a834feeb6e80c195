"""Triton kernels for statistics of a chunk of logits and for their gradient, each in one pass. Import on a GPU only.

With z the tempered logits, m their maximum and s = Σ exp(z − m): log p = z − m − log s, and
H = log s − Σ exp(z − m)(z − m)/s. The reference's logits are optional. All sums are in fp32.
"""

# mypy: ignore-errors
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from keel.models.head import Head

_BLOCK = 4096
_FLOOR = tl.constexpr(torch.finfo(torch.float32).min / 4)  # replaces −inf, because 0 · (−inf) is NaN

# These arguments are slices of longer tensors. Do not recompile the kernel for their alignment.
_BY_TOKEN = ["tokens", "log_z", "ref_log_z", "logp", "ref_logp", "entropy", "kl", "ref_policy_kl"]
_BY_TOKEN += ["grad_logp", "grad_entropy", "grad_kl", "grad_ref_policy"]


@triton.jit
def _tempered(logits, at, inside, inverse_temperature):
    z = tl.load(logits + at, mask=inside, other=0.0) * inverse_temperature
    return tl.where(z < _FLOOR, _FLOOR, z)  # NaN stays NaN


@triton.jit(do_not_specialize_on_alignment=_BY_TOKEN)
def _stats_kernel(
    logits,
    ref_logits,
    tokens,
    inverse_temperature,
    log_z,
    logp,
    entropy,
    ref_log_z,
    ref_logp,
    kl,
    ref_policy_kl,
    vocabulary,
    REF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    lanes = tl.arange(0, BLOCK)
    # Each lane keeps its own running maximum; they are reduced once at the end.
    m = tl.full((BLOCK,), _FLOOR, tl.float32)
    s = tl.zeros((BLOCK,), tl.float32)
    t = tl.zeros((BLOCK,), tl.float32)  # Σ exp(z − m)(z − m)
    if REF:
        ref_logits += row * vocabulary
        ref_m = tl.full((BLOCK,), _FLOOR, tl.float32)
        ref_s = tl.zeros((BLOCK,), tl.float32)
        d = tl.zeros((BLOCK,), tl.float32)  # Σ exp(z − m)(z − z_ref)
        ref_d = tl.zeros((BLOCK,), tl.float32)  # Σ exp(z_ref − m_ref)(z_ref − z)
    for start in range(0, vocabulary, BLOCK):
        at = start + lanes
        inside = at < vocabulary
        z = _tempered(logits, at, inside, inverse_temperature)
        larger = tl.where(inside, tl.maximum(m, z), m)
        shrink = tl.exp(m - larger)
        e = tl.where(inside, tl.exp(z - larger), 0.0)
        t = shrink * (t + s * (m - larger)) + e * (z - larger)
        s = shrink * s + e
        m = larger
        if REF:
            ref_z = _tempered(ref_logits, at, inside, inverse_temperature)
            ref_larger = tl.where(inside, tl.maximum(ref_m, ref_z), ref_m)
            ref_shrink = tl.exp(ref_m - ref_larger)
            ref_e = tl.where(inside, tl.exp(ref_z - ref_larger), 0.0)
            d = shrink * d + e * (z - ref_z)
            ref_d = ref_shrink * ref_d + ref_e * (ref_z - z)
            ref_s = ref_shrink * ref_s + ref_e
            ref_m = ref_larger
    top = tl.max(m, 0)
    shrink = tl.exp(m - top)
    total = tl.sum(shrink * s, 0)
    log_total = tl.log(total)
    token = tl.load(tokens + row)
    z_token = _tempered(logits, token, True, inverse_temperature)
    tl.store(log_z + row, top + log_total)
    tl.store(logp + row, z_token - top - log_total)
    tl.store(entropy + row, log_total - tl.sum(shrink * (t + s * (m - top)), 0) / total)
    if REF:
        ref_top = tl.max(ref_m, 0)
        ref_shrink = tl.exp(ref_m - ref_top)
        ref_total = tl.sum(ref_shrink * ref_s, 0)
        ref_log_total = tl.log(ref_total)
        gap = (top - ref_top) + (log_total - ref_log_total)
        ref_z_token = _tempered(ref_logits, token, True, inverse_temperature)
        tl.store(ref_log_z + row, ref_top + ref_log_total)
        tl.store(ref_logp + row, ref_z_token - ref_top - ref_log_total)
        tl.store(kl + row, tl.sum(shrink * d, 0) / total - gap)
        tl.store(ref_policy_kl + row, tl.sum(ref_shrink * ref_d, 0) / ref_total + gap)


@triton.jit(do_not_specialize_on_alignment=_BY_TOKEN)
def _gradient_kernel(
    logits,
    ref_logits,
    tokens,
    inverse_temperature,
    scale,
    entropy,
    kl,
    log_z,
    ref_log_z,
    grad_logp,
    grad_entropy,
    grad_kl,
    grad_ref_policy,
    out,
    vocabulary,
    LOGP: tl.constexpr,
    ENTROPY: tl.constexpr,
    KL: tl.constexpr,
    REF_POLICY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocabulary
    normaliser = tl.load(log_z + row)
    logprob = _tempered(logits + row * vocabulary, at, inside, inverse_temperature) - normaliser
    p = tl.exp(logprob)
    factor = tl.zeros((BLOCK,), tl.float32)
    if KL or REF_POLICY:
        ref_z = _tempered(ref_logits + row * vocabulary, at, inside, inverse_temperature)
        ref_logprob = ref_z - tl.load(ref_log_z + row)
    if KL:
        factor += tl.load(grad_kl + row) * (logprob - ref_logprob - tl.load(kl + row))
    if ENTROPY:
        factor -= tl.load(grad_entropy + row) * (logprob + tl.load(entropy + row))
    if LOGP:
        grad = tl.load(grad_logp + row)
        factor -= grad
    if REF_POLICY:
        ref_grad = tl.load(grad_ref_policy + row)
        factor += ref_grad
    d = tl.where(p == 0, 0.0, p * factor)
    if LOGP:
        d += tl.where(at == tl.load(tokens + row), grad, 0.0)
    if REF_POLICY:
        d -= ref_grad * tl.exp(ref_logprob)
    tl.debug_barrier()  # `out` may be the logits: every warp must have loaded a block before it is overwritten
    tl.store(out + row * vocabulary + at, d * scale, mask=inside)


def stats(
    logits: Tensor, ref_logits: Tensor | None, tokens: Tensor, temperature: float, out: tuple[Tensor, ...]
) -> None:
    """Write the statistics of `logits` `[n, V]` into `out`, each `[n]`.

    They are log Σ exp z, log p(token) and the entropy. With a reference, the reference's log Σ exp z and log p(token),
    KL(p‖ref) and KL(ref‖p) follow.
    """
    rows, vocabulary = logits.shape
    if not rows:
        return
    has_ref = ref_logits is not None
    _stats_kernel[(rows,)](
        logits,
        ref_logits if has_ref else logits,
        tokens,
        1.0 / temperature,
        *out,
        vocabulary,
        REF=has_ref,
        BLOCK=min(_BLOCK // 2 if has_ref else _BLOCK, triton.next_power_of_2(vocabulary)),
        num_warps=8,
    )


def gradient(
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
    """The gradient of a loss with respect to the raw logits, in `dtype`. It overwrites logits of the same dtype.

    `values` are entropy, KL(p‖ref), log Σ exp z and the reference's log Σ exp z. `grads` are the gradients of the loss
    with respect to log p, entropy, KL(p‖ref) and KL(ref‖p), or None. All are `[n]`.
    """
    rows, vocabulary = logits.shape
    out = logits if dtype == logits.dtype else torch.empty_like(logits, dtype=dtype)
    block = min(_BLOCK, triton.next_power_of_2(vocabulary))
    _gradient_kernel[(rows, triton.cdiv(vocabulary, block))](
        logits,
        logits if ref_logits is None else ref_logits,
        tokens,
        1.0 / temperature,
        head.scale / temperature,
        *(logits if x is None else x.contiguous() for x in (*values, *grads)),
        out,
        vocabulary,
        *(x is not None for x in grads),
        BLOCK=block,
        num_warps=8,
    )
    return out
