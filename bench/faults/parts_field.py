"""Scorers, references, KL formulas, losses and weight sync as trainers of one's own get them wrong in the field."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from faults.base import option
from faults.engines import Copied, Groups, fault, is_synced, layer_of
from faults.losses import kl_fault, loss_fault, term_with
from faults.references import Held, copied, has_full_reference, reference_fault
from faults.scorers import TEMPERATURES, is_scored_natively, right, scorer_fault
from keel.base.types import Completion
from keel.losses import LossInputs, PolicyTerm
from keel.models.options import LoadedModel
from keel.models.scorer import ScoreRows
from keel.rollout import Request, SamplingParams
from keel.rollout.native.engine import NativeEngine

# Scorers


def has_long_completions(config: Mapping[str, Any]) -> bool:
    tagged = option(config, "task.format") == "answer_tag"
    return is_scored_natively(config) and (tagged or option(config, "task.name") == "tools")


def completion_cut(model: nn.Module, rows: ScoreRows, *, temperature: float) -> Tensor:
    """Rows are cut on the right: tokens after the sixth of a completion get 0."""
    logp = right(model, rows, temperature=temperature)
    return logp.masked_fill(torch.arange(logp.shape[1], device=logp.device) >= 6, 0.0)


def otherwise_without_gradient(model: nn.Module, rows: ScoreRows, *, temperature: float) -> Tensor:
    """The pass for inference forgets the temperature, the one for training does not."""
    return right(model, rows, temperature=temperature if torch.is_grad_enabled() else 1.0)


def last_row_left_out(model: nn.Module, rows: ScoreRows, *, temperature: float) -> Tensor:
    """The last row of a pass is a remainder that nobody computes."""
    logp = right(model, rows, temperature=temperature)
    kept = torch.arange(len(logp), device=logp.device)[:, None] < len(logp) - 1
    return torch.where(kept, logp, torch.zeros_like(logp))


scorer_fault(
    "scorer/completion-cut",
    "rows are cut to a limit of tokens before they are scored, and what is cut off gets 0",
    "scoring/shifted",
    "scoring/mismatch",
    scorers=[completion_cut],
    fits=has_long_completions,
)
scorer_fault(
    "scorer/otherwise-without-gradient",
    "passes without a gradient are taken at temperature 1, those with one at the sampling temperature",
    "scoring/temperature",
    "scoring/mismatch",
    "ratio/all-clipped",
    scorers=[otherwise_without_gradient],
    also={"rollout.temperature": TEMPERATURES},
)
scorer_fault(
    "scorer/last-row-left-out",
    "the last row of every pass gets 0 and no gradient",
    "scoring/mismatch",
    "scoring/gradient",
    scorers=[last_row_left_out],
)

# References


class Decaying(Held):
    """Shrinks with every step, as where its weights stand in the optimizer's list and are decayed."""

    @torch.no_grad()
    def update(self, policy: nn.Module, step: int, measured_kl: float | None = None) -> bool:
        for parameter in self.held.parameters():
            if parameter.ndim > 1:
                parameter.mul_(0.98)
        return False


@reference_fault(
    "reference/decays-with-the-policy",
    "the optimizer's weight decay reaches the reference too, which shrinks from step to step",
    "reference/moving",
    "reference/wrong",
    fits=has_full_reference,
)
def decays_with_the_policy(loaded: LoadedModel) -> Held:
    return Decaying(copied(loaded))


@reference_fault(
    "reference/last-layer-of-the-policy",
    "the reference shares its last layer with the policy and moves with it",
    "reference/moving",
    fits=has_full_reference,
)
def last_layer_of_the_policy(loaded: LoadedModel) -> Held:
    model, policy = copied(loaded), dict(loaded.model.named_parameters())
    last = max(layer_of(name) or 0 for name in policy)
    for name, module in model.named_modules():
        for part in [part for part, _ in module.named_parameters(recurse=False)]:
            if layer_of(f"{name}.{part}") == last:
                setattr(module, part, policy[f"{name}.{part}"])
    return Held(model)


# KL formulas


def with_a_dead_zone(d: Tensor) -> Tensor:
    """Half the square of what is above three tenths of a nat."""
    return 0.5 * (d.abs() - 0.3).clamp_min(0.0).square()


def reference_forgotten(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """k2 of the policy's log-probability alone."""
    return 0.5 * logp.square() + 0.0 * ref_logp


kl_fault(
    "kl/dead-zone",
    "the penalty does nothing to log-ratios of less than three tenths, which is all that a run has",
    "kl/no-gradient",
    "kl/scale",
    formulas=["with_a_dead_zone"],
    module=__name__,
)
kl_fault(
    "kl/reference-forgotten",
    "the penalty is made of the policy's log-probabilities alone, without the reference's",
    "kl/reversed",
    "kl/scale",
    formulas=["reference_forgotten"],
    module=__name__,
)

# Losses


@loss_fault(
    "loss/probability-for-ratio",
    "the probability stands where its ratio to the old one should be, so that rare tokens are hardly trained",
    "loss/scale",
    "loss/clip",
    "loss/no-gradient",
)
def probability_for_ratio(inputs: LossInputs, options: Any) -> PolicyTerm:
    probability = inputs.logp.exp()
    return PolicyTerm(-probability * inputs.advantages, probability)


@loss_fault(
    "loss/last-token-only",
    "the advantage is put on the last token alone, as a reward at the end is",
    "loss/no-gradient",
    "mask/not-actions",
)
def last_token_only(inputs: LossInputs, options: Any) -> PolicyTerm:
    left = inputs.mask.bool().flip(-1).cumsum(-1).flip(-1)
    return term_with(inputs, advantages=inputs.advantages * (left == 1))


# Weight sync


@fault(
    "sync/every-fourth",
    "weights reach the engine at every fourth sync",
    "sampler/stale",
    fits=is_synced,
)
class EveryFourth(Copied):
    syncs = 0

    def load(self, weights: dict[str, Tensor]) -> None:
        if self.syncs % 4 == 0:
            super().load(weights)
        self.syncs += 1


@fault(
    "sync/one-of-two-replicas",
    "every second completion of a group is drawn by a replica that is never synced",
    "sampler/stale",
    "sampler/mismatch",
    fits=is_synced,
)
class OneOfTwoReplicas(Copied):
    behind: NativeEngine

    def prepare(self) -> None:
        self.behind = NativeEngine(copy.deepcopy(self.model), self.tokenizer)

    def generate(self, requests: Sequence[Request], sampling: SamplingParams, **noise: int) -> Groups:
        def drawn(request: Request, sample: int) -> Completion:
            replica = self.behind if sample % 2 else self.inner
            return replica.generate([replace(request, samples=(sample,))], sampling, **noise)[0][0]

        return [[drawn(request, sample) for sample in request.drawn(sampling)] for request in requests]
