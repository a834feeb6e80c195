"""How the weights of a run are distributed over its processes: replicated, or sharded by FSDP2."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from keel.base.errors import KeelError
from keel.base.world import World
from keel.config import Config
from keel.models.dtypes import DTYPES
from keel.models.loaded import LoadedModel
from keel.models.sharding import shard
from keel.reference.base import RuleReference, is_server
from keel.rollout.options import RolloutOptions
from keel.rollout.registry import ENGINES
from keel.run.footprint import DeviceLayout, ModelShape, RunMemory, resident_bytes, shape_of
from keel.trainer.optim import resolve_amp_dtype

MAX_RESIDENT_SHARE = 0.6  # largest share of a device's memory for resident bytes; activations and samples need the rest


def build_layout(config: Config, loaded: LoadedModel, world: World) -> DeviceLayout:
    """The layout of this run: as configured, or the first that fits on this device."""
    chosen = config.parallel.sharding
    if not dist.is_initialized() or (world.size == 1 and chosen == "auto"):
        return DeviceLayout(world.size)
    machine, memory = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), None
    if loaded.device.type == "cuda":  # the smallest over all devices, so that all processes choose the same
        memory = min(world.all_gather(torch.cuda.get_device_properties(loaded.device).total_memory))
    job = run_memory(config, loaded, loaded.device.type)
    return choose_layout(
        config, shape_of(loaded.model), job, world.size, machine=world.broadcast(machine), memory=memory
    )


def choose_layout(
    config: Config, shape: ModelShape, job: RunMemory, devices: int, *, machine: int, memory: int | None
) -> DeviceLayout:
    """The layout of a run on `devices`, with `machine` devices per machine and `memory` bytes each (None: unknown).

    `auto` is the first of `layouts` whose resident bytes are within `MAX_RESIDENT_SHARE`, else the last.
    """
    candidates = layouts(config, shape, devices, machine)
    chosen = config.parallel.sharding
    if chosen != "auto":
        return next(layout for layout in candidates if layout.sharding == chosen)
    if memory is None:
        return candidates[0]
    limit = MAX_RESIDENT_SHARE * memory
    fitting = (layout for layout in candidates if sum(resident_bytes(shape, job, layout).values()) <= limit)
    return next(fitting, candidates[-1])


def layouts(config: Config, shape: ModelShape, devices: int, machine: int) -> list[DeviceLayout]:
    """Every possible layout of this run on `devices`, ordered by the bytes that each device sends."""
    parallel, unfit = config.parallel, _unsupported_option(config)
    if unfit and parallel.sharding in ("full", "hybrid"):
        raise KeelError(
            f"{unfit} does not work with parallel.sharding={parallel.sharding}: leave it out, or use "
            "parallel.sharding=none"
        )
    rows = parallel.shard_size or machine
    able = not unfit and bool(shape.blocks)
    hybrid = parallel.sharding == "hybrid" or (able and devices > rows > 1 and devices % rows == 0)
    full = parallel.sharding == "full" or (able and devices > 1)
    return [
        DeviceLayout(devices),
        *([DeviceLayout(devices, "hybrid", rows, parallel.offload)] if hybrid else []),
        *([DeviceLayout(devices, "full", devices, parallel.offload)] if full else []),
    ]


def sampler_options(config: Config, device: str, amp_dtype: torch.dtype | None) -> RolloutOptions:
    """`rollout` with its dtype resolved: on a GPU that of the training passes, which is faster and matches them."""
    rollout = config.rollout
    own = rollout.named_engine.name in ENGINES
    if rollout.dtype != "auto" or not own or amp_dtype is None or device != "cuda":
        return rollout
    if config.model.quantization is not None:  # quantised weights have their own type
        return rollout
    return rollout.model_copy(update={"dtype": str(amp_dtype).removeprefix("torch.")})


def run_memory(config: Config, loaded: LoadedModel, device: str) -> RunMemory:
    """What this run stores beside the policy's weights on such a device."""
    amp_dtype = resolve_amp_dtype(config.optim, loaded.dtype, loaded.device)
    sampler = sampler_options(config, device, amp_dtype)
    same = sampler.dtype == "auto" or DTYPES[sampler.dtype] == loaded.dtype
    sampler_itemsize = None if same else DTYPES[sampler.dtype].itemsize
    beside = {section: not is_server(model) for section, (model, _) in config.teachers.items()}
    reference = config.needs_reference or config.kl.collect_max is not None
    reference = reference and beside.get("reference", loaded.lora is None)
    return RunMemory(
        pass_itemsize=None if amp_dtype is None else amp_dtype.itemsize,
        sampler_itemsize=sampler_itemsize if sampler.named_engine.name == "native" else 0,
        reference=reference,
        reference_offload=bool(config.reference.params.get("offload")),
        masters=config.reference.kind == "ema" and loaded.dtype.itemsize < 4,
        exact=config.kl.needs_exact,
        teacher=beside.get("kl.teacher", False) and not config.teachers["kl.teacher"][1].get("offload"),
    )


def shard_run(
    layout: DeviceLayout,
    loaded: LoadedModel,
    references: Sequence[Any],
    world: World,
    amp_dtype: torch.dtype | None,
) -> None:
    """Shard the weights of the policy and of references that are separate models."""
    mesh = world.mesh(loaded.device, layout.shards if layout.sharding == "hybrid" else None)
    sharder = partial(shard, mesh=mesh, amp_dtype=amp_dtype)
    sharder(loaded.model, offload=layout.offload)
    for reference in references:
        if isinstance(reference, RuleReference):
            reference.shard(sharder)
        elif reference is not None:
            raise KeelError(
                f"the reference {type(reference).__name__} is your own and cannot be sharded over processes: use "
                "parallel.sharding=none"
            )


def _unsupported_option(config: Config) -> str | None:
    """An option that does not work with sharded weights, or None."""
    wrong = {
        "optim.optimizer=adamw8bit": config.optim.optimizer == "adamw8bit",
        "optim.offload=true": config.optim.offload,
        f"model.quantization={config.model.quantization}": config.model.quantization is not None,
        "model.compile=true": config.model.compile,
    }
    return next((option for option, given in wrong.items() if given), None)
