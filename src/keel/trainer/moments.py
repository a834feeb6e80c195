"""The optimizer's state as a checkpoint keeps it: in one file, or, where weights are spread over processes, as each
process holds it, by torch.distributed.checkpoint. Either is read again on any number of processes.
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


def saved_optimizer(optimizer: Optimizer, model: nn.Module, folder: Path) -> dict[str, Any]:
    """What to write into one file; moments that are spread over processes are written to `folder`, by all of them."""
    state = optimizer.state_dict()
    spread = is_sharded(model) and any(isinstance(p, DTensor) for p in optimizer.parameters)
    if not spread or not optimizer.inner.state:  # before its first update torch would make it one, to have a state
        return state
    moments = {"optimizer": get_optimizer_state_dict(model, optimizer.inner)}
    try:
        with _quiet():
            dcp.save(moments, checkpoint_id=folder)
    except CheckpointException as error:
        raise OSError(str(next(iter(error.failures.values()))[0])) from error
    return {**state, "inner": None}


def load_optimizer(optimizer: Optimizer, model: nn.Module, saved: Mapping[str, Any], folder: Path) -> None:
    """Take over what `saved_optimizer` gave, laid out as the weights are now."""
    if saved["inner"] is not None:
        optimizer.load_state_dict({**saved, "inner": _laid_out(optimizer, saved["inner"])})
        return
    state = {"optimizer": get_optimizer_state_dict(model, optimizer.inner)}
    with _quiet():
        dcp.load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    set_optimizer_state_dict(model, optimizer.inner, state["optimizer"])
    optimizer.load_state_dict({**saved, "inner": optimizer.inner.state_dict()})


def _laid_out(optimizer: Optimizer, inner: Mapping[str, Any]) -> dict[str, Any]:
    """A state of whole moments, each spread as its parameter is."""
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
    """torch's checkpoints warn of their own insides."""

    def __enter__(self) -> Any:
        entered = super().__enter__()
        warnings.simplefilter("ignore")
        return entered
