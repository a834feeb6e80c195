"""The audit of a user's own KL formula: its value, gradient and overflow, and advice."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from keel.base.errors import KeelError
from keel.kl.facts import POLICY_REF, REF_POLICY
from keel.verify.formula import UserCallable
from keel.verify.oracle import (
    OFF,
    ON,
    Bandit,
    Formula,
    gradient_in_loss,
    gradient_in_reward,
    moments,
    random_bandits,
    relative_error,
)

EQUAL = 1e-8  # relative tolerance; enumeration in float64 has errors of about 1e-13
DIRECTIONS = (POLICY_REF, REF_POLICY)
OVERFLOW_LIMIT = 10_000.0  # nats; a formula that is finite up to this log-ratio is called safe

KNOWN: dict[str, Formula] = {
    "k1": lambda logp, ref, old: logp - ref,
    "sign-flipped k1": lambda logp, ref, old: ref - logp,
    "k2": lambda logp, ref, old: (logp - ref).square() / 2,
    "k3": lambda logp, ref, old: torch.expm1(ref - logp) - (ref - logp),
    "reversed k3 (KL(ref‖policy) on samples from the reference)": lambda logp, ref, old: (
        torch.expm1(logp - ref) - (logp - ref)
    ),
    "the estimator for samples from the reference, exp(u)·u": lambda logp, ref, old: (logp - ref).exp() * (logp - ref),
    "abs": lambda logp, ref, old: (logp - ref).abs(),
    "importance-weighted k1": lambda logp, ref, old: (logp - old).exp() * (logp - ref),
    "importance-weighted k3": lambda logp, ref, old: (logp - old).exp() * (torch.expm1(ref - logp) - (ref - logp)),
    "sg(ρ)·k2": lambda logp, ref, old: (logp - old).exp().detach() * (logp - ref).square() / 2,
}


def audit(formula: Formula | UserCallable, text: str, bandits: list[Bandit] | None = None) -> dict[str, Any]:
    """Audit one formula: value, gradients and overflow as plain data (`keel verify --formula … --json`).

    A value or gradient is named only if it equals the named quantity on every one of several random distributions.
    `bias` and `std` are relative to the closer of the two KLs, for the worst distribution. A callable that computes in
    fp32 or less is compared at that precision.
    """
    bandits = random_bandits() if bandits is None else bandits
    equal, precision = EQUAL, "float64"
    if isinstance(formula, UserCallable):
        precision = str(formula.dtype).removeprefix("torch.")
        equal = EQUAL if formula.dtype == torch.float64 else 1e3 * torch.finfo(formula.dtype).eps
        formula = formula.formula
    _check_usable(formula, text, bandits)
    value = _value(formula, bandits, equal)
    targets = [bandit.kl_gradients for bandit in bandits]

    def gradients(gradient_of: Callable[[Formula, Bandit, str], Tensor], sampling: str) -> dict[str, Any]:
        return _judged([gradient_of(formula, bandit, sampling) for bandit in bandits], targets, equal)

    in_loss, in_reward = gradients(gradient_in_loss, ON), gradients(gradient_in_reward, ON)
    off_policy = {
        "in_loss": gradients(gradient_in_loss, OFF),
        "in_reward": gradients(gradient_in_reward, OFF),
        "in_reward_without_ratio": gradients(partial(gradient_in_reward, ratio=False), OFF),
    }
    report: dict[str, Any] = {
        "formula": text,
        "known_as": _known_as(formula, bandits, equal),
        "precision": precision,
        "value": value,
        "in_loss": in_loss,
        "in_reward": in_reward,
        "off_policy": off_policy,
        "overflows_at": overflows_at(formula),
    }
    report["advice"] = _advice(report)
    return report


def _check_usable(formula: Formula, text: str, bandits: list[Bandit]) -> None:
    """Refuse a formula that gives NaN on ordinary log-probabilities or mixes tokens."""
    for bandit in bandits:
        for sampling in (ON, OFF):
            logp, ref, old = bandit.old_logp(ON), bandit.ref_logp, bandit.old_logp(sampling)
            values = formula(logp, ref, old)
            bad = values.isnan().nonzero()
            if len(bad):
                row = int(bad[0, 0])
                raise KeelError(
                    f"{text!r} is NaN at logp={logp[row, 0]:.3f}, ref={ref[row, 0]:.3f}, old={old[row, 0]:.3f}: "
                    "a KL formula must be defined on all log-probabilities"
                )
            alone = torch.cat([formula(logp[i : i + 1], ref[i : i + 1], old[i : i + 1]) for i in range(len(logp))])
            if not torch.allclose(alone, values, rtol=1e-5, atol=1e-8):
                raise KeelError(
                    f"{text!r} mixes tokens or is random: each value must depend on its own logp, ref and old alone"
                )


def _finite(number: float) -> float | None:
    """Convert a non-finite number to None, because JSON has no infinity."""
    return number if math.isfinite(number) else None


def _size(number: float) -> float:
    """The absolute value, for comparisons; infinity for NaN."""
    return math.inf if math.isnan(number) else abs(number)


def _value(formula: Formula, bandits: list[Bandit], equal: float) -> dict[str, Any]:
    biases: dict[str, list[float]] = {name: [] for name in DIRECTIONS}
    stds: dict[str, list[float]] = {name: [] for name in DIRECTIONS}
    for bandit in bandits:
        mean, std, _ = moments(formula, bandit)
        for name in DIRECTIONS:
            truth = bandit.kl_values[name]
            biases[name].append((mean - truth) / truth)
            stds[name].append(std / truth)
    worst = {name: max(values, key=_size) for name, values in biases.items()}
    nearest = min(DIRECTIONS, key=lambda name: _size(worst[name]))
    return {
        "estimates": nearest if _size(worst[nearest]) < equal else "none",
        "nearest": nearest,
        "bias": _finite(worst[nearest]),
        "std": _finite(max(stds[nearest], key=_size)),
        "nonnegative": _nonnegative(formula, bandits),
    }


def _nonnegative(formula: Formula, bandits: list[Bandit]) -> bool:
    """Whether no value is negative, for the distributions and for a grid of log-ratios up to 30 nats."""
    if any(moments(formula, bandit)[2] < -1e-12 for bandit in bandits):
        return False
    gap = torch.linspace(-30, 30, 601, dtype=torch.float64).unsqueeze(-1)
    for base in (-0.1, -3.0):
        logp = torch.where(gap > 0, base - gap, torch.full_like(gap, base))
        values = formula(logp, logp + gap, logp)
        if bool((values < -1e-12 * (1 + values.abs())).any()):
            return False
    return True


def _judged(gradients: list[Tensor], targets: list[dict[str, Tensor]], equal: float) -> dict[str, Any]:
    """The divergence whose gradient equals the formula's on every distribution."""
    errors: dict[str, list[float]] = {name: [] for name in DIRECTIONS}
    sizes, cosines = [], []
    for measured, exact in zip(gradients, targets, strict=True):
        for name in DIRECTIONS:
            errors[name].append(relative_error(measured, exact[name]))
        target = exact[POLICY_REF]
        sizes.append((measured.norm() / target.norm()).item())
        cosines.append((measured @ target / (measured.norm() * target.norm()).clamp_min(1e-300)).item())
    if max(sizes, key=_size) < equal:
        return {"gradient": "zero", "relative_error": 1.0, "cosine": 0.0}
    worst = {name: max(values, key=_size) for name, values in errors.items()}
    nearest = min(DIRECTIONS, key=lambda name: _size(worst[name]))
    return {
        "gradient": nearest if _size(worst[nearest]) < equal else "none",
        "relative_error": _finite(worst[nearest]),
        "cosine": _finite(min(cosines)),
    }


