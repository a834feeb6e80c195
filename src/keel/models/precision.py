"""Dtypes and rounding: names, device support, and comparison of fast paths with fp32.

A fast path is accepted by its error against fp32, compared with the error of the plain path that it replaces. In half
precision two correct computations differ, and more so in wider and deeper models. A fixed tolerance would refuse large
models or accept bugs in small ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from keel.base.errors import KeelError
from keel.models.head import config_numbers, module_dtype, transformer_blocks

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


def has_bfloat16(device: torch.device) -> bool:
    """Whether a device supports bfloat16 natively; GPUs before Ampere do not."""
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def check_bfloat16(option: str, dtype: torch.dtype | None, device: torch.device, instead: str) -> None:
    """Refuse bfloat16 if the GPU only emulates it."""
    if dtype == torch.bfloat16 and not has_bfloat16(device):
        raise KeelError(f"{option}=bfloat16: this GPU has no bfloat16 (it needs Ampere or later); use {instead}")


def matmul_eps(model: nn.Module) -> float:
    """The relative rounding of the model's matrix products; TF32 has ten mantissa bits."""
    dtype = module_dtype(model)
    if dtype == torch.float32 and next(model.parameters()).is_cuda and _tf32():
        return 2.0**-10
    return torch.finfo(dtype).eps


def _tf32() -> bool:
    """Whether fp32 products are rounded to TF32. torch raises for the old flag if the new one has been set."""
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", "none")
    return precision == "tf32" if precision != "none" else torch.backends.cuda.matmul.allow_tf32


@contextmanager
def ieee_matmuls() -> Iterator[None]:
    """Within this context, fp32 products on a GPU are not rounded to TF32."""
    matmul = torch.backends.cuda.matmul
    older = getattr(matmul, "fp32_precision", "none") == "none"
    flag, ieee = ("allow_tf32", False) if older else ("fp32_precision", "ieee")
    before = getattr(matmul, flag)
    setattr(matmul, flag, ieee)
    try:
        yield
    finally:
        setattr(matmul, flag, before)


MOST_ERROR = 1.5  # limit of the RMS error over all positions, in multiples of the plain path's
MOST_AT_A_POSITION = 3.0  # limit of the error at one position, in multiples of the plain path's
CLEARLY_WRONG = 10.0  # a multiple of the plain path's error; if over half of the positions exceed it, one draw decides
EXACT = 1e-3  # a share of the spread; smaller errors are always accepted
DRAWS = 7
ROUNDING = 8.0  # a multiple of the dtype's eps: the plain path's error for models that cannot compute in fp32
_HALF = (torch.float16, torch.bfloat16)
R = TypeVar("R")


@dataclass(frozen=True)
class Errors:
    """Errors `[n]` of the fast and the plain path at each position, divided by the std of the fp32 numbers."""

    fast: Tensor
    plain: Tensor

    @classmethod
    def of(cls, fast: Tensor, plain: Tensor, truth: Tensor) -> Errors:
        """The largest difference of numbers `[n, …]` from `truth` at each position; infinite if one is not finite."""
        fast, plain, truth = (x.detach() for x in (fast, plain, truth))
        spread = truth.float().std().clamp(min=1e-6)
        fast, plain = ((x.to(truth) - truth).flatten(1).abs().amax(1) / spread for x in (fast, plain))
        return cls(*(finite_or_infinite(x.float()).cpu() for x in (fast, plain)))


def finite_or_infinite(errors: Tensor) -> Tensor:
    """Replace NaN by infinity."""
    return errors.nan_to_num(nan=torch.inf, posinf=torch.inf)


def errors_of(model: nn.Module, fast: Tensor, plain: Tensor, forward: Callable[[], Tensor]) -> Errors:
    """Errors of the numbers `[n, …]` of a fast and a plain path against `forward` in fp32.

    If the model cannot compute in fp32 because its kernels need half precision, the plain path's error is estimated.
    """
    if not rounds(model):
        return Errors.of(fast, plain, plain)
    truth = in_fp32(model, forward)
    return estimated(fast, plain, eps_of(model)) if truth is None else Errors.of(fast, plain, truth)


def estimated(fast: Tensor, plain: Tensor, eps: float) -> Errors:
    """Errors without fp32 numbers: the plain path is the truth, and its own error is set to `ROUNDING` times `eps`."""
    errors = Errors.of(fast, plain, plain)
    return Errors(errors.fast, errors.plain.clamp(min=ROUNDING * eps))


def in_fp32(model: nn.Module, forward: Callable[[], R]) -> R | None:
    """The result of `forward` with the model in fp32; None if the model cannot compute in fp32."""
    try:
        with in_dtype(model, torch.float32):
            return forward()
    except torch.OutOfMemoryError:
        raise
    except Exception:  # third-party models may raise anything
        return None


def judge(
    draw: Callable[[int], Errors], *, exact: float = EXACT, slack: float = 1.0, routed: bool = False
) -> str | None:
    """None if a fast path may replace the plain one, otherwise a sentence with both errors. `draw` takes a seed.

    An error is accepted up to `exact` or `MOST_ERROR` times the plain path's error, both multiplied by `slack`. For a
    larger error, up to `DRAWS` draws are pooled. One draw suffices if the plain path is exact or the fast path is
    clearly wrong. In a mixture of experts (`routed`), rounding may send a token to another expert. This error is as
    large as a bug's, but most draws do not have it, so the median over draws is judged.
    """
    draws: list[Errors] = []
    for seed in range(DRAWS):
        draws.append(draw(seed))
        if not bool(draws[-1].plain.isfinite().all()):
            return "the model's own outputs are not finite"
        fault = _fault(_medians(draws) if routed else _joined(draws), exact, slack)
        if fault is None or _clearly_wrong(draws[0], exact, slack):
            return fault
    return fault


