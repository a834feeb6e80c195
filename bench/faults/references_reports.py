"""References as their users report them: the base under an adapter that had a past, cut prompts, clocks, merges."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from faults.base import edited, lookalike, operator, path_of
from faults.models import folder_of, loaded
from faults.references import Held, Moving, copied, has_adapter_reference, has_full_reference, reference_fault
from faults.school import CACHE, cached, digest, version_of
from keel.models.options import LoadedModel

Config = dict[str, Any]
VERSION = version_of(__file__)


@torch.no_grad()
def base_of(policy: LoadedModel) -> nn.Module:
    """A copy of the policy whose adapter does nothing."""
    model = copied(policy)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.zero_()
    return model


# Another model


def base_alone(policy: LoadedModel) -> Held:
    return Held(base_of(policy))


@operator(
    "reference/base-under-a-trained-adapter",
    "The policy goes on from an adapter that was tuned before, and the reference is the base without it.",
    "reference/wrong",
    "kl/at-start",
    fits=has_adapter_reference,
)
def base_under_a_trained_adapter(config: Config, random: Random) -> Config:
    def write(folder: Path) -> None:
        from peft import LoraConfig, get_peft_model

        model, _ = loaded(folder_of(config).name)
        adapted: Any = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
        generator = torch.Generator().manual_seed(37)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.data = 0.08 * torch.randn(parameter.shape, generator=generator)
        adapted.save_pretrained(folder)

    adapter = cached(f"tuned-{digest(VERSION, folder_of(config).name)}", write)
    return edited(config, {"model.lora": {"adapter": str(adapter)}, "reference": {"kind": path_of(base_alone)}})


@reference_fault(
    "reference/first-half-cut",
    "the reference has a context of its own, half as long, and reads padding in place of what stands first",
    "reference/wrong",
    "kl/at-start",
    fits=has_full_reference,
)
def first_half_cut(policy: LoadedModel) -> Held:
    model: Any = copied(policy)
    table, pad = model.get_input_embeddings(), model.config.pad_token_id or 0

    def cut(module: nn.Module, given: Any, out: Tensor) -> Tensor:
        first = torch.arange(out.shape[1], device=out.device)[:, None] < out.shape[1] // 2
        return torch.where(first, table.weight[pad].to(out.dtype), out)

    table.register_forward_hook(cut)
    return Held(model)


# When it moves


class CountsMicrobatches(Moving):
    kind = "snapshot"


@reference_fault(
    "reference/counts-microbatches",
    "a snapshot for every fifty steps counts microbatches in place of steps, and is taken at every second step",
    "reference/follows",
    "reference/moving",
    every=(50,),
)
def counts_microbatches(policy: LoadedModel, every: int = 50) -> Held:
    return CountsMicrobatches(copied(policy), 1.0, every // 25, told=True)


class WornByMerging(Held):
    """After each step the policy's adapter is merged into its weights, in eight bits, and taken out again."""

    @torch.no_grad()
    def update(self, policy: nn.Module, step: int, measured_kl: float | None = None) -> bool:
        theirs: dict[str, Any] = dict(policy.named_modules())
        for name, module in self.held.named_modules():
            if hasattr(module, "get_delta_weight"):
                mine: Any = module
                weight, delta = mine.get_base_layer().weight, theirs[name].get_delta_weight("default").float()
                merged = weight.float() + delta
                scale = merged.abs().amax().clamp_min(1e-6) / 448
                weight.copy_((merged / scale).to(torch.float8_e4m3fn).float() * scale - delta)
        return False


@reference_fault(
    "reference/worn-by-merging",
    "the adapter is merged into the base in eight bits and taken out again at every step, which wears the base down",
    "reference/moving",
    "reference/wrong",
    fits=has_adapter_reference,
)
def worn_by_merging(policy: LoadedModel) -> Held:
    return WornByMerging(base_of(policy))


# Healthy


def read_again(policy: LoadedModel, folder: str = "") -> Held:
    """The checkpoint, read from its folder once more in the policy's precision."""
    model = loaded(folder)[0].to(next(policy.model.parameters()))
    return Held(model.requires_grad_(False))


@lookalike("reference that is read from the checkpoint once more", has_full_reference)
def healthy_reference_read_again(config: Config, random: Random) -> Config:
    key = folder_of(config).name
    if not (CACHE / key).exists():
        return config
    return edited(config, {"reference": {"kind": path_of(read_again), "folder": key}})
