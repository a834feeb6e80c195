"""KL terms of other trainers: enumerate the value and expected gradient of their code."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from keel.base.errors import KeelError
from keel.kl import exact_kl
from keel.kl.facts import POLICY_REF, REF_POLICY
from keel.verify.oracle import OFF, ON, Bandit, relative_error

EQUAL = 1e-5  # relative tolerance; several trainers compute in fp32 regardless of the input
NEAR = 2.0  # the largest log-ratio of the near bandits in nats, below every trainer's clamp
JSD, DIFFERENCE = "jsd", "policy||ref - ref||policy"
GRADIENT_LABELS = {
    POLICY_REF: "∇KL(policy‖ref)",
    REF_POLICY: "∇KL(ref‖policy)",
    "total-variation": "∇‖policy − ref‖₁",
    "away": "−∇KL(sampler‖policy): away from its own samples",
    JSD: "∇JSD",
    DIFFERENCE: "∇KL(policy‖ref) − ∇KL(ref‖policy)",
    "zero": "zero",
    "none": "no divergence's",
}
VALUE_LABELS = {POLICY_REF: "KL(policy‖ref)", REF_POLICY: "KL(ref‖policy)", JSD: "JSD", "zero": "zero", "none": "no KL"}

# (logits of policy, reference and sampler, each [V]) -> (value of the KL, loss), each [V], one entry per sampled token
Losses = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class PeerTerm:
    """One term: the trainer's own function, its options, and an adapter to call it."""

    name: str
    options: str
    function: Callable[..., Any]
    losses: Losses
    default: bool = True  # whether these options are the trainer's defaults
    vocabulary: int = 6


