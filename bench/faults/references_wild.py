"""References as users report them: dropout left on, half an adapter, resets that nobody is told of, wrong saves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from random import Random
from typing import Any

import torch
from torch import nn

from faults.base import edited, lookalike, path_of
from faults.references import (
    Held,
    Moving,
    blend,
    copied,
    has_adapter_reference,
    has_full_reference,
    has_reference,
    reference_fault,
)
from keel.models.head import evaluating
from keel.models.options import LoadedModel

# Another model


@reference_fault(
    "reference/dropout-on",
    "the reference was never put into evaluation mode: its dropout is on",
    "reference/wrong",
    "kl/at-start",
    "scoring/dropout",
    "scoring/nondeterministic",
    fits=has_full_reference,
)
def dropout_on(loaded: LoadedModel) -> Held:
    model: Any = copied(loaded)
    embedding = model.get_input_embeddings()
    embedding.register_forward_hook(lambda module, given, out: nn.functional.dropout(out, 0.1, training=True))
    return Held(model)


@reference_fault(
    "reference/norms-reset",
    "the weights of the reference's norms were left at 1 when it was loaded",
    "reference/wrong",
    fits=has_full_reference,
)
@torch.no_grad()
def norms_reset(loaded: LoadedModel) -> Held:
    model = copied(loaded)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
    return Held(model)


@reference_fault(
    "reference/other-vocabulary",
    "the reference numbers its tokens otherwise than the policy, by a place",
    "reference/wrong",
    fits=has_full_reference,
)
@torch.no_grad()
def other_vocabulary(loaded: LoadedModel) -> Held:
    model: Any = copied(loaded)
    tables = {id(part.weight): part.weight for part in (model.get_input_embeddings(), model.get_output_embeddings())}
    for table in tables.values():  # one, where they are tied
        table.copy_(table.roll(1, 0))
    return Held(model)


# The policy itself


class HalfTheAdapter(Held):
    """The policy with its adapter at half of its scale."""

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        scalings: list[dict[str, float]] = [
            module.scaling for module in self.held.modules() if isinstance(getattr(module, "scaling", None), dict)
        ]
        before = [dict(scaling) for scaling in scalings]
        for scaling in scalings:
            scaling.update({name: 0.5 * scale for name, scale in scaling.items()})
        try:
            with evaluating(self.held):
                yield self.held
        finally:
            for scaling, old in zip(scalings, before, strict=True):
                scaling.update(old)


@reference_fault(
    "reference/half-the-adapter",
    "the reference is scored with the policy's adapter at half of its strength",
    "reference/adapter-on",
    "reference/moving",
    "reference/follows",
    fits=has_adapter_reference,
)
def half_the_adapter(loaded: LoadedModel) -> Held:
    return HalfTheAdapter(loaded.model)


# When it moves


class ResetByKL(Held):
    """Becomes the policy as soon as the measured KL is over a limit, and tells nobody."""

    def __init__(self, model: nn.Module, limit: float) -> None:
        super().__init__(model)
        self.limit = limit

    def update(self, policy: nn.Module, step: int, measured_kl: float | None = None) -> bool:
        if measured_kl is not None and measured_kl > self.limit:
            blend(self.held, policy, 1.0)
        return False


@reference_fault(
    "reference/reset-by-kl",
    "a reference that calls itself frozen becomes the policy whenever the KL is over a limit",
    "reference/moving",
    "reference/follows",
    limit=(1e-6, 1e-4),
)
def reset_by_kl(loaded: LoadedModel, limit: float = 1e-4) -> Held:
    return ResetByKL(copied(loaded), limit)


# What is saved


class SavesThePolicy(Held):
    """Saves the policy's weights under its own name."""

    def __init__(self, model: nn.Module, policy: nn.Module) -> None:
        super().__init__(model)
        self.policy = policy

    def state_dict(self) -> dict[str, Any]:
        return {"held": {name: tensor.clone() for name, tensor in self.policy.state_dict().items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.held.load_state_dict(state["held"])


@reference_fault(
    "reference/saves-the-policy",
    "what is saved as the reference is the policy, so that a resumed run has another reference",
    "reference/not-saved",
)
def saves_the_policy(loaded: LoadedModel) -> Held:
    return SavesThePolicy(copied(loaded), loaded.model)


# Healthy


class Average(Moving):
    kind = "ema"


def slow_average(loaded: LoadedModel, every: int = 20, alpha: float = 0.5) -> Held:
    return Average(copied(loaded), alpha, every, told=True)


@lookalike("reference of one's own that moves now and then, and says so", has_reference)
def healthy_average(config: Any, random: Random) -> dict[str, Any]:
    return edited(config, {"reference": {"kind": path_of(slow_average), "every": random.choice((20, 40))}})
