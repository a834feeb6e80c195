"""Sharding of weights with FSDP2: each process holds a shard of every tensor, and a block is gathered when it runs.

Run passes with `call_with_full_weights`; for unsharded models it is a plain call. For sharded models
`call_with_full_weights`, `full_tensor` and `copy_into` are collective: all processes must call them.
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
from keel.models.head import adapter_prefixes, body_of, head_of, is_lora, transformer_blocks
from keel.models.prefix_attention import try_prefix_attention
from keel.models.rope import length_regimes

R = TypeVar("R")
_ROOT = "_keel_sharded_root"  # the model's attribute for its root, outside its modules to avoid a cycle


class Sharded(nn.Module):
    """The FSDP root module. During its forward, embedding, final norm and head are gathered."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = function(self.module, *args, **kwargs)
        return _flat(result) if is_dataclass(result) else result


def _flat(value: Any) -> Any:
    """Convert dataclasses to dicts and copy views: FSDP finds tensors only in tuples and dicts, and rejects views."""
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


def call_with_full_weights(model: nn.Module, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """Call `function(model, …)`, with gathered weights if the model is sharded."""
    root = vars(model).get(_ROOT)
    if root is None:
        return function(model, *args, **kwargs)
    result = root(function, *args, **kwargs)
    return _unflat(result) if isinstance(result, dict) else result


def is_sharded(model: nn.Module) -> bool:
    """Whether the weights are sharded over processes."""
    return _ROOT in vars(model)


def shard(model: nn.Module, mesh: DeviceMesh, *, amp_dtype: torch.dtype | None = None, offload: bool = False) -> None:
    """Shard the weights over the mesh, block by block. Gradients are summed over the mesh, in fp32 under `amp_dtype`.

    Adapters are replicated, because they are small. `offload` keeps the shards in CPU memory.
    """
    body = body_of(model)
    if length_regimes(body) is not None:
        raise KeelError(
            f"{type(body).__name__} needs one pass per range of lengths (rotary scaling), so sharded processes would "
            "make different numbers of passes: use parallel.sharding=none"
        )
    head_of(model)  # measure head and structured attention by a forward before sharding
    with torch.autocast(next(body.parameters()).device.type, dtype=amp_dtype, enabled=amp_dtype is not None):
        try_prefix_attention(body)
    policy: OffloadPolicy = CPUOffloadPolicy() if offload else OffloadPolicy()
    options: dict[str, Any] = {"mesh": mesh, "offload_policy": policy, "ignored_params": adapter_parameters(model)}
    mixed = MixedPrecisionPolicy(param_dtype=amp_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    precision: dict[str, Any] = {} if amp_dtype is None else {"mp_policy": mixed}
    blocks = transformer_blocks(body)
    if not blocks:
        raise KeelError(f"cannot find the list of layers of {type(body).__name__}: use parallel.sharding=none")
    root = Sharded(model)
    sharded: list[Any] = [fully_shard(block, **options, **precision) for block in blocks]
    # The remaining modules are gathered in their own dtype; autocast casts them as in a single process.
    sharded.append(fully_shard(root, **options, reshard_after_forward=True))
    for part in sharded:
        part.set_gradient_divide_factor(1.0)  # losses are already divided by global denominators
        part.set_force_sum_reduction_for_comms(True)
    vars(model)[_ROOT] = root


def adapter_parameters(model: nn.Module) -> set[nn.Parameter]:
    """The parameters that peft added to a model; empty without adapters."""
    if not is_lora(model):
        return set()
    inactive, active = adapter_prefixes(model)
    added = tuple(f"{prefix}." for prefix in (*inactive, *active))
    return {p for name, p in model.named_parameters() if p.requires_grad or name.startswith(added)}


def full_tensor(tensor: Tensor) -> Tensor:
    """The tensor, gathered if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather_to_cpu(tensor: Tensor) -> Tensor:
    """Gather a sharded tensor to the CPU memory of rank 0 (empty on other ranks). Other tensors are copied."""
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    gathered = tensor.full_tensor()
    return gathered.cpu() if dist.get_rank() == 0 else gathered.new_empty(0)


def local_tensor(tensor: Tensor) -> Tensor:
    """The tensor, or this process's shard of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def copy_into(target: Tensor, source: Tensor) -> None:
    """Copy a full or sharded tensor into another."""
    if isinstance(target, DTensor) and not isinstance(source, DTensor):
        local = source.to(target.to_local().device, target.dtype)
        source = distribute_tensor(local, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(source)
