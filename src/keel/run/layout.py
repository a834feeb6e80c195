"""How the weights of a run are laid out over its processes: whole on each, or spread by FSDP2."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from keel.base.errors import KeelError
from keel.base.world import World
from keel.config import Config
from keel.models.load import LoadedModel
from keel.models.sharding import shard
from keel.reference.kinds import RuleReference

ROOM = 0.6  # share of a device's memory that weights, gradients and moments may take: activations and samples need more


def spreads(config: Config, loaded: LoadedModel, world: World) -> bool:
    """Whether the weights are spread over the processes: as configured, or where one device has no room for them."""
    chosen = config.parallel.sharding
    if chosen == "none" or not dist.is_initialized() or (world.size == 1 and chosen == "auto"):
        return False
    if chosen == "auto":
        if loaded.device.type != "cuda":
            return False
        memory = torch.cuda.get_device_properties(loaded.device).total_memory
        return training_bytes(loaded, copies=1 + int(config.needs_reference and loaded.lora is None)) > ROOM * memory
    _check(config)
    return True


def training_bytes(loaded: LoadedModel, copies: int = 1) -> int:
    """Weights (`copies` of them, for a reference), gradients, and AdamW's two moments of what is trained."""
    trained = sum(p.numel() * p.element_size() for p in loaded.model.parameters() if p.requires_grad)
    weights = sum(p.numel() * p.element_size() for p in loaded.model.parameters())
    return copies * weights + 3 * trained


def spread(config: Config, loaded: LoadedModel, reference: Any, world: World, amp_dtype: torch.dtype | None) -> None:
    """Spread the policy's weights over the processes, and those of a reference that are a model of their own."""
    parallel = config.parallel
    local = parallel.shard_size or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    mesh = world.mesh(loaded.device, local if parallel.sharding == "hybrid" else None)
    sharder = partial(shard, mesh=mesh, amp_dtype=amp_dtype)
    sharder(loaded.model, offload=parallel.offload)
    if isinstance(reference, RuleReference):
        reference.spread(sharder)


def _check(config: Config) -> None:
    """Refuse what cannot work on spread weights."""
    wrong = {
        "optim.optimizer=adamw8bit": config.optim.optimizer == "adamw8bit",
        "optim.offload=true": config.optim.offload,
        f"model.quantization={config.model.quantization}": config.model.quantization is not None,
        "model.compile=true": config.model.compile,
    }
    for option, given in wrong.items():
        if given:
            raise KeelError(
                f"{option} does not work with parallel.sharding={config.parallel.sharding}: leave it out, or use "
                "parallel.sharding=none"
            )
