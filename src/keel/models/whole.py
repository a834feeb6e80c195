"""Tensors that may be spread over processes, read and written whole. All processes call these together."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


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
