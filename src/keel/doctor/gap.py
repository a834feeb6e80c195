"""Rounding tolerances of log-probabilities, and contexts that change precision, mode or dropout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from keel.config import Config
from keel.doctor import advice
from keel.doctor.findings import Advice
from keel.doctor.subject import Subject, backup
from keel.doctor.thresholds import Thresholds
from keel.models.head import evaluating

ROUNDING = 1e-4  # nats; the mean difference between two summation orders in fp32 is smaller
_LEFT, _LEFT_HALF = 0.02, 0.1  # share of a gap that may remain after its cause is removed; larger for 16-bit weights


def closed(subject: Subject, gap: float) -> float:
    """The largest remaining mean difference, in nats, at which a gap of this mean size counts as explained."""
    return max((_LEFT_HALF if _of_16_bits(subject) else _LEFT) * gap, ROUNDING)


def close(subject: Subject, differences: Tensor) -> bool:
    """Whether differences are rounding: by the largest one in fp32, by the mean in half precision."""
    if in_half_precision(subject):
        return average(differences) <= subject.thresholds["scoring_gap_half"]
    return largest(differences) <= subject.thresholds["scoring_gap"]


def in_half_precision(subject: Subject) -> bool:
    """Whether training's passes currently run in 16 bits."""
    return subject.in_half_precision


def _of_16_bits(subject: Subject) -> bool:
    """Whether some weight is not fp32. Integer base weights count, since their passes use 16 bits."""
    return any(p.dtype != torch.float32 for p in subject.policy.model.parameters())


def largest(differences: Tensor) -> float:
    return float(differences.abs().nan_to_num(torch.inf).max()) if len(differences) else 0.0


def average(differences: Tensor) -> float:
    return float(differences.abs().nan_to_num(torch.inf).mean()) if len(differences) else 0.0


def bf16_scores(subject: Subject) -> Tensor:
    """The model's own forward in bfloat16 `[B, T]`."""
    with torch.autocast(subject.policy.device.type, dtype=torch.bfloat16):
        return subject.forward_logp()


@contextmanager
def in_float32(subject: Subject) -> Iterator[None]:
    """Run with the policy's weights in fp32 and without autocast, then restore both."""
    narrow = [(p, p.data) for p in subject.policy.model.parameters() if p.is_floating_point() and p.itemsize < 4]
    try:
        for parameter, held in narrow:
            parameter.data = held.float()
        with subject.without_autocast():
            yield
    finally:
        for parameter, held in narrow:
            parameter.data = held


def rounded_weights() -> dict[str, Callable[[Tensor], Tensor]]:
    """Lower-precision types that an engine may use for weights `[out, in]`, each as a rounding function."""
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
def quantized(subject: Subject, rounded: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Run with the policy's matrices rounded to a lower-precision type, then restore them."""
    matrices = [p for p in subject.policy.model.parameters() if p.dim() == 2 and p.is_floating_point()]
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
    """Whether a gap `[N]` looks like the `rounding` of bfloat16: a similar mean, spread over nearly all tokens.

    Rounding changes nearly every token. Other errors leave most tokens unchanged.
    """
    gap, rounding = gap.abs().double(), rounding.abs().double()
    if float(gap.mean()) > thresholds["precision_times"] * float(rounding.mean()):
        return False
    moved = (gap > 0.01 * rounding) | (rounding < 1e-6)  # tokens that bfloat16 does not change count as moved
    return float(moved.double().mean()) >= thresholds["precision_moved"]


# ------------------------------------------------------------------------ evaluation mode and dropout


def no_dropout(config: Config) -> Advice:
    """Advice: turn off configured dropout, and keep user code in evaluation mode."""
    return advice.either(
        advice.setting("set {}", advice.without_dropout(config.to_dict())),
        "a loader or scorer of your own must leave model.eval() on",
        joined="; ",
    )


def is_active_dropout(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Run in evaluation mode, with gradients."""
    with evaluating(model), torch.enable_grad():
        yield


@contextmanager
def without_dropout() -> Iterator[None]:
    """Run with every functional dropout as the identity, whatever its `training` argument."""
    names = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")
    originals = {name: getattr(functional, name) for name in names}
    try:
        for name in names:
            setattr(functional, name, lambda x, *args, **options: x)
        yield
    finally:
        for name, function in originals.items():
            setattr(functional, name, function)
