"""The rule of every trial of a fast path: its error against fp32 is compared with that of the path it replaces.

In half precision two right computations differ, the more the wider and deeper the model is. A fixed tolerance would
refuse large models or accept bugs in small ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from keel.models.dtypes import ieee_matmuls, matmul_eps
from keel.models.head import config_numbers, transformer_blocks

MOST_ERROR = 1.5  # times the plain path's error, of all positions together
MOST_AT_A_POSITION = 3.0  # the same at one position, where single errors vary more
CLEARLY_WRONG = 10.0  # times the plain path's error at most positions: one draw decides
EXACT = 1e-3  # of the spread: accepted whatever the plain path's error is
DRAWS = 7
ROUNDING = 8.0  # times the dtype's eps: the plain path's error where the model cannot compute in fp32
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Errors:
    """Errors `[n]` of a fast path and of the plain one by position, as shares of the spread of the fp32 numbers."""

    fast: Tensor
    plain: Tensor

    @classmethod
    def of(cls, fast: Tensor, plain: Tensor, truth: Tensor) -> Errors:
        """The largest differences of numbers `[n, …]` at each position; infinite where a number is not finite."""
        fast, plain, truth = (x.detach() for x in (fast, plain, truth))
        spread = truth.float().std().clamp(min=1e-6)
        fast, plain = ((x.to(truth) - truth).flatten(1).abs().amax(1) / spread for x in (fast, plain))
        return cls(*(finite_or_infinite(x.float()).cpu() for x in (fast, plain)))


def finite_or_infinite(errors: Tensor) -> Tensor:
    """NaN counts as infinite."""
    return errors.nan_to_num(nan=torch.inf, posinf=torch.inf)


def errors_of(model: nn.Module, fast: Tensor, plain: Tensor, forward: Callable[[], Tensor]) -> Errors:
    """Errors of a fast path's numbers `[n, …]` and of the model's own, which `forward` computes once more in fp32.

    Where the model cannot compute in fp32 (kernels for half precision alone) the plain path's error is an estimate.
    """
    if not rounds(model):
        return Errors.of(fast, plain, plain)
    try:
        with in_dtype(model, torch.float32):
            truth = forward()
    except torch.OutOfMemoryError:
        raise
    except Exception:  # third-party models may raise anything
        return estimated(fast, plain, _eps(model))
    return Errors.of(fast, plain, truth)


def estimated(fast: Tensor, plain: Tensor, eps: float) -> Errors:
    """The same without fp32 numbers."""
    errors = Errors.of(fast, plain, plain)
    return Errors(errors.fast, errors.plain.clamp(min=ROUNDING * eps))


def judge(
    draw: Callable[[int], Errors], *, exact: float = EXACT, slack: float = 1.0, routed: bool = False
) -> str | None:
    """None if a fast path may replace the plain one, else both errors. `draw` takes a seed.

    An error is accepted up to `exact`, or to `MOST_ERROR` times the plain path's, each times `slack`. While it is
    larger, more draws are taken together, unless the plain path is exact or the fast one clearly wrong. `routed`:
    rounding may send a token to another expert, which is as large as a bug but not in most draws, so medians count.
    """
    draws: list[Errors] = []
    for seed in range(DRAWS):
        draws.append(draw(seed))
        if not bool(draws[-1].plain.isfinite().all()):
            return "the model's own numbers are not finite"
        fault = _fault(_medians(draws) if routed else _joined(draws), exact, slack)
        if fault is None or _clearly_wrong(draws[0], exact, slack):
            return fault
    return fault


def has_experts(model: nn.Module) -> bool:
    """Whether the config says that a router sends tokens to experts."""
    return any("expert" in name for name in config_numbers(model))


def _fault(errors: Errors, exact: float, slack: float) -> str | None:
    fast, plain = _rms(errors.fast), _rms(errors.plain)
    if not fast <= slack * max(MOST_ERROR * plain, exact):
        return f"its error is {fast:.2g} of the spread, the plain path's {plain:.2g}"
    over = errors.fast / errors.plain.clamp(min=plain).mul(MOST_AT_A_POSITION).clamp(min=exact)
    if float(over.max()) <= slack:
        return None
    worst = int(over.argmax())
    return (
        f"its error is {float(errors.fast[worst]):.2g} of the spread at a position, the plain path's "
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
    """Whether the model computes in less than fp32: else its plain path is the truth."""
    return _eps(model) > torch.finfo(torch.float32).eps


def _eps(model: nn.Module) -> float:
    device = next(model.parameters()).device.type
    return torch.finfo(torch.get_autocast_dtype(device)).eps if torch.is_autocast_enabled(device) else matmul_eps(model)


@contextmanager
def in_dtype(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Inside, the model computes in this dtype without autocast or TF32; its weights are as they were afterwards.

    A block's weights are converted while it runs, so that a large model need not fit twice. Quantised weights stay:
    their layers compute in the dtype they are set to. Flash attention, which is for half precision, becomes sdpa.
    """
    from torch.distributed.tensor import DTensor

    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise NotImplementedError("sharded weights keep their dtype")
    blocks = transformer_blocks(model)
    if any(isinstance(block, nn.ModuleList | nn.ModuleDict) for block in blocks):
        blocks = []  # never called themselves
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
    """Convert plain tensors; `held` gets each with the data it had. Buffers are widened only (rotary frequencies)."""
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
