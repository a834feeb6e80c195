"""The bytes of a weight layout on each device, computed from shapes.

`run.layout` chooses a layout by these numbers, and `keel train --plan` shows them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import nn

from keel.models.head import body_of, transformer_blocks
from keel.models.sharding import adapter_parameters

Sharding = Literal["none", "full", "hybrid"]
REDUCE_ITEMSIZE = 4  # bytes: gradients and scores are summed in fp32
ROWS = 10  # tensors [B, T] of the whole batch on every device


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
    """`devices`, of which each `shards` hold one copy of the weights; with `shards=1` each has a full copy."""

    devices: int = 1
    sharding: Sharding = "none"
    shards: int = 1
    offload: bool = False

    @property
    def sharded(self) -> bool:
        return self.sharding != "none"


@dataclass(frozen=True)
class RunMemory:
    """What a run stores beside the policy. Item sizes are in bytes.

    `pass_itemsize` is that of gathered blocks (None: the weights'), `sampler_itemsize` of the sampler's copy (None:
    the weights', copied only if they are sharded; 0: the engine is not Keel's). `reference` is a separate model,
    `masters` its fp32 moving average. With `exact` KL the reference's head stays gathered for the update. `teacher` is
    another copy of the policy.
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
    """Bytes on a device during a pass, by part, without activations and KV cache; `tokens` counts a step's completions.

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
