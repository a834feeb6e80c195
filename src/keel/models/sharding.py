"""Weights spread over processes by FSDP2: each holds a part of every tensor, and a block is whole while it computes.

Whoever runs a pass calls it by `through`, which is plain on a model that is not sharded; on one that is, all processes
call it together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from keel.base.errors import KeelError
from keel.models.fingerprint import adapter_prefixes
from keel.models.head import body_of, head_of
from keel.models.lora import is_lora
from keel.models.prefix_attention import try_prefix_attention
from keel.models.rope import length_regimes

R = TypeVar("R")
_ROOT = "_keel_sharded_root"  # where a sharded model knows its root: outside of its modules, which the root holds


class Sharded(nn.Module):
    """The root that FSDP sees: inside its forward, embedding, final norm and head are whole."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = function(self.module, *args, **kwargs)
        if not is_dataclass(result):
            return result
        # FSDP looks for the tensors of a pass in tuples and dicts, and its hooks do not hold on views.
        parts = {f.name: _own(getattr(result, f.name)) for f in fields(result)}
        return {"class": type(result), "fields": parts}


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and value._base is not None else value


def through(model: nn.Module, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """`function(model, …)`, with the weights whole where the model is sharded."""
    root = vars(model).get(_ROOT)
    if root is None:
        return function(model, *args, **kwargs)
    result = root(function, *args, **kwargs)
    if isinstance(result, dict) and result.keys() == {"class", "fields"}:
        result = result["class"](**result["fields"])
    return result


def is_sharded(model: nn.Module) -> bool:
    """Whether the weights are spread over processes."""
    return _ROOT in vars(model)


def shard(model: nn.Module, mesh: DeviceMesh, *, amp_dtype: torch.dtype | None = None, offload: bool = False) -> None:
    """Spread the weights over the mesh, a block at a time; gradients are summed over it, in fp32 under `amp_dtype`.

    Adapters stay whole everywhere, being small. `offload` keeps this process's part in main memory.
    """
    body = body_of(model)
    if length_regimes(body) is not None:
        raise KeelError(
            f"{type(body).__name__} takes another number of passes a batch by its lengths (rotary scaling), which "
            "sharded processes cannot keep in step: use parallel.sharding=none"
        )
    head_of(model)  # measured by a pass of its own, as is attention by structure: now, while weights are plain
    with torch.autocast(next(body.parameters()).device.type, dtype=amp_dtype, enabled=amp_dtype is not None):
        try_prefix_attention(body)
    policy: OffloadPolicy = CPUOffloadPolicy() if offload else OffloadPolicy()
    options: dict[str, Any] = {"mesh": mesh, "offload_policy": policy, "ignored_params": adapters_of(model)}
    mixed = MixedPrecisionPolicy(param_dtype=amp_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    precision: dict[str, Any] = {} if amp_dtype is None else {"mp_policy": mixed}
    blocks = blocks_of(body)
    if not blocks:
        raise KeelError(f"{type(body).__name__} has no list of layers to shard by: use parallel.sharding=none")
    root = Sharded(model)
    sharded: list[Any] = [fully_shard(block, **options, **precision) for block in blocks]
    # The rest is gathered in its own type: its products are cast as autocast casts them in one process.
    sharded.append(fully_shard(root, **options, reshard_after_forward=True))
    for part in sharded:
        part.set_gradient_divide_factor(1.0)  # losses are divided by what all processes counted
        part.set_force_sum_reduction_for_comms(True)
    vars(model)[_ROOT] = root


def adapters_of(model: nn.Module) -> set[nn.Parameter]:
    """What peft has added to a model, trained or kept; empty for a model without adapters."""
    if not is_lora(model):
        return set()
    idle, active = adapter_prefixes(model)
    added = tuple(f"{prefix}." for prefix in (*idle, *active))
    return {p for name, p in model.named_parameters() if p.requires_grad or name.startswith(added)}


def blocks_of(body: nn.Module) -> list[nn.Module]:
    """The layers of the transformer: the largest list of modules in it; empty where it has none."""
    lists = [module for module in body.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()), default=()))
