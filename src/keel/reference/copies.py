"""Reference weights from the current policy: a full copy, or its adapters only."""

from __future__ import annotations

from torch import nn

from keel.models.adapters import is_lora
from keel.models.loaded import LoadedModel
from keel.reference.adapter import AdapterWeights, DeltaAverage
from keel.reference.full import FullCopy
from keel.reference.weights import ReferenceWeights, unwrap


def has_adapter(policy: nn.Module) -> bool:
    """Whether the policy has a LoRA adapter."""
    return is_lora(unwrap(policy))


def copied(policy: nn.Module, offload: bool) -> ReferenceWeights:
    """A copy of the current policy's weights."""
    return AdapterWeights(policy, offload=offload) if has_adapter(policy) else FullCopy(policy, offload=offload)


def base_of(loaded: LoadedModel, model: str) -> ReferenceWeights | None:
    """The policy's base without its adapters, if `model` names it; else None."""
    if model != loaded.name or not has_adapter(loaded.model):
        return None
    return AdapterWeights(loaded.model, base=True)


def averaged(policy: nn.Module, offload: bool) -> ReferenceWeights:
    """A copy that can be averaged with the policy; adapters by their products BA."""
    return DeltaAverage(policy, offload=offload) if has_adapter(policy) else FullCopy(policy, offload=offload)