@dataclass(frozen=True)
class PeerTermResult:
    """The result for one term. Cosines to the two divergences are the smallest over the bandits, on-policy."""

    peer: str
    version: str
    name: str
    options: str
    default: bool
    file: str
    line: int
    value: str
    gradient: str
    far: str
    off_policy: str
    cosine_policy_ref: float
    cosine_ref_policy: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def in_loss(formula: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Losses:
    """A formula of (logp, ref, old), each `[V, 1]`, as a loss."""

    def losses(policy: Tensor, ref: Tensor, sampler: Tensor) -> tuple[Tensor, Tensor]:
        logp, ref_logp, old = (logits.log_softmax(0)[:, None] for logits in (policy, ref, sampler))
        value = formula(logp, ref_logp, old)[:, 0].double()
        return value.detach(), value

    return losses


def in_advantage(penalty: Callable[[Tensor, Tensor], Tensor]) -> Losses:
    """A loss from a penalty of (old, ref), each `[V, 1]`, subtracted from the advantage of the policy term −ρ·A."""

    def losses(policy: Tensor, ref: Tensor, sampler: Tensor) -> tuple[Tensor, Tensor]:
        logp, ref_logp, old = (logits.log_softmax(0)[:, None] for logits in (policy, ref, sampler))
        value = penalty(old.detach(), ref_logp)[:, 0].double()
        return value, (logp - old.detach()).exp()[:, 0] * value

    return losses


def by_token(loss: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Losses:
    """Losses from a function of the logits of student, teacher and sampler and a sampled token, called per token."""

    def losses(policy: Tensor, ref: Tensor, sampler: Tensor) -> tuple[Tensor, Tensor]:
        each = torch.stack([loss(policy, ref, sampler, torch.tensor(token)) for token in range(len(policy))]).double()
        return each.detach(), each

    return losses


def of_distributions(loss: Callable[[Tensor, Tensor], Tensor]) -> Losses:
    """Losses from a function of the logits of student and teacher, equal for every sampled token."""

    def losses(policy: Tensor, ref: Tensor, sampler: Tensor) -> tuple[Tensor, Tensor]:
        each = loss(policy, ref).double().expand(len(policy))
        return each.detach(), each

    return losses


def examine_term(peer: str, version: str, term: PeerTerm) -> PeerTermResult:
    """Enumerate a term on bandits with log-ratios below 2 nats, and on bandits with log-ratios of up to ten nats."""
    near, far = _worlds(term.vocabulary, NEAR), _worlds(term.vocabulary, None)
    try:
        gradients = [_gradient(term.losses, world, ON) for world in near]
        path, line = _source_of(term.function)
        return PeerTermResult(
            peer=peer,
            version=version,
            name=term.name,
            options=term.options,
            default=term.default,
            file=path,
            line=line,
            value=_named([_mean(term.losses, world) for world in near], [_values(world) for world in near]),
            gradient=_named(gradients, [_gradients(world) for world in near]),
            far=_named([_gradient(term.losses, world, ON) for world in far], [_gradients(world) for world in far]),
            off_policy=_named(
                [_gradient(term.losses, world, OFF) for world in near], [_gradients(world) for world in near]
            ),
            cosine_policy_ref=_cosine(gradients, near, POLICY_REF),
            cosine_ref_policy=_cosine(gradients, near, REF_POLICY),
        )
    except (AttributeError, TypeError, KeyError, AssertionError, ImportError, ValueError, RuntimeError) as error:
        raise KeelError(
            f"{peer} {version}: its {term.name} cannot be called as in the versions that Keel supports "
            f"({type(error).__name__}: {next(iter(str(error).splitlines()), '')}); docs/peer-formulas.md names these"
        ) from error


def _worlds(vocabulary: int, limit: float | None) -> list[Bandit]:
    """Four bandits; with a limit, reference and sampler have log-ratios to the policy of at most that size."""
    generator = torch.Generator().manual_seed(vocabulary)
    worlds = []
    for _ in range(4):
        policy, ref, sampler = (torch.randn(vocabulary, generator=generator, dtype=torch.float64) for _ in range(3))
        if limit is None:
            worlds.append(Bandit(2.5 * policy, 2.5 * ref, 2.5 * sampler))
        else:  # logits that differ by half the limit give log-probabilities that differ by less than the limit
            worlds.append(Bandit(policy, policy + limit / 2 * ref.tanh(), policy + limit / 2 * sampler.tanh()))
    return worlds


def _mean(losses: Losses, world: Bandit) -> Tensor:
    with torch.no_grad():
        value, _ = losses(world.policy, world.reference, world.policy)
    return (world.policy.softmax(0) * value).sum().reshape(1)


def _gradient(losses: Losses, world: Bandit, sampling: str) -> Tensor:
    """The expected gradient Σ_y w(y) ∇loss(y), with tokens sampled from the policy or from an older one."""
    theta = world.policy.clone().requires_grad_()
    sampler = world.policy if sampling == ON else world.sampler
    _, loss = losses(theta, world.reference, sampler)
    total = (sampler.softmax(0) * loss).sum()
    gradient = torch.autograd.grad(total, theta, allow_unused=True)[0] if total.requires_grad else None
    return torch.zeros_like(theta) if gradient is None else gradient


def _divergences(world: Bandit, theta: Tensor) -> dict[str, Tensor]:
    policy, ref = theta.log_softmax(0), world.reference.log_softmax(0)
    mixture = torch.logsumexp(torch.stack([policy, ref]), 0) - torch.tensor(2.0, dtype=policy.dtype).log()
    return {
        POLICY_REF: exact_kl(policy[None], ref[None]).sum(),
        REF_POLICY: exact_kl(policy[None], ref[None], "ref_policy").sum(),
        JSD: (policy.exp() * (policy - mixture) + ref.exp() * (ref - mixture)).sum() / 2,
    }


def _values(world: Bandit) -> dict[str, Tensor]:
    return {name: value.reshape(1) for name, value in _divergences(world, world.policy).items()}


def _gradients(world: Bandit) -> dict[str, Tensor]:
    theta = world.policy.clone().requires_grad_()
    found = {
        name: torch.autograd.grad(value, theta, retain_graph=True)[0]
        for name, value in _divergences(world, theta).items()
    }
    return {
        **found,
        DIFFERENCE: found[POLICY_REF] - found[REF_POLICY],
        "total-variation": world.kl_gradients["total-variation"],
        "away": world.kl_gradients["away"],
    }


def _named(measured: list[Tensor], targets: list[dict[str, Tensor]]) -> str:
    """The quantity that all measurements equal, or `none`."""
    sizes = [x.norm() / t[POLICY_REF].norm() for x, t in zip(measured, targets, strict=True)]
    if max(sizes) < EQUAL:
        return "zero"
    for name in targets[0]:
        if all(relative_error(x, t[name]) < EQUAL for x, t in zip(measured, targets, strict=True)):
            return name
    return "none"


def _cosine(gradients: list[Tensor], worlds: list[Bandit], target: str) -> float:
    exact = [_gradients(world)[target] for world in worlds]
    return float(min(torch.cosine_similarity(x, y, 0) for x, y in zip(gradients, exact, strict=True)))


def _source_of(function: Callable[..., Any]) -> tuple[str, int]:
    """The source file, relative to site-packages, and the line."""
    function = inspect.unwrap(function)
    path = Path(inspect.getsourcefile(function) or "")
    parts = path.parts
    below = parts.index("site-packages") + 1 if "site-packages" in parts else max(0, len(parts) - 3)
    return "/".join(parts[below:]), inspect.getsourcelines(function)[1]
