"""What docs/simplex.js draws: gradients, optima and descents of policies, by the functions of `keel verify`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from keel.base.errors import KeelError
from keel.kl import exact_kl
from keel.kl.facts import MEANINGS, PLACEMENTS, Fact, check_pairing, find_fact
from keel.verify.gradients import measured_gradient
from keel.verify.oracle import OFF, ON, Bandit, gradient_in_reward
from keel.verify.values import optimal_policy

REFERENCE, SAMPLER, REWARDS = (0.2, 0.5, 0.3), (0.3, 0.25, 0.45), (1.0, 0.0, 0.0)
BETAS = (0.0, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0)
ESTIMATORS = ("k1", "k2", "k3", "abs", "exact")
FORMS = ("auto", "plain", "rho")  # of the gradient in the loss
SIDE = 15  # the lattice has policies of multiples of 1/15
STEPS, LONGEST = 300, 0.2  # steps of a descent, and the longest of them in logits
SHOWN = 24  # points of a descent's path

Flat = list[float]


def simplex_script() -> str:
    """A script that sets `simplexData`; a page that is opened from the disk can load one, but no data."""
    return f"window.simplexData = {json.dumps(simplex_data(), ensure_ascii=False, separators=(',', ':'))}\n"


def simplex_data() -> dict[str, Any]:
    """The lattice's policies with the gradient of the reward, and of every pairing the gradient and the descents.

    Gradients are with respect to the logits: two numbers a policy, because the three add up to zero. Pairings with the
    same gradient share a field.
    """
    policies = lattice()
    gradients: list[Flat] = []
    facts: list[Fact] = []
    pairings: dict[str, dict[str, Any]] = {}
    for choice in choices():
        fact, refused = pairing(*choice)
        gradient = _flat(kl_gradient(fact, policies))
        if gradient not in gradients:
            gradients.append(gradient)
            facts.append(fact)
        means = MEANINGS[fact.expected_gradient]
        pairings["|".join(choice)] = {"field": gradients.index(gradient), "means": means, "refused": refused}
    return {
        "reference": REFERENCE,
        "sampler": SAMPLER,
        "rewards": REWARDS,
        "betas": BETAS,
        "steps": STEPS,
        "estimators": ESTIMATORS,
        "policies": _flat(policies),
        "kl": _rounded(exact_kl(policies.T.log(), _column(REFERENCE).expand_as(policies).T.log())),
        "reward": _flat(reward_gradient(policies)),
        "optimum": [_rounded(optimum(beta)) for beta in BETAS],
        "fields": [{"gradient": g, "paths": paths} for g, paths in zip(gradients, descents(facts), strict=True)],
        "pairings": pairings,
    }


def lattice() -> Tensor:
    """Policies inside the simplex, multiples of 1/SIDE, `[3, N]`."""
    rows = [(i, j, SIDE - i - j) for i in range(1, SIDE - 1) for j in range(1, SIDE - i)]
    return torch.tensor(rows, dtype=torch.float64).T / SIDE


def choices() -> Iterator[tuple[str, str, str, str]]:
    """(estimator, placement, gradient form, sampling) of every choice on the page; forms are for the loss."""
    for estimator, placement, form, sampling in product(ESTIMATORS, PLACEMENTS, FORMS, (ON, OFF)):
        if placement == "loss" or form == "auto":
            yield estimator, placement, form, sampling


def pairing(estimator: str, placement: str, form: str, sampling: str) -> tuple[Fact, bool]:
    """The row of the facts of one token, and whether a configuration with it is refused."""
    check = partial(check_pairing, estimator, placement, form, off_policy=sampling == OFF)
    resolved = check(allow_biased=True).form
    fact = find_fact(estimator, placement, sampling, str(resolved) if placement == "loss" else "score")
    assert fact is not None
    try:
        check()
    except KeelError:
        return fact, True
    return fact, False


def optimum(beta: float) -> Tensor:
    """The policy that maximises E[R] − β·KL(policy‖ref); without a KL term the token that pays."""
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    return optimal_policy(_column(REFERENCE)[:, 0].log(), rewards, beta).exp() if beta else rewards


def kl_gradient(fact: Fact, policies: Tensor) -> Tensor:
    """The expected gradient of a pairing's KL term with respect to the logits, `[3, N]`."""
    return measured_gradient(fact, _bandit(policies))


def reward_gradient(policies: Tensor) -> Tensor:
    """∇(−E[R]). Sampling does not matter to it, because the ratio weighs the samples."""
    return gradient_in_reward(lambda logp, ref, old: -_column(REWARDS)[:, None].expand_as(logp), _bandit(policies))


def descents(facts: Sequence[Fact]) -> list[list[Flat]]:
    """For every row and β the policies that descent on −E[R] + β·KL term visits, from the reference on."""
    betas = torch.tensor(BETAS, dtype=torch.float64).repeat(len(facts))
    logits = _column(REFERENCE).log().repeat(1, len(betas))
    visited = [logits.softmax(0)]
    for step in range(STEPS):  # steps grow shorter, so that descent comes to rest where a gradient changes its sign
        parts = visited[-1].split(len(BETAS), 1)
        terms = torch.cat([kl_gradient(fact, part) for fact, part in zip(facts, parts, strict=True)], 1)
        gradient = reward_gradient(visited[-1]) + betas * terms
        longest = LONGEST * (1 - step / STEPS)
        logits = logits - gradient * torch.minimum(longest / gradient.norm(dim=0), 3 / (1 + betas))
        visited.append(logits.softmax(0))
    paths = [_flat(_spread(torch.stack([policies[:, n] for policies in visited], 1))) for n in range(len(betas))]
    return [paths[n : n + len(BETAS)] for n in range(0, len(paths), len(BETAS))]


def _spread(path: Tensor) -> Tensor:
    """Some points of a path `[3, N]`, about as far apart, and its end."""
    lengths = path.diff(dim=1).norm(dim=0).cumsum(0)
    wanted = torch.linspace(0, float(lengths[-1]), SHOWN, dtype=lengths.dtype)[1:-1]
    chosen = torch.searchsorted(lengths, wanted).unique() + 1
    return torch.cat([path[:, :1], path[:, chosen], path[:, -1:]], 1)


def _column(policy: Sequence[float]) -> Tensor:
    return torch.tensor(policy, dtype=torch.float64).unsqueeze(-1)


def _bandit(policies: Tensor) -> Bandit:
    """Policies `[3, N]` with the same reference and sampler."""
    return Bandit(policies.log(), *(_column(policy).log().expand_as(policies) for policy in (REFERENCE, SAMPLER)))


def _flat(columns: Tensor) -> Flat:
    """The first two of three numbers a column, in a row."""
    return _rounded(columns[:2].T.flatten())


def _rounded(values: Tensor) -> Flat:
    return [float(f"{value:.3g}") if abs(value) > 1e-6 else 0.0 for value in values.tolist()]
