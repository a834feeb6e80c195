"""References of one's own (`reference.kind`) that are another model, move, follow, or are not what is saved."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from faults.base import edited, is_float32, lookalike, operator, option, path_of
from faults.engines import layer_of
from keel.models.fingerprint import fingerprint
from keel.models.head import evaluating
from keel.models.options import LoadedModel

Config = Mapping[str, Any]


def has_reference(config: Config) -> bool:
    """Whether a penalty holds the policy to a reference that a frozen copy may stand in for."""
    return option(config, "kl.beta", 0) > 0 and option(config, "reference.kind", "auto") in (
        "auto",
        "frozen",
        "adapter_off",
    )


def has_full_reference(config: Config) -> bool:
    return has_reference(config) and option(config, "model.lora") is None


def has_adapter_reference(config: Config) -> bool:
    return has_reference(config) and option(config, "model.lora") is not None


def reference_fault(
    name: str,
    breaks: str,
    *codes: str,
    fits: Callable[[Any], bool] = has_reference,
    **parameters: Sequence[Any],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a factory of references as an operator; its parameters are drawn from those given here."""

    def register(factory: Callable[..., Any]) -> Callable[..., Any]:
        def apply(config: Config, random: Random) -> dict[str, Any]:
            drawn = {parameter: random.choice(values) for parameter, values in parameters.items()}
            return edited(config, {"reference": {"kind": path_of(factory), **drawn}})

        operator(name, breaks, *codes, fits=fits)(apply)
        return factory

    return register


class Held:
    """A copy of the policy that stays as it is."""

    kind = "frozen"
    reset_optimizer = False

    def __init__(self, model: nn.Module) -> None:
        self.held = model

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        with evaluating(self.held):
            yield self.held

    def update(self, policy: nn.Module, step: int, measured_kl: float | None = None) -> bool:
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.held.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.held.load_state_dict(state["held"])

    def fingerprint(self) -> str:
        return fingerprint(self.held)


def copied(loaded: LoadedModel) -> nn.Module:
    return copy.deepcopy(loaded.model).requires_grad_(False)


@torch.no_grad()
def blend(held: nn.Module, policy: nn.Module, rate: float) -> None:
    for mine, theirs in zip(held.parameters(), policy.parameters(), strict=True):
        mine.lerp_(theirs, rate)


# Another model


@reference_fault(
    "reference/other-checkpoint",
    "the reference is the checkpoint of another run",
    "reference/wrong",
    size=(0.1, 0.3, 1.0),
)
@torch.no_grad()
def other_checkpoint(loaded: LoadedModel, size: float = 0.3) -> Held:
    model, generator = copied(loaded), torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter)
        parameter.add_(noise * size * parameter.std().nan_to_num())
    return Held(model)


@reference_fault(
    "reference/a-step-ahead",
    "the reference is a checkpoint of a few steps later: its weights differ and its KL hardly does",
    "reference/wrong",
    fits=lambda config: has_reference(config) and is_float32(config),
    size=(1e-3, 1e-2),
)
def a_step_ahead(loaded: LoadedModel, size: float = 1e-3) -> Held:
    return other_checkpoint(loaded, size)


@reference_fault("reference/random-weights", "the reference's weights are random", "reference/wrong")
@torch.no_grad()
def random_weights(loaded: LoadedModel) -> Held:
    model, generator = copied(loaded), torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return Held(model)


@reference_fault(
    "reference/layer-missing",
    "a part of the reference's first layer is zero, as where a checkpoint lacks its weights",
    "reference/wrong",
    fits=has_full_reference,
    part=("attn", "mlp"),
)
@torch.no_grad()
def layer_missing(loaded: LoadedModel, part: str = "mlp") -> Held:
    model = copied(loaded)
    for name, parameter in model.named_parameters():
        if layer_of(name) == 0 and part in name and parameter.ndim > 1:
            parameter.zero_()
    return Held(model)


@reference_fault(
    "reference/rounded",
    "the reference is held in a few bits",
    "reference/wrong",
    "kl/at-start",
    bits=(3, 4, 5),
)
@torch.no_grad()
def rounded(loaded: LoadedModel, bits: int = 4) -> Held:
    model = copied(loaded)
    for parameter in model.parameters():
        step = parameter.abs().amax() / (2 ** (bits - 1) - 1)
        if parameter.ndim > 1 and step > 0:
            parameter.copy_((parameter / step).round() * step)
    return Held(model)


class ScaledHead(nn.Module):
    """An output head at another temperature."""

    def __init__(self, inner: nn.Module, factor: float) -> None:
        super().__init__()
        self.weight, self.factor = inner.weight, factor

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.weight) * self.factor  # type: ignore[arg-type]


@reference_fault(
    "reference/other-temperature",
    "the reference's logits are taken at another temperature than the policy's",
    "reference/wrong",
    fits=has_full_reference,
    factor=(0.5, 1.5, 2.0),
)
def other_temperature(loaded: LoadedModel, factor: float = 2.0) -> Held:
    model: Any = copied(loaded)
    model.set_output_embeddings(ScaledHead(model.get_output_embeddings(), factor))
    return Held(model)


