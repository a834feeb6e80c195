"""The gradient of the model's own log-probabilities against finite differences, tensor by tensor.

Two passes through one model agree with each other whatever its layers do to gradients; how far the log-probability goes
when a weight is moved does not ask autograd.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

STEP = 0.01  # nats that a step should move the log-probability by; rounding of a sum in fp32 is a thousandth of it
RELATIVE = 0.02  # of a tensor's size, that a step moves it by at most
RELATIVE_ZEROS = 0.1  # the same along a random direction, in which slopes are small
NOISE = 1e-3  # nats: a smaller change is not told from rounding
WRONG = 0.5  # share of the slope that may be off: curvature over such a step is some hundredths of it
STEADY = 0.1  # share of the slope by which two sizes of the step may differ
TENSORS, SECONDS = 32, 0.5  # that are looked at, and for how long


def wrong_derivatives(
    named: Sequence[tuple[str, nn.Parameter]],
    gradients: Sequence[Tensor],
    value: Callable[[], float],
    untrained: Mapping[str, int] = {},
) -> list[tuple[str, float, float]]:
    """Names of tensors along whose gradient `value` has another slope, with that slope and the gradient's.

    The first entry may be all of them together. A tensor whose gradient is too small to be tried, and what has none
    within a tensor that has one, is moved along a random direction: a weight that moves the value has a gradient.
    `untrained` names rows of tensors that have none on purpose.
    """
    generator, began = torch.Generator().manual_seed(0), time.monotonic()
    wrong = []
    stride = max(1, -(-len(named) // TENSORS))
    single = [([parameter], [gradient], name) for (name, parameter), gradient in zip(named, gradients, strict=True)]
    every = [parameter for _, parameter in named]
    for weights, slopes, name in [(every, list(gradients), "all weights together"), *single[::stride]]:
        whole = name == "all weights together"
        if time.monotonic() - began > SECONDS and not whole:
            break
        if (found := _wrong_slope(weights, slopes, value, generator)) is not None:
            wrong.append((name, *found))
        elif not whole and (found := _wrong_zeros(weights[0], slopes[0], value, generator, untrained.get(name))):
            wrong.append((f"what has no gradient in {name}", *found))
    return wrong


def _wrong_slope(
    weights: Sequence[nn.Parameter], gradients: Sequence[Tensor], value: Callable[[], float], generator: torch.Generator
) -> tuple[float, float] | None:
    """The measured slope along a direction of unit length and the gradient's, where they are not the same."""
    size = _norm([weight.detach() for weight in weights]) or 1.0
    slope, farthest = _norm(gradients), RELATIVE * size
    if slope * farthest > NOISE:
        direction = [gradient.float() / slope for gradient in gradients]
        step = min(STEP / slope, farthest)
    else:
        noise = [torch.randn(w.shape, generator=generator).to(w.device) for w in weights]
        length, step = _norm(noise), farthest
        direction = [part / length for part in noise]
        slope = sum(float((g.float() * d).sum()) for g, d in zip(gradients, direction, strict=True))
    return _another(weights, direction, slope, step, value)


def _wrong_zeros(
    weight: nn.Parameter,
    gradient: Tensor,
    value: Callable[[], float],
    generator: torch.Generator,
    untrained: int | None,
) -> tuple[float, float] | None:
    """The slope among weights whose gradient is 0 although others of their tensor have one."""
    still = gradient == 0
    if untrained is not None:
        still[untrained] = False
    if not bool(still.any()) or bool(still.all()):
        return None
    noise = torch.randn(weight.shape, generator=generator).to(weight.device) * still
    step = RELATIVE_ZEROS * _norm([weight.detach() * still])
    return _another([weight], [noise / _norm([noise])], 0.0, step, value) if step else None


def _another(
    weights: Sequence[nn.Parameter],
    direction: Sequence[Tensor],
    slope: float,
    step: float,
    value: Callable[[], float],
) -> tuple[float, float] | None:
    measured = _central(weights, direction, step, value)
    if not _differ(measured, slope, step):
        return None
    again = _central(weights, direction, step / 2, value)  # curvature would make another number of it
    steady = abs(again - measured) <= STEADY * max(abs(again), abs(slope))
    return (again, slope) if steady and _differ(again, slope, step / 2) else None


def _differ(measured: float, slope: float, step: float) -> bool:
    largest = max(abs(measured), abs(slope))
    return abs(measured - slope) > WRONG * largest and step * largest > NOISE


@torch.no_grad()
def _central(
    weights: Sequence[nn.Parameter], direction: Sequence[Tensor], step: float, value: Callable[[], float]
) -> float:
    """(f(w + εd) − f(w − εd)) / 2ε; afterwards every weight has the very bits it had."""
    originals = [weight.detach().clone() for weight in weights]
    values = []
    try:
        for sign in (1.0, -1.0):
            for weight, before, part in zip(weights, originals, direction, strict=True):
                weight.copy_(before + sign * step * part)
            values.append(value())
    finally:
        for weight, before in zip(weights, originals, strict=True):
            weight.copy_(before)
    return (values[0] - values[1]) / (2 * step)


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.stack([tensor.float().square().sum() for tensor in tensors]).sum().sqrt())
