"""Weights that nobody has trained, in a model whose other weights are trained."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, median, pstdev
from typing import Any

import torch
from torch import Tensor, nn

from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.gold_likelihood import answer_logp, golds, read_golds
from keel.models.head import causal_lm

_ERRORS = 4.0  # standard errors within which a statistic is that of an initialisation
_REDRAWS = 6
_LEAD = 3.0  # standard deviations by which trained weights beat random ones
_TRAINED = 0.2  # |ln(std / initial std)| of a typical trained matrix
_FEWEST = 3  # weights
_ONES = 1e-6  # chance of a norm that training leaves at exactly 1 while it moves others: every update moves all of it


@dataclass(frozen=True)
class Untrained:
    """A weight with the statistics of an initialisation: its name, and the chance of that for a trained one."""

    name: str
    chance: float
    std: float = 0.0  # of a matrix


def untrained_weights(setup: KeelSubject, level: float) -> tuple[list[str], float]:
    """Names, and the chance that trained weights look so; none where that is above `level` or few others are trained.

    A trained matrix has the standard deviation of its initialisation only by chance (uniform in its logarithm over a
    factor of e²), corrected for the choice among all weights. An experiment confirms it: random numbers in its place
    must serve as well for gold answers.
    """
    model = causal_lm(setup.policy.model)
    matrices = {name: p for name, p in model.named_parameters() if p.dim() == 2 and ".lora_" not in name}
    sigmas = _initial_stds(model)
    distances = {name: _distance(p.detach().float(), sigmas) for name, p in matrices.items()}
    suspects = [Untrained(name, chance, std) for name, (_, chance, std) in distances.items() if chance < 1.0]
    if len(suspects) < _FEWEST or len(suspects) > len(matrices) / 2 or not golds(setup):
        return [], 1.0
    others = [distance for name, (distance, chance, _) in distances.items() if chance == 1.0]
    if median(others) < _TRAINED:
        return [], 1.0
    confirmed = [suspect for suspect in suspects if _serves_as_well(setup, matrices[suspect.name], suspect.std)]
    if len(confirmed) < _FEWEST:
        return [], 1.0
    norms = _untouched_norms(model, {suspect.name for suspect in confirmed})
    total = len(matrices) + len(norms)
    count = len(confirmed) + len(norms)
    choices = math.lgamma(total + 1) - math.lgamma(count + 1) - math.lgamma(total - count + 1)
    chance = math.exp(sum(math.log(u.chance) for u in (*confirmed, *norms)) + choices)
    return ([u.name for u in (*confirmed, *norms)], chance) if chance < level else ([], 1.0)


def _initial_stds(model: nn.Module) -> list[float]:
    """Standard deviations that initialisations give: the config's, and the same scaled down by depth."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    std = float(getattr(config, "initializer_range", None) or 0.02)
    layers = getattr(config, "num_hidden_layers", None) or 1
    return [std, std / math.sqrt(2 * layers)]


def _distance(weight: Tensor, sigmas: list[float]) -> tuple[float, float, float]:
    """How far its standard deviation is from an initial one; chance and std where all statistics agree, else 1."""
    n, std = weight.numel(), float(weight.std())
    candidates = [*sigmas, 1 / math.sqrt(3 * weight.shape[1])]  # the last: torch's own, uniform
    if std == 0.0:
        return math.inf, 1.0, 0.0
    sigma = min(candidates, key=lambda sigma: abs(math.log(std / sigma)))
    distance, error = abs(math.log(std / sigma)), 1 / math.sqrt(2 * n)
    centred = (weight - weight.mean()) / std
    tails, expected = float(centred.pow(4).mean()), 3.0 if sigma != candidates[-1] else 1.8
    fits = (
        distance < _ERRORS * error
        and abs(float(weight.mean())) < _ERRORS * std / math.sqrt(n)
        and abs(tails - expected) < _ERRORS * math.sqrt(24 / n)
    )
    return distance, min(1.0, len(candidates) * 2 * _ERRORS * error / 2) if fits else 1.0, sigma


@torch.no_grad()
def _serves_as_well(setup: KeelSubject, weight: nn.Parameter, std: float) -> bool:
    """Whether gold answers are no likelier with this weight than with random numbers of its size in its place."""
    own, original = fmean(read_golds(setup).logp), weight.detach().clone()
    generator, scores = torch.Generator().manual_seed(0), []
    try:
        for _ in range(_REDRAWS):
            weight.copy_((std * torch.randn(weight.shape, generator=generator)).to(weight))
            scores.append(fmean(answer_logp(setup, golds(setup))))
    finally:
        weight.copy_(original)
    return own <= fmean(scores) + _LEAD * pstdev(scores)


def _untouched_norms(model: nn.Module, matrices: set[str]) -> list[Untrained]:
    """Norms at exactly 1 beside untrained matrices, where other norms have moved."""
    norms = {name: p for name, p in model.named_parameters() if p.dim() == 1 and "norm" in name.lower()}
    ones = [name for name, p in norms.items() if name.endswith("weight") and bool((p == 1).all())]
    blocks = {name.split(".mlp.")[0].split(".self_attn.")[0].rpartition(".layers.")[2] for name in matrices}
    beside = [
        name for name in ones if name.rpartition(".layers.")[2].split(".")[0] in {b.split(".")[0] for b in blocks}
    ]
    return [Untrained(name, _ONES) for name in beside] if len(ones) < len(norms) else []
