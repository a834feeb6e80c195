"""What docs/simplex.js draws for three-token policies, by `keel verify`: gradients, optima and descents."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from keel.base.errors import KeelError
from keel.kl import exact_kl
from keel.kl.facts import MEANINGS, PLACEMENTS, check_pairing, find_fact
from keel.verify.gradients import measured_gradient
from keel.verify.optimum import optimal_policy
from keel.verify.oracle import OFF, ON, Bandit, gradient_in_reward

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
    policies = torch.tensor(lattice(), dtype=torch.float64).T
    fields: list[dict[str, Any]] = []
    pairings: dict[str, dict[str, Any]] = {}
    for estimator in ESTIMATORS:
        for placement in PLACEMENTS:
            for form in FORMS if placement == "loss" else ("auto",):
                for sampling in (ON, OFF):
                    pairing = _pairing(estimator, placement, form, sampling)
                    gradient = _flat(_kl_gradient(pairing["fact"], policies))
                    known = next((n for n, field in enumerate(fields) if field["gradient"] == gradient), len(fields))
                    if known == len(fields):
                        fields.append({"gradient": gradient, "paths": _descents(pairing["fact"])})
                    key = "|".join((estimator, placement, form, sampling))
                    pairings[key] = {"field": known, "means": pairing["means"], "refused": pairing["refused"]}
    reference = torch.tensor(REFERENCE, dtype=torch.float64).log()
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    best = [optimal_policy(reference, rewards, beta).exp() if beta else rewards for beta in BETAS]
    return {
        "reference": REFERENCE,
        "sampler": SAMPLER,
        "rewards": REWARDS,
        "betas": BETAS,
        "estimators": ESTIMATORS,
        "side": SIDE,
        "policies": _flat(policies),
        "kl": _rounded(exact_kl(policies.T.log(), reference.expand_as(policies.T))),
        "reward": _flat(_reward_gradient(policies)),
        "optimum": [_rounded(policy) for policy in best],
        "fields": fields,
        "pairings": pairings,
    }


def lattice() -> list[tuple[float, float, float]]:
    """The policies of the lattice, row by row; all inside the simplex."""
    return [(i / SIDE, j / SIDE, (SIDE - i - j) / SIDE) for i in range(1, SIDE - 1) for j in range(1, SIDE - i)]


def _pairing(estimator: str, placement: str, form: str, sampling: str) -> dict[str, Any]:
    """The row of the facts, its meaning in words, and whether a configuration with it is refused."""
    options: dict[str, Any] = {"off_policy": sampling == OFF}
    gradient = form if placement == "loss" else "auto"
    resolved = check_pairing(estimator, placement, gradient, allow_biased=True, **options)
    key = str(resolved.form) if placement == "loss" else "score"
    fact = find_fact(estimator, placement, sampling, key)
    assert fact is not None
    try:
        check_pairing(estimator, placement, gradient, **options)
    except KeelError:
        return {"fact": fact, "means": MEANINGS[fact.expected_gradient], "refused": True}
    return {"fact": fact, "means": MEANINGS[fact.expected_gradient], "refused": False}


def _bandit(policies: Tensor) -> Bandit:
    """Policies `[3, N]` with the same reference and sampler."""
    columns = (
        torch.tensor(p, dtype=torch.float64).log().unsqueeze(-1).expand_as(policies) for p in (REFERENCE, SAMPLER)
    )
    return Bandit(policies.log(), *columns)


def _kl_gradient(fact: Any, policies: Tensor) -> Tensor:
    return measured_gradient(fact, _bandit(policies))


def _reward_gradient(policies: Tensor) -> Tensor:
    """∇(−E[R]), whose sampling does not matter: the ratio weighs the samples."""
    rewards = torch.tensor(REWARDS, dtype=torch.float64)[:, None, None]
    return gradient_in_reward(lambda logp, ref, old: (-rewards).expand_as(logp), _bandit(policies))


def _descents(fact: Any) -> list[Flat]:
    """For every β the policies that descent on −E[R] + β·KL term visits, from the reference on."""
    betas = torch.tensor(BETAS, dtype=torch.float64)
    logits = torch.tensor(REFERENCE, dtype=torch.float64).log().unsqueeze(-1).repeat(1, len(BETAS))
    visited = [logits.softmax(0)]
    for step in range(STEPS):  # steps grow shorter, so that descent comes to rest where a gradient changes its sign
        gradient = _reward_gradient(visited[-1]) + betas * _kl_gradient(fact, visited[-1])
        longest = LONGEST * (1 - step / STEPS)
        logits = logits - gradient * torch.minimum(longest / gradient.norm(dim=0), 3 / (1 + betas))
        visited.append(logits.softmax(0))
    return [_flat(torch.stack(_spread([policies[:, n] for policies in visited]), -1)) for n in range(len(BETAS))]


def _spread(path: Sequence[Tensor]) -> list[Tensor]:
    """Some points of a path, about as far apart, and its end."""
    lengths = [0.0]
    for before, after in pairwise(path):
        lengths.append(lengths[-1] + (after - before).norm().item())
    wanted = [lengths[-1] * k / (SHOWN - 1) for k in range(SHOWN - 1)]
    chosen = [next(n for n, length in enumerate(lengths) if length >= at) for at in wanted]
    return [path[n] for n in dict.fromkeys(chosen)] + [path[-1]]


def _flat(columns: Tensor) -> Flat:
    """The first two of three numbers a column, in a row."""
    return _rounded(columns[:2].T.flatten())


def _rounded(values: Tensor) -> Flat:
    return [float(f"{value:.3g}") if abs(value) > 1e-6 else 0.0 for value in values.tolist()]
