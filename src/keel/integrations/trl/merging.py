"""The base under LoRA stays bit by bit what it was while TRL merges the adapter for its sampler and takes it off again.

(W + Δ) − Δ is not W in floating point: without this every sync moves the base a little, and with it the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from keel.base.errors import KeelError


def keeping_base(model: nn.Module, sync: Callable[[], Any]) -> Callable[[], Any]:
    """`sync`, after which every weight that an adapter lies on is put back from a copy in host memory."""
    kept = [(weight, weight.detach().to("cpu", copy=True)) for weight in adapted_weights(model)]

    @wraps(sync)
    def synced() -> Any:
        try:
            return sync()
        finally:
            with torch.no_grad():
                for weight, copy in kept:
                    weight.copy_(copy)

    return synced


def adapted_weights(model: nn.Module) -> list[Tensor]:
    """The base's tensors in layers that carry an adapter."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module.get_base_layer() for module in model.modules() if isinstance(module, BaseTunerLayer)]
    distinct: dict[int, Tensor] = {id(x): x for layer in layers for x in layer.parameters(recurse=False)}
    weights = list(distinct.values())
    if any(not weight.is_floating_point() for weight in weights):
        raise KeelError(
            "use_vllm with an adapter on a quantized model: TRL merges the adapter into the base for every sync, which "
            "rounds the base anew each time and moves the reference; load the base in bfloat16, or give use_vllm=False"
        )
    return weights