# The policy itself


@reference_fault(
    "reference/adapter-on",
    "the reference is the policy with its adapter still on",
    "reference/adapter-on",
    fits=has_adapter_reference,
)
def adapter_on(loaded: LoadedModel) -> Held:
    return Held(loaded.model)


@reference_fault(
    "reference/shared-weights",
    "the reference holds the very tensors that are trained",
    "reference/moving",
    "reference/follows",
    fits=has_full_reference,
)
def shared_weights(loaded: LoadedModel) -> Held:
    return Held(loaded.model)


@reference_fault(
    "reference/shared-embeddings",
    "the reference shares embeddings and head with the policy and moves with them",
    "reference/moving",
    fits=has_full_reference,
)
def shared_embeddings(loaded: LoadedModel) -> Held:
    model: Any = copied(loaded)
    policy: Any = loaded.model
    model.set_input_embeddings(policy.get_input_embeddings())
    model.set_output_embeddings(policy.get_output_embeddings())
    return Held(model)


# When it moves


class Moving(Held):
    """Blends the policy in after every `every` steps; `told` says whether it reports that."""

    def __init__(self, model: nn.Module, rate: float, every: int = 1, told: bool = False) -> None:
        super().__init__(model)
        self.rate, self.every, self.told = rate, every, told

    def update(self, policy: nn.Module, step: int, measured_kl: float | None = None) -> bool:
        if step % self.every:
            return False
        blend(self.held, policy, self.rate)
        return self.told


@reference_fault(
    "reference/silently-moving",
    "a reference that calls itself frozen takes part of the policy over after its steps",
    "reference/moving",
    rate=(0.01, 0.1, 0.5),
)
def silently_moving(loaded: LoadedModel, rate: float = 0.1) -> Held:
    return Moving(copied(loaded), rate)


@reference_fault(
    "reference/rarely-moving",
    "a reference that calls itself frozen becomes the policy every few steps",
    "reference/moving",
    "reference/follows",
    every=(2, 5, 10),
)
def rarely_moving(loaded: LoadedModel, every: int = 5) -> Held:
    return Moving(copied(loaded), 1.0, every)


class FollowsAtOnce(Moving):
    kind = "snapshot"


@reference_fault(
    "reference/follows-at-once",
    "a snapshot is taken after every step, so that the KL is that of one update",
    "reference/follows",
    rate=(0.97, 1.0),
)
def follows_at_once(loaded: LoadedModel, rate: float = 1.0, every: int = 1) -> Held:
    return FollowsAtOnce(copied(loaded), rate, every, told=True)


class MovesWhenScored(Held):
    """Blends the policy in whenever it is scored with."""

    def __init__(self, model: nn.Module, policy: nn.Module, rate: float) -> None:
        super().__init__(model)
        self.policy, self.rate = policy, rate

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        blend(self.held, self.policy, self.rate)
        with evaluating(self.held):
            yield self.held


@reference_fault(
    "reference/moves-when-scored",
    "the reference takes part of the policy over whenever it is scored",
    "reference/moving",
    rate=(0.05, 0.2),
)
def moves_when_scored(loaded: LoadedModel, rate: float = 0.1) -> Held:
    return MovesWhenScored(copied(loaded), loaded.model, rate)


class NeverMoves(Held):
    kind = "ema"


@reference_fault(
    "reference/never-moves",
    "a reference that calls itself an average of the policy never moves",
    "reference/moving",
)
def never_moves(loaded: LoadedModel, every: int = 1, alpha: float = 0.5) -> Held:
    return NeverMoves(copied(loaded))


# What is saved


class Forgetful(Held):
    """Saves nothing of itself."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


@reference_fault(
    "reference/not-saved",
    "the reference is built from the policy again after a resume",
    "reference/not-saved",
)
def not_saved(loaded: LoadedModel) -> Held:
    return Forgetful(copied(loaded))


class HalfSaved(Held):
    """Saves its matrices and not the rest."""

    def state_dict(self) -> dict[str, Any]:
        return {"held": {name: tensor for name, tensor in self.held.state_dict().items() if layer_of(name) is not None}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.held.load_state_dict(state["held"], strict=False)


@reference_fault(
    "reference/half-saved",
    "only the layers of the reference are saved, not its embeddings and last norm",
    "reference/not-saved",
    fits=has_full_reference,
)
def half_saved(loaded: LoadedModel) -> Held:
    return HalfSaved(copied(loaded))


# Healthy


@lookalike("reference of one's own", has_reference)
def healthy_reference(config: Config, random: Random) -> dict[str, Any]:
    return edited(config, {"reference": {"kind": "faults.references:right_reference"}})


def right_reference(loaded: LoadedModel) -> Held:
    return Held(copied(loaded))