def _known_as(formula: Formula, bandits: list[Bandit], equal: float) -> str | None:
    """The usual name of a formula with the same values and gradients, if there is one."""

    def values(f: Formula, bandit: Bandit) -> Tensor:
        return f(bandit.old_logp(ON), bandit.ref_logp, bandit.old_logp(OFF))

    own = [(bandit, values(formula, bandit), gradient_in_loss(formula, bandit, OFF)) for bandit in bandits]
    for name, known in KNOWN.items():
        if all(
            torch.allclose(value, values(known, bandit), rtol=equal, atol=equal)
            and torch.allclose(gradient, gradient_in_loss(known, bandit, OFF), rtol=10 * equal, atol=10 * equal)
            for bandit, value, gradient in own
        ):
            return name
    return None


def overflows_at(formula: Formula) -> float | None:
    """The smallest |log-ratio| in nats at which the formula is not finite in fp32; None if it is finite up to 10⁴.

    The log-ratio between policy and reference is varied in both directions, then that between policy and sampler.
    """
    grid = torch.cat([torch.arange(0, 200, 0.25), torch.arange(200, OVERFLOW_LIMIT + 1, 25)])
    shifts: tuple[Shift, ...] = (
        lambda gap, zero: (-gap, zero, -gap),
        lambda gap, zero: (zero, -gap, zero),
        lambda gap, zero: (-gap, -gap, zero),
        lambda gap, zero: (zero, zero, -gap),
    )
    overflows = [at for shift in shifts if (at := _first_overflow(formula, grid, shift)) is not None]
    return round(min(overflows), 2) if overflows else None


