"""Exact enumeration: every expectation is a finite sum in float64, exact up to rounding; and the result of a check."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from keel.kl import advantage_penalty, exact_kl, reward_penalty
from keel.kl.exact import Divergence

EXACT = 1e-10  # tolerance of enumeration in float64


@dataclass(frozen=True)
class Check:
    """A statement, its measured and its expected value, and whether they agree."""

    section: str
    fact: str
    measured: str
    expected: str
    ok: bool


def close(measured: float, expected: float, digits: int) -> bool:
    """Whether two numbers are equal to this number of decimal places."""
    return abs(measured - expected) <= 0.5 * 10**-digits + 1e-12


# A KL formula: (logp, ref, old) -> values of the same shape.
Formula = Callable[[Tensor, Tensor, Tensor], Tensor]

# Samples from the policy, from the old policy, or from a policy that is older than the old policy.
ON, OFF, STALE = "on", "off", "stale"


@dataclass(frozen=True)
class Bandit:
    """A one-step problem: three categorical distributions over the same outcomes, given by float64 logits `[V]`.

    Logits `[V, N]` are N problems at once.
    """

    policy: Tensor
    reference: Tensor
    sampler: Tensor

    def logp(self) -> tuple[Tensor, Tensor]:
        """The policy's logits as a leaf tensor, and its log-probabilities `[V, 1]`."""
        theta = self.policy.clone().requires_grad_()
        return theta, theta.log_softmax(0).unsqueeze(-1)

    @property
    def ref_logp(self) -> Tensor:
        return self.reference.log_softmax(0).unsqueeze(-1)

    def old_logp(self, sampling: str) -> Tensor:
        """log μ: on-policy the detached policy, off-policy another distribution."""
        return (self.policy if sampling == ON else self.sampler).log_softmax(0).unsqueeze(-1)

    def with_sampler_near(self, distance: float = 1e-7) -> Bandit:
        """The same problem with a sampler almost equal to the policy."""
        return replace(self, sampler=self.policy + distance * (self.sampler - self.policy))

    @cached_property
    def kl_gradients(self) -> dict[str, Tensor]:
        """The gradients of the divergences, from their definitions over the whole vocabulary."""
        ref, sampler = self.ref_logp.T, self.old_logp(OFF).T
        quantities: dict[str, Callable[[Tensor], Tensor]] = {
            "policy||ref": lambda row: exact_kl(row, ref),
            "ref||policy": lambda row: exact_kl(row, ref, "ref_policy"),
            "away": lambda row: -exact_kl(row, sampler, "ref_policy"),
            "total-variation": lambda row: (row.exp() - ref.exp()).abs(),
            "jsd": lambda row: _jensen_shannon(row.exp(), ref.exp()),
            "topk": lambda row: _bucketed(row.exp(), ref.exp()),
        }
        gradients = {}
        for name, quantity in quantities.items():
            theta, logp = self.logp()
            gradients[name] = _gradient(quantity(logp.T).sum(), theta)
        return gradients

    @cached_property
    def kl_values(self) -> dict[str, float]:
        """The values of all divergences that a fact may name."""
        policy, reference = self.old_logp(ON).T, self.ref_logp.T
        return {
            "policy||ref": exact_kl(policy, reference).item(),
            "ref||policy": exact_kl(policy, reference, "ref_policy").item(),
            "jsd": _jensen_shannon(policy.exp(), reference.exp()).item(),
            "topk": _bucketed(policy.exp(), reference.exp()).item(),
        }


JSD_WEIGHT, TOP_K = 0.3, 2  # parameters of `jsd`, and of `topk` and `topk_unbiased`


def _jensen_shannon(policy: Tensor, reference: Tensor) -> Tensor:
    """JSD from its definition, on log-probabilities `[1, V]`."""
    mixture = (1 - JSD_WEIGHT) * policy + JSD_WEIGHT * reference
    parts = ((1 - JSD_WEIGHT, policy), (JSD_WEIGHT, reference))
    return torch.stack([weight * (p * (p / mixture).log()).sum() for weight, p in parts]).sum()


def _bucketed(policy: Tensor, reference: Tensor) -> Tensor:
    """KL over the policy's top k outcomes and one bucket for the rest."""
    order = policy.detach()[0].argsort(descending=True)

    def categories(p: Tensor) -> Tensor:
        return torch.cat((p[0, order[:TOP_K]], p[0, order[TOP_K:]].sum().unsqueeze(0)))

    first, second = categories(policy), categories(reference)
    return (first * (first / second).log()).sum()


