"""The optimizer's state in a checkpoint: a single file, or torch.distributed.checkpoint for sharded weights.

Both formats can be loaded on any number of processes.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor

from keel.models.sharding import is_sharded
from keel.trainer.optim import Optimizer


def optimizer_state(optimizer: Optimizer, model: nn.Module, folder: Path) -> dict[str, Any]:
    """The state to write into one file. Sharded moments are written to `folder` by all processes."""
    state = optimizer.state_dict()
    sharded = is_sharded(model) and any(isinstance(p, DTensor) for p in optimizer.parameters)
    if not sharded or not optimizer.inner.state:  # without a state, get_optimizer_state_dict would create one
        return state
    moments = {"optimizer": get_optimizer_state_dict(model, optimizer.inner)}
    try:
        with _quiet():
            dcp.save(moments, checkpoint_id=folder)
    except CheckpointException as error:
        raise OSError(str(next(iter(error.failures.values()))[0])) from error
    return {**state, "inner": None}


def load_optimizer(optimizer: Optimizer, model: nn.Module, saved: Mapping[str, Any], folder: Path) -> None:
    """Load the result of `optimizer_state`, and shard it like the current weights."""
    if saved["inner"] is not None:
        optimizer.load_state_dict({**saved, "inner": _distributed_state(optimizer, saved["inner"])})
        return
    state = {"optimizer": get_optimizer_state_dict(model, optimizer.inner)}
    with _quiet():
        dcp.load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    set_optimizer_state_dict(model, optimizer.inner, state["optimizer"])
    optimizer.load_state_dict({**saved, "inner": optimizer.inner.state_dict()})


def _distributed_state(optimizer: Optimizer, inner: Mapping[str, Any]) -> dict[str, Any]:
    """Shard unsharded moments like their parameters."""
    parameters = [p for group in optimizer.inner.param_groups for p in group["params"]]

    def like(parameter: Tensor, value: Any) -> Any:
        if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or value.shape != parameter.shape:
            return value
        local = value.to(parameter.to_local().device)
        return distribute_tensor(local, parameter.device_mesh, parameter.placements, src_data_rank=None)

    state = {
        index: {name: like(parameters[index], value) for name, value in entries.items()}
        for index, entries in inner["state"].items()
    }
    return {**inner, "state": state}


class _quiet(warnings.catch_warnings):
    """Ignore warnings about torch's internals."""

    def __enter__(self) -> Any:
        entered = super().__enter__()
        warnings.simplefilter("ignore")
        return entered
