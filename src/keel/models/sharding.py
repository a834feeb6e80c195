"""Weights spread over processes by FSDP2: each holds a part of every tensor, and a block is whole while it computes.

Whoever runs a pass calls it by `through`, which is plain on a model that is not sharded; on one that is, all processes
call it together, and all of them together read and write a tensor whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from keel.base.errors import KeelError
from keel.models.adapters import adapter_prefixes, is_lora
from keel.models.head import body_of, head_of
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
        return _flat(result) if is_dataclass(result) else result


def _flat(value: Any) -> Any:
    """Dataclasses as dicts: FSDP looks for tensors in tuples and dicts, and its hooks do not hold on views."""
    if isinstance(value, tuple):
        return tuple(map(_flat, value))
    if is_dataclass(value):
        return {"class": type(value), "fields": {f.name: _flat(getattr(value, f.name)) for f in fields(value)}}
    return value.clone() if isinstance(value, Tensor) and value._base is not None else value


def _unflat(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_unflat, value))
    if isinstance(value, dict) and value.keys() == {"class", "fields"}:
        return value["class"](**{name: _unflat(part) for name, part in value["fields"].items()})
    return value


def through(model: nn.Module, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """`function(model, …)`, with the weights whole where the model is sharded."""
    root = vars(model).get(_ROOT)
    if root is None:
        return function(model, *args, **kwargs)
    result = root(function, *args, **kwargs)
    return _unflat(result) if isinstance(result, dict) else result


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


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or all of it where it is spread over processes."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_in_memory(tensor: Tensor) -> Tensor:
    """All of a tensor that is spread over processes, in main memory of the first of them (the others get nothing);
    a copy of any other tensor."""
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    gathered = tensor.full_tensor()
    return gathered.cpu() if dist.get_rank() == 0 else gathered.new_empty(0)


def own_part(tensor: Tensor) -> Tensor:
    """The tensor itself, or what this process holds of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def put(target: Tensor, source: Tensor) -> None:
    """Write a tensor into another, a whole one too into one that is spread over processes."""
    if isinstance(target, DTensor) and not isinstance(source, DTensor):
        local = source.to(target.to_local().device, target.dtype)
        source = distribute_tensor(local, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(source)
