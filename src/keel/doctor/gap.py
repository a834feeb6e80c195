"""How far log-probabilities may be apart by rounding, and what narrower types make of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from keel.doctor.keel_subject import KeelSubject
from keel.doctor.thresholds import Thresholds
from keel.doctor.weights import backup

ROUNDING = 1e-4  # nats: mean differences below it are two orders of the same fp32 sums
_LEFT, _LEFT_HALF = 0.02, 0.1  # of a gap that may be left where its cause is found; weights of 16 bits leave more


def closed(setup: KeelSubject, gap: float) -> float:
    """The mean difference in nats at which a mean gap of this size counts as closed by an explanation."""
    return max((_LEFT_HALF if _of_16_bits(setup) else _LEFT) * gap, ROUNDING)


def close(setup: KeelSubject, differences: Tensor, thresholds: Thresholds) -> bool:
    """Within rounding: the largest difference in fp32, the mean one where a pass runs in half precision."""
    if in_half_precision(setup):
        return average(differences) <= thresholds["scoring_gap_half"]
    return largest(differences) <= thresholds["scoring_gap"]


def in_half_precision(setup: KeelSubject) -> bool:
    """Whether training's passes run in 16 bits, as the weights are now."""
    return setup.run.amp_dtype is not None or _of_16_bits(setup)


def _of_16_bits(setup: KeelSubject) -> bool:
    """Whether some weight is of another type than fp32, as they are now; also a base of integers, whose passes are."""
    return any(p.dtype != torch.float32 for p in setup.policy.model.parameters())


def largest(differences: Tensor) -> float:
    return float(differences.abs().nan_to_num(torch.inf).max()) if len(differences) else 0.0


def average(differences: Tensor) -> float:
    return float(differences.abs().nan_to_num(torch.inf).mean()) if len(differences) else 0.0


def bf16_scores(setup: KeelSubject) -> Tensor:
    """The model's own forward in bfloat16 `[B, T]`."""
    with torch.autocast(setup.policy.device.type, dtype=torch.bfloat16):
        return setup.forward_logp()


@contextmanager
def in_float32(setup: KeelSubject) -> Iterator[None]:
    """The policy's own weights in fp32, without autocast: its passes round no more; afterwards all is what it was."""
    narrow = [(p, p.data) for p in setup.policy.model.parameters() if p.is_floating_point() and p.itemsize < 4]
    amp, setup.run.amp_dtype = setup.run.amp_dtype, None
    try:
        for parameter, held in narrow:
            parameter.data = held.float()
        yield
    finally:
        setup.run.amp_dtype = amp
        for parameter, held in narrow:
            parameter.data = held


def rounded_weights() -> dict[str, Callable[[Tensor], Tensor]]:
    """Types that an engine may hold weights `[out, in]` in, each as what is left of them."""
    return {
        "bfloat16": lambda w: w.to(torch.bfloat16).to(w),
        "float16": lambda w: w.to(torch.float16).to(w),
        "float8": lambda w: w.to(torch.float8_e4m3fn).to(w),
        "8-bit integers": lambda w: _integers(w, 127, w.abs().amax()),
        "8-bit integers, a scale a row": lambda w: _integers(w, 127, w.abs().amax(-1, keepdim=True)),
        "4-bit integers": lambda w: _integers(w, 7, w.abs().amax()),
        "4-bit integers, a scale a row": lambda w: _integers(w, 7, w.abs().amax(-1, keepdim=True)),
    }


def _integers(weights: Tensor, largest: int, scale: Tensor) -> Tensor:
    unit = (scale / largest).clamp_min(1e-12)
    return (weights / unit).round() * unit


@contextmanager
def quantized(setup: KeelSubject, rounded: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """The policy with matrices that a narrower type holds; afterwards they are what they were."""
    matrices = [p for p in setup.policy.model.parameters() if p.dim() == 2 and p.is_floating_point()]
    originals = backup(matrices)
    try:
        with torch.no_grad():
            for matrix in matrices:
                matrix.copy_(rounded(matrix))
        yield
    finally:
        with torch.no_grad():
            for matrix, before in zip(matrices, originals, strict=True):
                matrix.copy_(before)


def rounding_explains(gap: Tensor, rounding: Tensor, thresholds: Thresholds) -> bool:
    """Whether a gap `[N]` looks like that of bfloat16, `half`: no larger on average, and spread as that is.

    Rounding moves nearly every token; what goes wrong at some places leaves the others as they are.
    """
    gap, rounding = gap.abs().double(), rounding.abs().double()
    if float(gap.mean()) > thresholds["precision_times"] * float(rounding.mean()):
        return False
    moved = (gap > 0.01 * rounding) | (rounding < 1e-6)  # a token that bfloat16 leaves alone tells nothing
    return float(moved.double().mean()) >= thresholds["precision_moved"]
