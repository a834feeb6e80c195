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
from keel.models.head import transformer_blocks

MOST_ERROR = 1.5  # times the plain path's error, of all positions together
MOST_AT_A_POSITION = 3.0  # the same at one position, where single errors vary more
CLEARLY_WRONG = 10.0  # times the plain path's error at most positions: one draw decides
EXACT = 1e-3  # of the spread: accepted whatever the plain path's error is
DRAWS = 7  # rounding may send a token to another expert, which is as large as a bug but not in each draw


@dataclass(frozen=True)
class Errors:
    """Errors `[n]` of a fast path and of the plain one by position, as shares of the spread of the fp32 numbers."""

    fast: Tensor
    plain: Tensor

    @classmethod
    def of(cls, fast: Tensor, plain: Tensor, truth: Tensor) -> Errors:
        """The largest differences of numbers `[n, …]` at each position."""
        fast, plain, truth = fast.detach(), plain.detach(), truth.detach()
        spread = truth.float().std().clamp(min=1e-6)
        fast, plain = ((x.to(truth) - truth).flatten(1).abs().amax(1) / spread for x in (fast, plain))
        return cls(*(x.float().nan_to_num(nan=torch.inf).cpu() for x in (fast, plain)))


def judge(draw: Callable[[int], Errors], *, exact: float = EXACT, slack: float = 1.0) -> str | None:
    """None if a fast path may replace the plain one, else both errors. `draw` takes a seed.

    An error is accepted up to `exact`, or to `MOST_ERROR` times the plain path's, each times `slack`.

    One draw suffices to accept: a bug is in each. To refuse, the medians of several draws count by position, unless the
    plain path is exact or the fast one is clearly wrong.
    """
    draws: list[Errors] = []
    for seed in range(DRAWS):
        draws.append(draw(seed))
        errors = _medians(draws)
        if _acceptable(Errors(errors.fast / slack, errors.plain), exact):
            return None
        if _clearly_wrong(errors, exact * slack):
            break
    errors = _medians(draws)
    fast, plain = _whole(errors.fast), _whole(errors.plain)
    return f"its error is {fast:.2g} of the spread, the plain path's {plain:.2g}"


def _acceptable(errors: Errors, exact: float) -> bool:
    at_a_position = errors.fast <= (MOST_AT_A_POSITION * errors.plain).clamp(min=exact)
    return bool(at_a_position.all()) and _whole(errors.fast) <= max(MOST_ERROR * _whole(errors.plain), exact)


def _clearly_wrong(errors: Errors, exact: float) -> bool:
    if not bool(errors.plain.any()):
        return True
    return bool((errors.fast > (CLEARLY_WRONG * errors.plain).clamp(min=exact)).float().mean() > 0.5)


def _medians(draws: list[Errors]) -> Errors:
    return Errors(*(torch.stack([getattr(d, name) for d in draws]).median(0).values for name in ("fast", "plain")))


def _whole(errors: Tensor) -> float:
    return float(errors.square().mean().sqrt())


def rounds(model: nn.Module) -> bool:
    """Whether the model computes in less than fp32: else its plain path is the truth."""
    device = next(model.parameters()).device.type
    return torch.is_autocast_enabled(device) or matmul_eps(model) > torch.finfo(torch.float32).eps


@contextmanager
def in_fp32(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes in fp32 with its own weights, which are as they were afterwards.

    A block's weights are widened while it runs, so that a large model need not fit twice.
    """
    blocks = transformer_blocks(model)
    inside = {id(tensor) for block in blocks for tensor in _narrow(block)}
    whole = [tensor for tensor in _narrow(model) if id(tensor) not in inside]
    hooks: list[Any] = []
    held: dict[int, list[tuple[Tensor, Tensor]]] = {}
    device = next(model.parameters()).device.type

    def widen(index: int, block: nn.Module, *_: Any) -> None:
        held[index] = _widen(_narrow(block))

    def restore(index: int, *_: Any) -> None:
        _restore(held.pop(index, []))

    outside = _widen(whole)
    try:
        for index, block in enumerate(blocks):
            hooks.append(block.register_forward_pre_hook(partial(widen, index)))
            hooks.append(block.register_forward_hook(partial(restore, index), always_call=True))
        with torch.autocast(device, enabled=False), ieee_matmuls():
            yield
    finally:
        for hook in hooks:
            hook.remove()
        for tensors in (*held.values(), outside):
            _restore(tensors)


def _narrow(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers in half precision, once each."""
    tensors = (*module.parameters(), *module.buffers())
    return list({id(x): x for x in tensors if x.dtype in (torch.float16, torch.bfloat16)}.values())


def _widen(tensors: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Each tensor with the data it had."""
    held = [(tensor, tensor.data) for tensor in tensors]
    for tensor, data in held:
        tensor.data = data.float()
    return held


def _restore(held: list[tuple[Tensor, Tensor]]) -> None:
    for tensor, data in held:
        tensor.data = data
