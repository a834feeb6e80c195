"""How weights are distributed over processes, replicated or sharded by FSDP2, and the bytes of each layout."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from keel.base.errors import KeelError
from keel.base.world import World
from keel.config import Config
from keel.models.head import body_of, transformer_blocks
from keel.models.options import LoadedModel
from keel.models.precision import DTYPES
from keel.models.sharding import adapter_parameters, shard
from keel.reference.base import RuleReference, is_server
from keel.rollout.options import RolloutOptions
from keel.rollout.registry import ENGINES
from keel.trainer.optim import resolve_amp_dtype

Sharding = Literal["none", "full", "hybrid"]
REDUCE_ITEMSIZE = 4  # bytes: gradients and scores are summed in fp32
ROWS = 10  # number of [B, T] tensors of the whole batch on every device


@dataclass(frozen=True)
class Parameter:
    """A weight tensor: its shape, item size in bytes, and whether it is trained."""

    shape: tuple[int, ...]
    itemsize: int
    trained: bool = True

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def part(self, shards: int) -> int:
        """Elements on one of `shards` devices: FSDP splits the first dimension evenly; the last part may be short."""
        rows = self.shape[0] if self.shape else 1
        return math.ceil(rows / shards) * (self.numel // rows) if rows else 0


@dataclass(frozen=True)
class ModelShape:
    """Parameters of each block (the unit of FSDP), of the rest, and of adapters, which are not sharded."""

    blocks: tuple[tuple[Parameter, ...], ...]
    rest: tuple[Parameter, ...]
    adapters: tuple[Parameter, ...] = ()

    @property
    def base(self) -> tuple[Parameter, ...]:
        return (*(p for block in self.blocks for p in block), *self.rest)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return (*self.base, *self.adapters)

    @property
    def largest_block(self) -> tuple[Parameter, ...]:
        return max(self.blocks, key=_numel, default=())


def shape_of(model: nn.Module) -> ModelShape:
    """The shape of a model, which may be on the meta device."""
    adapters = adapter_parameters(model)
    block_of = {
        p: number for number, block in enumerate(transformer_blocks(body_of(model))) for p in block.parameters()
    }
    blocks: dict[int, list[Parameter]] = {number: [] for number in sorted(set(block_of.values()))}
    rest: list[Parameter] = []
    added: list[Parameter] = []
    for p in model.parameters():
        own = rest if p not in block_of else blocks[block_of[p]]
        (added if p in adapters else own).append(Parameter(tuple(p.shape), p.element_size(), p.requires_grad))
    return ModelShape(tuple(map(tuple, blocks.values())), tuple(rest), tuple(added))


@dataclass(frozen=True)
class DeviceLayout:
    """`devices` in groups of `shards`; each group holds one copy of the weights. With `shards=1` each device does."""

    devices: int = 1
    sharding: Sharding = "none"
    shards: int = 1
    offload: bool = False

    @property
    def sharded(self) -> bool:
        return self.sharding != "none"


@dataclass(frozen=True)
class RunMemory:
    """The tensors that a run stores beside the policy. Item sizes are in bytes.

    `pass_itemsize` is the item size of gathered blocks (None: that of the weights). `sampler_itemsize` is the item size
    of the sampler's copy (None: that of the weights, copied only if they are sharded; 0: the engine is not Keel's).
    `reference` is whether the reference is a separate model, `masters` whether it has an fp32 moving average. With
    `exact` KL the reference's head stays gathered for the update. `teacher` counts as another copy of the policy.
    """

    pass_itemsize: int | None = None
    sampler_itemsize: int | None = None
    reference: bool = False
    reference_offload: bool = False
    masters: bool = False
    exact: bool = False
    teacher: bool = False
    moments: int = 2


def resident_bytes(shape: ModelShape, job: RunMemory, layout: DeviceLayout) -> dict[str, int]:
    """Bytes that stay on a device through a run, by part; `gradients` exist during updates."""
    shards = layout.shards
    device = 0 if layout.sharded and layout.offload else 1
    trained = [p for p in shape.base if p.trained]
    adapters = sum(p.numel * p.itemsize for p in shape.adapters)
    trained_adapters = sum(p.numel * p.itemsize for p in shape.adapters if p.trained)
    reference = 0 if not job.reference or job.reference_offload else _part_bytes(shape.base, shards)
    reference += _part_bytes(shape.base, shards) if job.teacher else 0
    masters = sum(4 * p.part(shards) for p in shape.base) if job.reference and job.masters else 0
    return {
        "weights": device * _part_bytes(shape.base, shards) + adapters,
        "sampler": _sampler_bytes(shape, job, layout),
        "reference": reference + masters,
        "optimizer": job.moments * (device * _part_bytes(trained, shards) + trained_adapters),
        "gradients": device * _part_bytes(trained, shards) + trained_adapters,
    }


def transient_bytes(shape: ModelShape, job: RunMemory, layout: DeviceLayout, tokens: int) -> dict[str, int]:
    """Bytes on a device during a pass, by part, without activations and KV cache.

    `tokens` is the number of completion tokens in a step.

    The current block, the next one and the parameters outside of blocks are gathered; the backward pass adds the full
    gradients of a block and of the rest, and the buffer of the reduce-scatter.
    """
    rows = ROWS * REDUCE_ITEMSIZE * tokens if layout.devices > 1 else 0
    if not layout.sharded:
        return {"gathered": 0, "rows": rows}
    block, rest = _gathered(shape.largest_block, job), _gathered(shape.rest, None)
    grads = _gathered([p for p in shape.largest_block if p.trained], job) + _gathered(_trained(shape.rest), None)
    buffer = max(_numel(_trained(shape.largest_block)), _numel(_trained(shape.rest))) * REDUCE_ITEMSIZE
    head = max((p.numel * p.itemsize for p in shape.rest), default=0) if job.reference and job.exact else 0
    return {"gathered": 2 * block + rest + grads + buffer + head, "rows": rows}


def _sampler_bytes(shape: ModelShape, job: RunMemory, layout: DeviceLayout) -> int:
    """The sampler's copy, unsharded on every device; 0 if it reads the policy's own weights."""
    if job.sampler_itemsize is None:
        return sum(p.numel * p.itemsize for p in shape.parameters) if layout.sharded else 0
    return job.sampler_itemsize * _numel(shape.parameters)


def _part_bytes(parameters: Iterable[Parameter], shards: int) -> int:
    return sum(p.part(shards) * p.itemsize for p in parameters)


def _trained(parameters: Iterable[Parameter]) -> list[Parameter]:
    return [p for p in parameters if p.trained]


def _numel(parameters: Iterable[Parameter]) -> int:
    return sum(p.numel for p in parameters)


def _gathered(parameters: Iterable[Parameter], job: RunMemory | None) -> int:
    """Bytes of gathered weights: blocks in the dtype of the passes, the rest in its own."""
    item = None if job is None else job.pass_itemsize
    return sum(p.numel * (item or p.itemsize) for p in parameters)


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
        named = next((layout for layout in candidates if layout.sharding == chosen), None)
        if named is None:
            raise KeelError(
                f"parallel.sharding=hybrid cannot divide {devices} devices into groups of "
                f"{config.parallel.shard_size or machine}: set parallel.shard_size to a divisor of {devices}"
            )
        return named
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
    hybrid = devices % rows == 0 and (parallel.sharding == "hybrid" or (able and devices > rows > 1))
    full = parallel.sharding == "full" or (able and devices > 1)
    return [
        DeviceLayout(devices),
        *([DeviceLayout(devices, "hybrid", rows, parallel.offload)] if hybrid else []),
        *([DeviceLayout(devices, "full", devices, parallel.offload)] if full else []),
    ]


def sampler_options(config: Config, device: str, amp_dtype: torch.dtype | None) -> RolloutOptions:
    """Resolve `rollout.dtype`: on a GPU, `auto` is the dtype of the training passes, which is faster and matches."""
    rollout = config.rollout
    own = rollout.named_engine.name in ENGINES
    if rollout.dtype != "auto" or not own or amp_dtype is None or device != "cuda":
        return rollout
    if config.model.quantization is not None:  # quantised weights have their own type
        return rollout
    return rollout.model_copy(update={"dtype": str(amp_dtype).removeprefix("torch.")})


def run_memory(config: Config, loaded: LoadedModel, device: str) -> RunMemory:
    """The tensors that this run stores beside the policy on a device of this type (`cpu` or `cuda`)."""
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