def random_bandits(count: int = 8, seed: int = 0) -> list[Bandit]:
    """Random bandits with 4 to 8 outcomes and log-ratios of up to ten nats."""
    generator = torch.Generator().manual_seed(seed)
    bandits = []
    for index in range(count):
        outcomes = 4 + index % 5
        scale = (0.5, 1.0, 2.0, 3.0)[index % 4]
        draw = [torch.randn(outcomes, generator=generator, dtype=torch.float64) * scale for _ in range(3)]
        bandits.append(Bandit(*draw))
    return bandits


def _gradient(total: Tensor, theta: Tensor) -> Tensor:
    """∂total/∂θ; zero if total does not depend on θ, as for a fully detached formula."""
    if not total.requires_grad:
        return torch.zeros_like(theta)
    gradient = torch.autograd.grad(total, theta, allow_unused=True)[0]
    return torch.zeros_like(theta) if gradient is None else gradient


def moments(formula: Formula, bandit: Bandit, sampling: str = ON) -> tuple[float, float, float]:
    """Mean, standard deviation and smallest value of a formula on samples from the policy, or from an older one."""
    logp, old = bandit.old_logp(ON), bandit.old_logp(sampling)
    with torch.no_grad():
        values = formula(logp, bandit.ref_logp, old)
    weights = old.exp()
    mean = (weights * values).sum()
    std = (weights * (values - mean).square()).sum().sqrt()
    return mean.item(), std.item(), values.min().item()


def gradient_in_loss(formula: Formula, bandit: Bandit, sampling: str = ON) -> Tensor:
    """The gradient of E[f] with fixed samples, like autograd of a loss: Σ_y w(y) ∇f(y)."""
    theta, logp = bandit.logp()
    old = bandit.old_logp(sampling)
    return _gradient((old.exp() * formula(logp, bandit.ref_logp, old)).sum(), theta)


def gradient_in_reward(
    formula: Formula, bandit: Bandit, sampling: str = ON, *, placement: str = "reward", ratio: bool = True
) -> Tensor:
    """The expected gradient of a penalty in the reward or the advantage: Σ_y w(y) ρ(y) sg(f(y)) s(y).

    The policy term is −ρ·A, where ρ is 1 on-policy. With `ratio=False` it is the plain −A·log π.
    """
    theta, logp = bandit.logp()
    old = bandit.old_logp(sampling)
    rho = (logp - old).exp().detach() if ratio else torch.ones_like(old)
    penalty = formula(logp, bandit.ref_logp, old)
    mask = torch.ones_like(penalty, dtype=torch.bool)
    if placement == "reward":
        advantage = reward_penalty(penalty, mask, 1.0).unsqueeze(-1)
    else:
        advantage = advantage_penalty(penalty, mask, 1.0)
    return _gradient((old.exp() * rho * -advantage * logp).sum(), theta)


def relative_error(measured: Tensor, target: Tensor) -> float:
    """‖measured − target‖ / ‖target‖."""
    return ((measured - target).norm() / target.norm()).item()


@dataclass(frozen=True)
class SequenceWorld:
    """A tabular policy over sequences: one row of logits per prefix.

    Rows are ordered by prefix length, then by prefix: row 0 is the empty prefix, row 1 + y₀ the prefix of one token y₀.
    """

    policy: Tensor
    reference: Tensor
    sampler: Tensor
    steps: int

    def with_sampler_near(self, distance: float = 1e-7) -> SequenceWorld:
        """The same problem with a sampler almost equal to the policy."""
        return replace(self, sampler=self.policy + distance * (self.sampler - self.policy))

    @property
    def proximal(self) -> Tensor:
        """The old policy for stale samples, between sampler and policy."""
        return 0.3 * self.sampler + 0.7 * self.policy

    @property
    def vocabulary(self) -> int:
        return self.policy.shape[-1]

    def sequences(self) -> Tensor:
        return torch.tensor(list(itertools.product(range(self.vocabulary), repeat=self.steps)))

    def rows(self, sequences: Tensor) -> Tensor:
        """The index `[N, T]` of the row that each position of each sequence uses."""
        offset, index, columns = 0, torch.zeros(len(sequences), dtype=torch.long), []
        for step in range(self.steps):
            columns.append(offset + index)
            offset += self.vocabulary**step
            index = index * self.vocabulary + sequences[:, step]
        return torch.stack(columns, 1)


def sequence_world(
    steps: int = 3, vocabulary: int = 4, seed: int = 1, scale: float = 1.0, sampler_scale: float = 0.5
) -> SequenceWorld:
    """Random tables. The policy's logits are drawn first, then the reference's. The sampler is a perturbed policy."""
    generator = torch.Generator().manual_seed(seed)
    rows = sum(vocabulary**step for step in range(steps))
    draw = [scale * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64) for _ in range(2)]
    noise = torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64)
    return SequenceWorld(draw[0], draw[1], draw[0] + sampler_scale * noise, steps)


