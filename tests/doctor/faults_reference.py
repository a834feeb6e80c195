"""Faults of reference, KL term, advantages and updates, each through a public extension point of the configuration."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from keel.base.types import Problem, Reward
from keel.models.head import evaluating
from keel.models.options import LoadedModel
from keel.models.scorer import ScoreRows


class Held:
    """A reference of one's own in the shape that `reference.kind: module:attr` asks for."""

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
        return "always the same"


def _copy(loaded: LoadedModel) -> nn.Module:
    return copy.deepcopy(loaded.model).requires_grad_(False)


@torch.no_grad()
def _noisy(model: nn.Module, size: float) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator) * size * parameter.std())
    return model


def right_reference(loaded: LoadedModel) -> Held:
    """A sound reference of one's own: a copy that never moves."""
    return Held(_copy(loaded))


def other_checkpoint(loaded: LoadedModel) -> Held:
    """The weights of another training run."""
    return Held(_noisy(_copy(loaded), 0.3))


def nearly_the_checkpoint(loaded: LoadedModel) -> Held:
    """A checkpoint of a few steps later: its KL at the start is too small to be seen, its weights are not."""
    return Held(_noisy(_copy(loaded), 1e-4))


class Off(Held):
    """The base with the adapter switched off."""

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        held: Any = self.held
        flags = [(parameter, parameter.requires_grad) for parameter in held.parameters()]
        with evaluating(held), held.disable_adapter():
            yield held
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def adapter_switched_off(loaded: LoadedModel) -> Held:
    """Right for a fresh adapter; of one with a past it is not where the policy started."""
    return Off(loaded.model)


def left_on_another_device(loaded: LoadedModel) -> Held:
    return Held(_copy(loaded).to("meta"))


def shared_weights(loaded: LoadedModel) -> Held:
    """Full weights: the very tensors of the policy."""
    return Held(loaded.model)


class Follows(Held):
    """Blends the policy in at every call of `update` and does not say so."""

    rate, every = 0.5, 1

    def update(self, policy: nn.Module, step: int, measured_kl: float | None = None) -> bool:
        if step % self.every == 0:
            blend(self.held, policy, self.rate)
        return False


@torch.no_grad()
def blend(held: nn.Module, policy: nn.Module, rate: float) -> None:
    for mine, theirs in zip(held.parameters(), policy.parameters(), strict=True):
        mine.lerp_(theirs, rate)


def silently_moving(loaded: LoadedModel) -> Held:
    return Follows(_copy(loaded))


class Trains(Held):
    """Scored in training mode, with dropout."""

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        self.held.train()
        with torch.no_grad():
            yield self.held


def dropout_in_the_reference(loaded: LoadedModel) -> Held:
    model: Any = _copy(loaded)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.3
    return Trains(model)


def dropout_model() -> tuple[Any, Any]:
    """A loader whose model has dropout in its attention, as GPT-2's config asks for."""
    from doctor.schooled import schooled_model

    model, tokenizer = schooled_model()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.3
    return model, tokenizer


def sums_in_one_pass(model: Any, rows: ScoreRows, *, temperature: float) -> Tensor:
    """A scorer: the completion's mean with gradient (the policy's pass), its sum without (the reference's)."""
    logits = model(rows.tokens, attention_mask=rows.attention_mask, position_ids=rows.position_ids).logits
    logp = (logits[:, :-1].float() / temperature).log_softmax(-1)
    each = rows.completion(logp.gather(-1, rows.tokens[:, 1:, None]).squeeze(-1))
    total = each.sum(-1, keepdim=True).expand_as(each)
    return total / rows.completion_mask.sum(-1, keepdim=True) if torch.is_grad_enabled() else total


# -- estimators, as functions of d = log p − log π -----------------------------------------------------------------


def reversed_k3(d: Tensor) -> Tensor:
    """exp(u) − 1 − u with u = log π − log p: right for samples from the reference only."""
    return torch.expm1(-d) + d


def doubled_k2(d: Tensor) -> Tensor:
    """k2 without its half."""
    return d.square()


# -- rewards ------------------------------------------------------------------------------------------------------


def hardly_differing(problem: Problem, text: str) -> Reward:
    """Thousandths around one value, the most for the right answer."""
    return Reward(0.5 + 1e-3 * (7 if text.strip() == str(problem.answer) else sum(map(ord, text)) % 7))