def accepted(draw: Callable[[int], Errors], *, exact: float = EXACT, routed: bool = False) -> bool:
    """Whether `judge` accepts a fast path. A third-party model may raise any exception; its path is then refused."""
    try:
        return judge(draw, exact=exact, routed=routed) is None
    except torch.OutOfMemoryError:
        raise
    except Exception:
        return False


def has_experts(model: nn.Module) -> bool:
    """Whether the config describes a mixture of experts."""
    return any("expert" in name for name in config_numbers(model))


def _fault(errors: Errors, exact: float, slack: float) -> str | None:
    fast, plain = _rms(errors.fast), _rms(errors.plain)
    if not fast <= slack * max(MOST_ERROR * plain, exact):
        return f"its error is {fast:.2g} standard deviations, and that of the plain path {plain:.2g}"
    over = errors.fast / errors.plain.clamp(min=plain).mul(MOST_AT_A_POSITION).clamp(min=exact)
    if float(over.max()) <= slack:
        return None
    worst = int(over.argmax())
    return (
        f"its error at one position is {float(errors.fast[worst]):.2g} standard deviations, and that of the plain path "
        f"{float(errors.plain[worst]):.2g}"
    )


def _clearly_wrong(errors: Errors, exact: float, slack: float) -> bool:
    if not bool(errors.plain.any()):
        return True
    wrong = errors.fast > slack * (CLEARLY_WRONG * errors.plain).clamp(min=exact)
    return bool(wrong.float().mean() > 0.5)


def _medians(draws: list[Errors]) -> Errors:
    return Errors(*(torch.stack([getattr(d, name) for d in draws]).median(0).values for name in ("fast", "plain")))


def _joined(draws: list[Errors]) -> Errors:
    return Errors(*(torch.cat([getattr(d, name) for d in draws]) for name in ("fast", "plain")))


def _rms(errors: Tensor) -> float:
    return float(errors.double().square().mean().sqrt())


def rounds(model: nn.Module) -> bool:
    """Whether the model computes in less than fp32. If not, the plain path is the truth."""
    return eps_of(model) > torch.finfo(torch.float32).eps


def eps_of(model: nn.Module) -> float:
    """The relative rounding error of the model's computation, with autocast if enabled."""
    device = next(model.parameters()).device.type
    return torch.finfo(torch.get_autocast_dtype(device)).eps if torch.is_autocast_enabled(device) else matmul_eps(model)


@contextmanager
def in_dtype(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Within this context, the model computes in `dtype` without autocast or TF32. Its weights are restored afterwards.

    The weights of a block are converted only while the block runs, so that a large model need not fit twice. Quantised
    layers keep their weights and compute dtype. Flash attention needs half precision and is replaced by sdpa.
    """
    from torch.distributed.tensor import DTensor

    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise NotImplementedError("sharded weights keep their dtype")
    blocks = transformer_blocks(model)
    if any(isinstance(block, nn.ModuleList | nn.ModuleDict) for block in blocks):
        blocks = []  # these blocks are never called themselves
    inside = {module for block in blocks for module in block.modules()}
    held: dict[int, list[tuple[Tensor, Tensor]]] = {}
    hooks: list[Any] = []
    config: Any = getattr(model, "config", None)
    attention = str(getattr(config, "_attn_implementation", ""))

    def convert(index: int, module: nn.Module, *_: Any) -> None:
        _convert(module.modules(), dtype, held.setdefault(index, []))

    def restore(index: int, *_: Any) -> None:
        _restore(held.pop(index, []))

    try:
        _convert((module for module in model.modules() if module not in inside), dtype, held.setdefault(-1, []))
        for index, block in enumerate(blocks):
            hooks.append(block.register_forward_pre_hook(partial(convert, index)))
            hooks.append(block.register_forward_hook(partial(restore, index), always_call=True))
        if "flash" in attention:
            config._attn_implementation = "sdpa"
        with torch.autocast(next(model.parameters()).device.type, enabled=False), ieee_matmuls():
            yield
    finally:
        if "flash" in attention:
            config._attn_implementation = attention
        for hook in hooks:
            hook.remove()
        for tensors in held.values():
            _restore(tensors)


def _convert(modules: Iterator[nn.Module], dtype: torch.dtype, held: list[tuple[Tensor, Tensor]]) -> None:
    """Convert plain tensors and append each to `held` with its old data. Buffers are never narrowed."""
    for module in modules:
        buffers = module.buffers(recurse=False) if dtype == torch.float32 else ()
        for tensor in (*module.parameters(recurse=False), *buffers):
            narrow = tensor.dtype in _HALF
            if type(tensor) not in (nn.Parameter, Tensor) or tensor.dtype == dtype:
                continue
            if narrow or (tensor.dtype == torch.float32 and dtype in _HALF):
                held.append((tensor, tensor.data))
                tensor.data = tensor.data.to(dtype)


def _restore(held: list[tuple[Tensor, Tensor]]) -> None:
    for tensor, data in reversed(held):
        tensor.data = data