# A sequence-level loss: (logp [N, T], ref [N, T], old [N, T] or None, a divergence per token [N, T]) -> [N]
SequenceLoss = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]


@dataclass(frozen=True)
class GradientQuality:
    """Comparison of an estimator's gradient with the true one: relative error, cosine, total variance."""

    relative_error: float
    cosine: float
    variance: float


@dataclass(frozen=True)
class EnumeratedSequences:
    """Every sequence of a tabular policy: its log-probabilities under policy, reference and sampler, and its weight.

    `values` `[N, T]` is the divergence at each token. `rows` is the index of the row that each token is drawn from.
    """

    theta: Tensor
    logp: Tensor
    ref: Tensor
    old: Tensor | None
    values: Tensor
    weights: Tensor
    rows: Tensor
    reference: Tensor

    def divergences(self) -> dict[str, Tensor]:
        """KL_seq in both directions, and the expected sums of other divergences along sequences, by definition."""
        total, ref_total = self.logp.sum(-1), self.ref.sum(-1)
        quantities: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
            "along ref||policy": lambda p, q: (q * (q / p).log()).sum(),
            "along jsd": _jensen_shannon,
            "along topk": _bucketed,
        }
        tables = zip(self.theta.softmax(-1).split(1), self.reference.softmax(-1).split(1), strict=True)
        pairs = list(tables)
        return {
            "policy||ref": (total.exp() * (total - ref_total)).sum(),
            "ref||policy": (ref_total.exp() * (ref_total - total)).sum(),
            **{
                name: (total.exp() * torch.stack([quantity(p, q) for p, q in pairs])[self.rows].sum(-1)).sum()
                for name, quantity in quantities.items()
            },
        }


def enumerate_sequences(
    world: SequenceWorld, sampling: str, divergence: Divergence | None = None
) -> EnumeratedSequences:
    """Enumerate every sequence, with the policy's table as a leaf tensor. `divergence` defaults to the exact KL."""
    theta = world.policy.clone().requires_grad_()
    sequences = world.sequences()
    rows, index = world.rows(sequences), sequences.unsqueeze(-1)

    def token_logp(table: Tensor) -> Tensor:
        return table[rows].gather(-1, index).squeeze(-1)

    policy, reference = theta.log_softmax(-1), world.reference.log_softmax(-1)
    logp = token_logp(policy)
    old = token_logp(world.sampler.log_softmax(-1)) if sampling == OFF else None
    weights = (logp if old is None else old).sum(-1).exp().detach()
    pair = policy[rows], reference[rows]
    values = exact_kl(*pair) if divergence is None else divergence(*pair, sequences)
    return EnumeratedSequences(theta, logp, token_logp(reference), old, values, weights, rows, world.reference)


def sequence_value(
    world: SequenceWorld, loss: SequenceLoss, sampling: str = ON, divergence: Divergence | None = None
) -> tuple[float, dict[str, float]]:
    """The mean of a sequence-level value, and the true divergences."""
    enumerated = enumerate_sequences(world, sampling, divergence)
    mean = (enumerated.weights * loss(enumerated.logp, enumerated.ref, enumerated.old, enumerated.values)).sum().item()
    return mean, {name: value.item() for name, value in enumerated.divergences().items()}


def sequence_gradient(
    world: SequenceWorld, loss: SequenceLoss, sampling: str = ON, divergence: Divergence | None = None
) -> tuple[dict[str, Tensor], Tensor, float]:
    """The true gradients, the estimator's expected gradient, and its total variance, by enumeration."""
    enumerated = enumerate_sequences(world, sampling, divergence)

    def gradient(value: Tensor) -> Tensor:
        return torch.autograd.grad(value, enumerated.theta, retain_graph=True)[0].flatten()

    truths = {name: gradient(value) for name, value in enumerated.divergences().items()}
    values = loss(enumerated.logp, enumerated.ref, enumerated.old, enumerated.values)
    per_sequence = torch.stack([gradient(value) for value in values])
    mean = (enumerated.weights.unsqueeze(-1) * per_sequence).sum(0)
    variance = (enumerated.weights * (per_sequence - mean).square().sum(-1)).sum().item()
    return truths, mean, variance


def sequence_quality(
    world: SequenceWorld, loss: SequenceLoss, sampling: str = ON, divergence: Divergence | None = None
) -> GradientQuality:
    """Relative error, cosine and variance of a sequence-level estimator with respect to ∇KL_seq(policy‖reference)."""
    truths, mean, variance = sequence_gradient(world, loss, sampling, divergence)
    truth = truths["policy||ref"]
    cosine = (mean @ truth / (mean.norm() * truth.norm())).item()
    return GradientQuality(relative_error(mean, truth), cosine, variance)
