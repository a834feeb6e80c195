"""The audit of a user's own KL formula: its value, gradient and overflow, and advice."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from keel.base.errors import KeelError
from keel.kl.facts import JSD, MEANINGS, POLICY_REF, REF_POLICY, TOPK
from keel.kl.placement import advantage_penalty, kl_score_loss, reward_penalty
from keel.kl.ratios import select
from keel.verify.formula import UserCallable
from keel.verify.losses import EnumeratedCompletions, completions
from keel.verify.oracle import (
    OFF,
    ON,
    Bandit,
    Formula,
    SequenceWorld,
    gradient_in_loss,
    gradient_in_reward,
    moments,
    random_bandits,
    relative_error,
    sequence_world,
)

EQUAL = 1e-8  # relative tolerance; enumeration in float64 has errors of about 1e-13
NEARLY_EQUAL = 1e-4  # relative tolerance in the limit of a sampler that equals the policy
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

    A value or gradient is named only if it equals the named quantity on every one of several random problems. In the
    loss and in the advantage the problems have one token. In the reward, and in the advantage at sequence level, they
    are completions of different lengths, because there a token's value is counted once per token. `near X` means that
    the gradient tends to X as the sampler tends to the policy. `bias` and `std` are relative to the closer of the two
    KLs, for the worst distribution. A callable that computes in fp32 is compared at that precision.
    """
    bandits = random_bandits() if bandits is None else bandits
    equal, precision = EQUAL, "float64"
    if isinstance(formula, UserCallable):
        precision = str(formula.dtype).removeprefix("torch.")
        if formula.dtype not in (torch.float32, torch.float64):
            raise KeelError(f"{text} returns {precision}, too coarse to audit: compute in float32 or float64")
        equal = EQUAL if formula.dtype == torch.float64 else 1e3 * torch.finfo(formula.dtype).eps
        formula = formula.formula
    _check_usable(formula, text, bandits)
    # JSD and top-k have parameters, of which the enumeration knows one value each
    known = [{name: of for name, of in bandit.kl_gradients.items() if name not in (JSD, TOPK)} for bandit in bandits]
    one_token = list(zip(bandits, known, strict=True))
    sequences = [(world, _sequence_gradients(world)) for world in _sequence_worlds()]

    def in_loss(bandit: Bandit, sampling: str) -> Tensor:
        return gradient_in_loss(formula, bandit, sampling)

    def in_advantage(bandit: Bandit, sampling: str) -> Tensor:
        return gradient_in_reward(formula, bandit, sampling, placement="advantage")

    def in_advantage_sequence(world: SequenceWorld, sampling: str) -> Tensor:
        return _sequence_gradient(formula, world, sampling, "advantage")

    def in_reward(world: SequenceWorld, sampling: str) -> Tensor:
        return _sequence_gradient(formula, world, sampling, "reward")

    def in_reward_without_ratio(world: SequenceWorld, sampling: str) -> Tensor:
        return _sequence_gradient(formula, world, sampling, "reward", ratio=False)

    def gradients(sampling: str) -> dict[str, Any]:
        return {
            "in_loss": _judged(in_loss, one_token, sampling, equal),
            "in_advantage": _judged(in_advantage, one_token, sampling, equal),
            "in_advantage_sequence": _judged(in_advantage_sequence, sequences, sampling, equal),
            "in_reward": _judged(in_reward, sequences, sampling, equal),
        }

    off_policy = gradients(OFF) | {
        "value": _value(formula, bandits, equal, OFF)["estimates"],
        "in_reward_without_ratio": _judged(in_reward_without_ratio, sequences, OFF, equal),
    }
    report: dict[str, Any] = {
        "formula": text,
        "known_as": _known_as(formula, bandits, equal),
        "precision": precision,
        "value": _value(formula, bandits, equal),
        **gradients(ON),
        "off_policy": off_policy,
        "bare_score": {place: _has_bare_score(formula, place, equal) for place in ("loss", "advantage")},
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


def _value(formula: Formula, bandits: list[Bandit], equal: float, sampling: str = ON) -> dict[str, Any]:
    biases: dict[str, list[float]] = {name: [] for name in DIRECTIONS}
    stds: dict[str, list[float]] = {name: [] for name in DIRECTIONS}
    for bandit in bandits:
        mean, std, _ = moments(formula, bandit, sampling)
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


Problem = TypeVar("Problem", Bandit, SequenceWorld)


def _judged(
    gradient_of: Callable[[Problem, str], Tensor],
    problems: Sequence[tuple[Problem, Mapping[str, Tensor]]],
    sampling: str,
    equal: float,
) -> dict[str, Any]:
    """The divergence whose gradient equals the formula's on every problem, or off-policy tends to it."""
    measured = [gradient_of(problem, sampling) for problem, _ in problems]
    targets = [of for _, of in problems]
    sizes = [(each.norm() / of[POLICY_REF].norm()).item() for each, of in zip(measured, targets, strict=True)]
    if max(sizes, key=_size) < equal:
        return {"gradient": "zero", "relative_error": 1.0, "cosine": 0.0}
    worst = _worst_errors(measured, targets)
    nearest = min(DIRECTIONS, key=lambda name: worst[name])
    name = next((name for name in worst if worst[name] < equal), None)
    if name is None and sampling == OFF:
        limit = _worst_errors([gradient_of(problem.with_sampler_near(), OFF) for problem, _ in problems], targets)
        tolerance = max(NEARLY_EQUAL, equal)
        name = next((near for of in limit if limit[of] < tolerance and (near := f"near {of}") in MEANINGS), None)
    cosines = [_cosine(each, of[POLICY_REF]) for each, of in zip(measured, targets, strict=True)]
    return {
        "gradient": name or "none",
        "relative_error": _finite(worst[name if name in worst else nearest]),
        "cosine": _finite(min(cosines)),
    }


def _worst_errors(measured: Sequence[Tensor], targets: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """The largest relative error against each target; infinity for NaN."""
    return {
        name: max(_size(relative_error(each, of[name])) for each, of in zip(measured, targets, strict=True))
        for name in targets[0]
    }


def _cosine(first: Tensor, second: Tensor) -> float:
    return (first @ second / (first.norm() * second.norm()).clamp_min(1e-300)).item()


def _sequence_worlds() -> tuple[SequenceWorld, ...]:
    """Two policies over completions of different lengths."""
    return sequence_world(), sequence_world(steps=2, vocabulary=3, seed=2, scale=2.0)


def _sequence_gradients(world: SequenceWorld) -> dict[str, Tensor]:
    """The gradients of KL_seq in both directions, from their definitions over all completions."""
    every = completions(world, ON)
    policy, ref = every.logp.sum(-1), every.ref.sum(-1)
    values = {POLICY_REF: policy.exp() * (policy - ref), REF_POLICY: ref.exp() * (ref - policy)}
    return {name: _table_gradient(value.sum(), every) for name, value in values.items()}


def _table_gradient(total: Tensor, every: EnumeratedCompletions) -> Tensor:
    """∂total/∂θ as one vector; zero if total does not depend on θ."""
    if not total.requires_grad:
        return torch.zeros_like(every.theta).flatten()
    return torch.autograd.grad(total, every.theta, retain_graph=True)[0].flatten()


def _sequence_gradient(
    formula: Formula, world: SequenceWorld, sampling: str, placement: str, *, ratio: bool = True
) -> Tensor:
    """The expected gradient of a penalty in the reward, or in the advantage at sequence level, over all completions.

    Σ_y w(y) Σ_t ρ_t·sg(P_t)·s_t, where P_t is the sum of the formula over all tokens (reward) or over those from t on.
    With `ratio=False` ρ_t is 1.
    """
    every = completions(world, sampling)
    logp = every.logp.detach()
    old = logp if every.old is None else every.old
    values = formula(logp, every.ref, old)
    if placement == "reward":
        advantage = reward_penalty(values, every.mask, 1.0)
    else:
        advantage = advantage_penalty(values, every.mask, 1.0, level="sequence")
    loss = kl_score_loss(advantage, every.logp, every.mask, old_logp=old if ratio else None)
    return _table_gradient((every.weights.unsqueeze(-1) * loss).sum(), every)


def _has_bare_score(formula: Formula, placement: str, equal: float) -> bool:
    """Whether the gradient contains a multiple of the score, whose expectation is 0 only under equal weights.

    At a policy that equals its reference and its sampler, a KL has no gradient. There the mean over each completion,
    which weights tokens by 1/length, leaves the bare score alone.
    """
    world = _sequence_worlds()[0]
    every = completions(replace(world, reference=world.policy, sampler=world.policy), ON)
    here = every.logp.detach()

    def size(values: Tensor) -> float:
        means = select(values, every.mask).sum(-1) / every.mask.sum(-1)
        return _table_gradient((every.weights * means).sum(), every).norm().item()

    values = formula(every.logp, here, here)
    measured = size(values if placement == "loss" else values.detach() * every.logp)
    return not measured <= equal * size(every.logp)  # NaN counts as a bare score


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
    advantage, off_loss = report["in_advantage"]["gradient"], report["off_policy"]["in_loss"]["gradient"]
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
    elif loss in MEANINGS and loss != "zero":
        parts.append(f"In the loss its gradient is {MEANINGS[loss]}, no KL's; use (logp-ref)**2/2 there.")
    elif loss == "zero":
        parts.append("In the loss it regularises nothing: its expected gradient is zero; use (logp-ref)**2/2 there.")
    else:
        cosine = report["in_loss"]["cosine"]
        away = " and can have a negative cosine to ∇KL(policy‖ref)" if cosine is not None and cosine < 0 else ""
        parts.append(f"In the loss its gradient is no KL's{away}; use (logp-ref)**2/2 there.")
    if report["bare_score"]["loss"] and loss in DIRECTIONS:
        parts.append("With kl.reduction=loss under a loss that averages over each completion it depends on the length.")
    if reward == POLICY_REF:
        parts.append("In the reward (detached) it is correct.")
    elif advantage == POLICY_REF:
        parts.append(
            "In the reward it is wrong: its sum over a completion adds a constant for every token, which is a penalty "
            "or a bonus for length; use logp - ref (detached)."
        )
    else:
        parts.append("In the reward use logp - ref (detached).")
    if value["estimates"] == POLICY_REF:
        parts.append("As a metric it is an unbiased estimate of KL(policy‖ref).")
    elif value["estimates"] == REF_POLICY:
        parts.append("As a metric it is an unbiased estimate of KL(ref‖policy), the other direction.")
    else:
        parts.append("As a metric it estimates no KL; report exp(ref-logp)-1-(ref-logp).")
    if report["overflows_at"] is not None:
        parts.append(
            f"It overflows fp32 at a log-ratio of {report['overflows_at']:g} nats: clamp the log-ratio, not the result."
        )
    return " ".join(parts)