# (gap, zero) -> (logp, ref, old), where two of the three differ by the gap
Shift = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def _first_overflow(formula: Formula, grid: Tensor, shift: Shift) -> float | None:
    def finite(gap: Tensor) -> Tensor:
        gap = gap.float().unsqueeze(-1)
        with torch.no_grad():
            return torch.isfinite(formula(*shift(gap, torch.zeros_like(gap)))).squeeze(-1)

    broken = (~finite(grid)).nonzero()
    if not len(broken):
        return None
    first = int(broken[0, 0])
    if first == 0:
        return 0.0
    low, high = grid[first - 1].item(), grid[first].item()
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if bool(finite(torch.tensor([middle]))[0]) else (low, middle)
    return high


def _advice(report: dict[str, Any]) -> str:
    """Advice on where to use the formula, or on an alternative."""
    value, loss, reward = report["value"], report["in_loss"]["gradient"], report["in_reward"]["gradient"]
    off_loss = report["off_policy"]["in_loss"]["gradient"]
    parts = []
    if loss == POLICY_REF:
        parts.append("In the loss it is correct: its expected gradient is ∇KL(policy‖ref).")
        if off_loss != POLICY_REF:
            parts.append("Off-policy (several updates a batch) use detach(exp(logp-old))*(logp-ref)**2/2.")
    elif loss == REF_POLICY:
        parts.append(
            "In the loss its gradient is ∇KL(ref‖policy), the forward KL; for ∇KL(policy‖ref) use (logp-ref)**2/2, "
            "or exp(logp-old)*(exp(ref-logp)-1-(ref-logp)) which is correct off-policy too."
        )
    elif loss == "zero":
        parts.append("In the loss it regularises nothing: its expected gradient is zero; use (logp-ref)**2/2 there.")
    else:
        cosine = report["in_loss"]["cosine"]
        away = " and can point away from it" if cosine is not None and cosine < 0 else ""
        parts.append(f"In the loss its gradient is no KL's{away}; use (logp-ref)**2/2 there.")
    if reward == POLICY_REF:
        parts.append("In the reward (detached) it is correct.")
    else:
        parts.append("In the reward use logp - ref (detached).")
    if value["estimates"] == POLICY_REF:
        parts.append("As a metric it is an unbiased estimate of KL(policy‖ref).")
    elif value["estimates"] == REF_POLICY:
        parts.append("As a metric it is an unbiased estimate of KL(ref‖policy), the other direction.")
    else:
        parts.append("As a metric it is no KL; report exp(ref-logp)-1-(ref-logp).")
    if report["overflows_at"] is not None:
        parts.append(
            f"It overflows fp32 at a log-ratio of {report['overflows_at']:g} nats: clamp the log-ratio, not the result."
        )
    return " ".join(parts)
