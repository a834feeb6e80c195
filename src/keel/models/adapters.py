"""The adapters of a model, found from its layers without importing peft."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


def is_lora(model: nn.Module) -> bool:
    """Whether peft wrapped this model."""
    return hasattr(model, "peft_config") and hasattr(model, "disable_adapter")


def inactive_adapters(model: nn.Module) -> set[str]:
    """Name prefixes `layer.lora_A.<adapter>` of adapters that are not active."""
    prefixes = set()
    for prefix, layer in adapter_layers(model):
        for kind in (*layer.adapter_layer_names, *getattr(layer, "other_param_names", ())):
            holder = getattr(layer, kind, None)
            names = holder if isinstance(holder, nn.ModuleDict | nn.ParameterDict) else ()
            prefixes |= {f"{prefix}.{kind}.{name}" for name in names if name not in layer.active_adapters}
    return prefixes


def adapter_prefixes(model: nn.Module) -> tuple[set[str], set[str]]:
    """Name prefixes `layer.lora_A.<adapter>` of a peft model's inactive and active adapters; empty for other models."""
    inactive: set[str] = set()
    active: set[str] = set()
    for prefix, layer in adapter_layers(model):
        effective = set(effective_adapters(layer))
        for kind in (*layer.adapter_layer_names, *getattr(layer, "other_param_names", ())):
            holder = getattr(layer, kind, None)
            if isinstance(holder, nn.ModuleDict | nn.ParameterDict):
                for adapter in holder:
                    (active if adapter in effective else inactive).add(f"{prefix}.{kind}.{adapter}")
    return inactive, active


def effective_adapters(layer: Any) -> list[str]:
    """The adapters whose weights a layer's next forward reads in addition to the base weights.

    Merged adapters are already part of the base weights. If the adapters are disabled, the forward unmerges them and so
    reads their weights.
    """
    merged = list(getattr(layer, "merged_adapters", ()))
    if layer.disable_adapters:
        return merged
    return [] if merged else list(layer.active_adapters)


def adapter_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The names and modules of the layers that have peft's attributes of adapters."""
    for name, module in model.named_modules():
        if hasattr(module, "adapter_layer_names") and hasattr(module, "disable_adapters"):
            yield name, module
