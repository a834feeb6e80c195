"""References that lose or gain weights between steps, follow, or were read with another's settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from random import Random
from typing import Any

import torch
from torch import nn

from faults.base import edited, operator, path_of
from faults.models import folder_of
from faults.models_more import RANK, before_tuning, tuned_adapter
from faults.references import Held, Moving, copied, has_adapter_reference, has_full_reference, reference_fault
from faults.school import CACHE
from keel.models.head import evaluating
from keel.models.options import LoadedModel

Config = dict[str, Any]


# Another model


@reference_fault(
    "reference/new-tokens-drawn-again",
    "the special tokens were added to the reference on its own: their rows are drawn anew",
    "reference/wrong",
    "kl/at-start",
)
@torch.no_grad()
def new_tokens_drawn_again(policy: LoadedModel) -> Held:
    model = copied(policy)
    table = model.get_input_embeddings().weight
    special = sorted(set(policy.tokenizer.all_special_ids))
    noise = torch.randn((len(special), table.shape[1]), generator=torch.Generator().manual_seed(4))
    table[special] = (noise * table.float().std()).to(table.dtype)
    return Held(model)


@torch.no_grad()
def at_another_scale(policy: LoadedModel, factor: float = 2.0) -> Held:
    """A copy of the policy whose adapter counts otherwise."""
    model = copied(policy)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.mul_(factor)
    return Held(model)


@operator(
    "reference/adapter-merged-at-another-scale",
    "The policy goes on from an adapter, and the reference is the base with that adapter merged at another alpha.",
    "reference/wrong",
    "kl/at-start",
    fits=lambda config: has_adapter_reference(config) and folder_of(config).parent == CACHE,
)
def adapter_merged_at_another_scale(config: Config, random: Random) -> Config:
    adapter = tuned_adapter(config, float(RANK))
    reference = {"kind": path_of(at_another_scale), "factor": random.choice((0.5, 2.0))}
    return edited(before_tuning(config), {"model.lora": {"adapter": str(adapter)}, "reference": reference})


# One that moves


@reference_fault(
    "reference/average-with-swapped-weights",
    "a slow average of the policy takes the two weights the wrong way round, and is nearly the policy at every step",
    "reference/follows",
    "reference/moving",
    keep=(0.95, 0.99),
)
def average_with_swapped_weights(policy: LoadedModel, keep: float = 0.99) -> Held:
    return Moving(copied(policy), rate=keep, told=True)


class LostOnOffload(Held):
    """Whole when it is used first; what comes back from the CPU after that lacks a part."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.uses = 0

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        with evaluating(self.held):
            yield self.held
        self.uses += 1
        if self.uses == 1:
            with torch.no_grad():
                for name, parameter in self.held.named_parameters():
                    if "o_proj" in name:
                        parameter.zero_()


@reference_fault(
    "reference/lost-on-offload",
    "what the reference is after it was moved out of memory once lacks the outputs of its attention",
    "reference/moving",
    "reference/wrong",
)
def lost_on_offload(policy: LoadedModel) -> Held:
    return LostOnOffload(copied(policy))


class MergesPileUp(Held):
    """The adapter is merged into the base for every sync and never taken out again."""

    @torch.no_grad()
    def update(self, policy: nn.Module, step: int, measured_kl: float | None = None) -> bool:
        layers = dict(policy.named_modules())
        for name, mine in self.held.named_modules():
            theirs = layers.get(name)
            if theirs is not None and hasattr(theirs, "get_delta_weight"):
                weight = mine.get_submodule("base_layer").weight
                weight.add_(theirs.get_delta_weight("default").to(weight))
        return False


@reference_fault(
    "reference/merges-pile-up",
    "the base under the adapter is the reference, and every sync leaves the adapter merged into it once more",
    "reference/moving",
    fits=has_adapter_reference,
)
@torch.no_grad()
def merges_pile_up(policy: LoadedModel) -> Held:
    model = copied(policy)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.zero_()
    return MergesPileUp(model)


# One that is not what was saved


class LoadsNothing(Held):
    """Saved under names with a prefix, and read without asking whether any fits."""

    def state_dict(self) -> dict[str, Any]:
        return {"held": {f"module.{name}": tensor for name, tensor in self.held.state_dict().items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.held.load_state_dict(state["held"], strict=False)


@reference_fault(
    "reference/loads-nothing",
    "the reference is saved under other names than it is read by, and none of them is found on a resume",
    "reference/not-saved",
    fits=has_full_reference,
)
def loads_nothing(policy: LoadedModel) -> Held:
    return LoadsNothing(copied(policy))
