"""Visited states: the full next-token distributions of a model at the batch's action tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from keel.doctor.keel_subject import KeelSubject
from keel.kl import exact_kl
from keel.models.head import evaluating, head_of
from keel.models.logprobs import hidden_states

MAX_STATES = 128
MAX_ELEMENTS = 1 << 24  # limit of states × vocabulary in memory


def chosen_states(setup: KeelSubject) -> Tensor:
    """Indices of the states to use, evenly spaced over the batch's action tokens."""
    total = int(setup.mask.sum())
    count = max(1, min(total, MAX_STATES, MAX_ELEMENTS // setup.vocabulary))
    return torch.linspace(0, total - 1, count).round().long().unique()


@torch.no_grad()
def state_logits(setup: KeelSubject, model: nn.Module, *, temperature: float | None = None) -> Tensor:
    """`[N, V]` logits in fp32 and evaluation mode, by default at the sampling temperature.

    The N states are the same for every model.
    """
    parts = []
    with evaluating(model), setup.run.autocast():
        head = head_of(model)
        for micro in setup.batch.micros:
            packed = micro.packed
            acted = packed.action_mask[packed.completion_mask]
            parts.append(hidden_states(model, packed)[acted])
        hidden = torch.cat(parts)
        return head(hidden[chosen_states(setup).to(hidden.device)]).float() / (
            setup.temperature if temperature is None else temperature
        )


def policy_states(setup: KeelSubject) -> Tensor:
    """The policy's logits at the visited states, with its current weights."""
    return state_logits(setup, setup.policy.model)


def reference_states(setup: KeelSubject) -> Tensor:
    """The reference's logits at the same states."""
    assert setup.run.reference is not None
    with setup.run.reference.model() as model:
        return state_logits(setup, model)


def mean_kl(first: Tensor, second: Tensor) -> float:
    """KL(first‖second) in nats per token from logits `[N, V]`: exact over the vocabulary, mean over states."""
    return exact_kl(first.double().log_softmax(-1), second.double().log_softmax(-1)).mean().item()
