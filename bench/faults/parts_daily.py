"""Scorers and references with the slips of an ordinary day: no logarithm, no sign, a mean, a copy that was not made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from faults.base import edited, lookalike, operator, path_of
from faults.engines import layer_of
from faults.healthy import school_of
from faults.references import Held, copied, has_full_reference, has_reference, reference_fault
from faults.scorers import is_scored_natively, logits_of, picked, right, scorer_fault
from keel.models.head import evaluating
from keel.models.options import LoadedModel
from keel.models.scorer import ScoreRows

Config = Mapping[str, Any]

# Scorers


def entropy_first(model: nn.Module, rows: ScoreRows, *, temperature: float) -> Tensor:
    """The pass returns entropy and log-probabilities, and the first of both is taken."""
    logp = (logits_of(model, rows) / temperature).log_softmax(-1)
    return rows.completion(-(logp.exp() * logp).sum(-1))


def probabilities(model: nn.Module, rows: ScoreRows, *, temperature: float) -> Tensor:
    return picked((logits_of(model, rows) / temperature).softmax(-1), rows)


def not_negated(model: nn.Module, rows: ScoreRows, *, temperature: float) -> Tensor:
    return -right(model, rows, temperature=temperature)


def raw_logits(model: nn.Module, rows: ScoreRows, *, temperature: float) -> Tensor:
    return picked(logits_of(model, rows) / temperature, rows)


def mean_of_all(model: nn.Module, rows: ScoreRows, *, temperature: float) -> Tensor:
    """The loss function averages by default, and its one number goes to every token."""
    logp = right(model, rows, temperature=temperature)
    mean = logp.sum() / rows.completion_mask.sum()
    return torch.where(rows.completion_mask, mean, mean.new_zeros(()))


scorer_fault(
    "scorer/entropy-in-place-of-logp",
    "the pass returns entropy and log-probabilities, in this order, and the first is taken for the second",
    "scoring/mismatch",
    scorers=[entropy_first],
)
scorer_fault(
    "scorer/probabilities",
    "the softmax has no logarithm: training is given probabilities",
    "scoring/mismatch",
    scorers=[probabilities],
)
scorer_fault(
    "scorer/cross-entropy-not-negated",
    "log-probabilities are taken from a cross-entropy, whose sign nobody turns",
    "scoring/mismatch",
    "scoring/gradient",
    "loss/sign",
    scorers=[not_negated],
)
scorer_fault(
    "scorer/raw-logits",
    "the logits of the sampled tokens are taken as they are, without a softmax",
    "scoring/mismatch",
    scorers=[raw_logits],
)
scorer_fault(
    "scorer/mean-of-all-tokens",
    "the loss function averages by default, and every token of the batch gets that one number",
    "scoring/mismatch",
    "scoring/gradient",
    scorers=[mean_of_all],
)


def row_by_row(model: nn.Module, rows: ScoreRows, *, temperature: float) -> Tensor:
    """Scores each row alone, without its padding."""
    logp = []
    for row in range(rows.tokens.shape[0]):
        length = int(rows.attention_mask[row].sum())
        logits = model(input_ids=rows.tokens[row : row + 1, :length]).logits[0, :-1].float()
        taken = (logits / temperature).log_softmax(-1).gather(-1, rows.tokens[row, 1:length, None]).squeeze(-1)
        logp.append(torch.nn.functional.pad(taken, (0, rows.tokens.shape[1] - length)))
    return rows.completion(torch.stack(logp))


@lookalike("scorer of one row at a time, without its padding", is_scored_natively)
def healthy_row_by_row(config: Config, random: Random) -> dict[str, Any]:
    return edited(config, {"model.scorer": path_of(row_by_row)})


# References


def last_norm(model: nn.Module) -> nn.Module:
    return next(module for name, module in model.named_modules() if name.endswith("model.norm"))


@reference_fault(
    "reference/layers-gathered-as-zeros",
    "the weights are spread over processes, and what is gathered for the reference's layers is zeros",
    "reference/wrong",
    "kl/at-start",
    "model/missing-weights",
    fits=has_full_reference,
)
@torch.no_grad()
def layers_gathered_as_zeros(loaded: LoadedModel) -> Held:
    model = copied(loaded)
    for name, weight in model.named_parameters():
        if layer_of(name) is not None and weight.ndim > 1:
            weight.zero_()
    return Held(model)


@reference_fault(
    "reference/layers-in-another-order",
    "the reference was put together from the shards of a pipeline, and its layers stand in the opposite order",
    "reference/wrong",
    "kl/at-start",
    fits=lambda config: has_full_reference(config) and school_of(config).layers > 1,
)
@torch.no_grad()
def layers_in_another_order(loaded: LoadedModel) -> Held:
    model = copied(loaded)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    last = max(layer_of(name) or 0 for name in weights)

    def opposite(name: str) -> str:
        layer = layer_of(name)
        return name if layer is None else name.replace(f"layers.{layer}.", f"layers.{last - layer}.")

    for name, tensor in model.state_dict().items():
        tensor.copy_(weights[opposite(name)])
    return Held(model)


@reference_fault(
    "reference/one-place-off",
    "the reference's logits are not cut as the policy's are: each token is scored by those one place before",
    "reference/wrong",
    "kl/at-start",
    "scoring/shifted",
)
def one_place_off(loaded: LoadedModel) -> Held:
    model = copied(loaded)
    last_norm(model).register_forward_hook(lambda module, inputs, out: out.roll(1, -2))
    return Held(model)


def freezes_the_policy(loaded: LoadedModel) -> Held:
    loaded.model.requires_grad_(False)
    return Held(copied(loaded))


@operator(
    "reference/freezes-the-policy",
    "the policy itself was frozen before it was copied: the reference is right, and nothing is left to train",
    "optim/no-update",
    "scoring/gradient",
    "loss/no-gradient",
    fits=has_reference,
    refusal="no trainable parameters",
)
def policy_frozen(config: Config, random: Random) -> dict[str, Any]:
    return edited(config, {"reference": {"kind": path_of(freezes_the_policy)}})


@reference_fault(
    "reference/feed-forwards-not-read",
    "the feed-forwards have other names in the reference's file than in the model, and theirs are drawn at random",
    "reference/wrong",
    "kl/at-start",
    "model/missing-weights",
    fits=has_full_reference,
)
@torch.no_grad()
def feed_forwards_not_read(loaded: LoadedModel) -> Held:
    model, generator = copied(loaded), torch.Generator().manual_seed(61)
    for name, weight in model.named_parameters():
        if ".mlp." in name:
            weight.copy_(0.02 * torch.randn(weight.shape, generator=generator))
    return Held(model)


# Healthy


class PutAway(Held):
    """Keeps weights alone, and fills an empty model with them for each pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        self.held.load_state_dict(self.kept)
        with evaluating(self.held):
            yield self.held

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.held.load_state_dict(state["held"])
        self.kept = {name: tensor.clone() for name, tensor in self.held.state_dict().items()}


@lookalike("reference that is put away between passes and filled in again", has_reference)
def healthy_put_away(config: Config, random: Random) -> dict[str, Any]:
    return edited(config, {"reference": {"kind": "faults.parts_daily:put_away"}})


def put_away(loaded: LoadedModel) -> Held:
    return PutAway(copied(loaded))
