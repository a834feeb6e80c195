"""What a layout of the weights costs: bytes on each device, and bytes that it sends in a step. Arithmetic over shapes.

`run.layout` chooses a layout by these numbers, and `keel train --plan` shows them. An all-gather or a reduce-scatter of
M bytes over n devices makes each of them send M(n−1)/n, an all-reduce twice as much.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import nn

from keel.models.head import body_of
from keel.models.sharding import adapters_of, blocks_of

Sharding = Literal["none", "full", "hybrid"]
WIRE_ITEM = 4  # gradients and scores are summed in fp32
TOKEN_BYTES = 24  # of a sampled token as it is sent: its number, its mask, two log-probabilities
SCORES = 3  # tensors [B, T] that are summed over devices: old_logp, entropy, ref_logp
ROWS = 10  # tensors [B, T] of the whole batch that every device holds in a step


@dataclass(frozen=True)
class Parameter:
    """A tensor of weights: its shape, bytes of a number, and whether it is trained."""

    shape: tuple[int, ...]
    itemsize: int
    trained: bool = True

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def part(self, shards: int) -> int:
        """Numbers of it on a device of `shards`: FSDP cuts the first dimension into equal parts, the last one short."""
        rows = self.shape[0] if self.shape else 1
        return math.ceil(rows / shards) * (self.numel // rows) if rows else 0


@dataclass(frozen=True)
class ModelShape:
    """Parameters of each block, which FSDP gathers together; of the rest; and adapters, which stay whole."""

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
    """The shape of a model, of one without memory too."""
    adapters = adapters_of(model)
    block_of = {p: number for number, block in enumerate(blocks_of(body_of(model))) for p in block.parameters()}
    blocks: dict[int, list[Parameter]] = {number: [] for number in sorted(set(block_of.values()))}
    rest: list[Parameter] = []
    added: list[Parameter] = []
    for p in model.parameters():
        own = rest if p not in block_of else blocks[block_of[p]]
        (added if p in adapters else own).append(Parameter(tuple(p.shape), p.element_size(), p.requires_grad))
    return ModelShape(tuple(map(tuple, blocks.values())), tuple(rest), tuple(added))


@dataclass(frozen=True)
class DeviceLayout:
    """`devices`, of which `shards` together hold one copy of the weights: 1 is a whole copy on each."""

    devices: int = 1
    sharding: Sharding = "none"
    shards: int = 1
    offload: bool = False

    @property
    def spread(self) -> bool:
        return self.sharding != "none"

    @property
    def replicas(self) -> int:
        return self.devices // self.shards


@dataclass(frozen=True)
class RunMemory:
    """What a run holds beside the policy. Item sizes are bytes of a number.

    `pass_item` is that of gathered blocks (None: the weights' own), `sampler_item` that of the sampler's copy (None:
    the weights' own, in a copy only where they are spread; 0: the engine is not Keel's). `reference` is a model of its
    own, `masters` are those of its moving average in fp32. With `exact` KL the reference's head stays for the update.
    A `teacher` beside it counts as one more copy of the policy.
    """

    pass_item: int | None = None
    sampler_item: int | None = None
    reference: bool = False
    reference_offload: bool = False
    masters: bool = False
    exact: bool = False
    teacher: bool = False
    moments: int = 2


@dataclass(frozen=True)
class StepPasses:
    """What one device does in a step: passes of the update, of the policy without gradient, of the reference; updates.

    `tokens` are those of all completions of the step, at their longest.
    """

    training: int = 1
    scoring: int = 0
    reference: int = 0
    updates: int = 1
    tokens: int = 0


def held(shape: ModelShape, job: RunMemory, layout: DeviceLayout) -> dict[str, int]:
    """Bytes that stay on a device through a run, by part; `gradients` are there while it updates."""
    shards = layout.shards
    device = 0 if layout.spread and layout.offload else 1
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


def passing(shape: ModelShape, job: RunMemory, layout: DeviceLayout, passes: StepPasses) -> dict[str, int]:
    """Bytes that are on a device for the time of a pass, by part, beside activations and KV cache.

    Gathered are the block that computes, the next one, and all that is outside of blocks; in the backward pass there
    are the gradients of a block and of the rest, whole, and their buffer for the sum.
    """
    rows = ROWS * WIRE_ITEM * passes.tokens if layout.devices > 1 else 0
    if not layout.spread:
        return {"gathered": 0, "rows": rows}
    block, rest = _gathered(shape.largest_block, job), _gathered(shape.rest, None)
    grads = _gathered([p for p in shape.largest_block if p.trained], job) + _gathered(_trained(shape.rest), None)
    buffer = max(_numel(_trained(shape.largest_block)), _numel(_trained(shape.rest))) * WIRE_ITEM
    head = max((p.numel * p.itemsize for p in shape.rest), default=0) if job.reference and job.exact else 0
    return {"gathered": 2 * block + rest + grads + buffer + head, "rows": rows}


def sent(shape: ModelShape, job: RunMemory, layout: DeviceLayout, passes: StepPasses) -> dict[str, int]:
    """Bytes that a device sends in a step, by part."""
    devices, shards, replicas = layout.devices, layout.shards, layout.replicas
    whole = sum(_gathered(block, job) for block in shape.blocks) + _gathered(shape.rest, None)
    gather = _ring(whole, shards) if layout.spread else 0.0
    summed_once = shape.adapters if layout.spread else shape.parameters
    gradients = (
        passes.updates * 2 * _ring(sum(max(WIRE_ITEM, p.itemsize) * p.numel for p in _trained(summed_once)), devices)
    )
    if layout.spread:
        in_blocks = sum(_reduced(p, job) for block in shape.blocks for p in _trained(block))
        reduced = in_blocks + sum(p.numel * p.itemsize for p in _trained(shape.rest))
        gradients += passes.training * (_ring(reduced, shards) + 2 * _ring(reduced / shards, replicas))
    own = sum(p.numel * p.itemsize for p in shape.base)
    cast = own if job.sampler_item is None else sum(p.numel * job.sampler_item for p in shape.base)
    parts = {
        "update: gather": 2 * passes.training * gather,
        "update: gradients": gradients,
        "score: gather": (passes.scoring + passes.reference) * gather,
        # Once to copy, and twice for the digests that tell a fresh copy from a stale one.
        "weight sync": _ring(2 * own + cast, shards) if layout.spread and job.sampler_item != 0 else 0.0,
        "groups": _ring(TOKEN_BYTES * passes.tokens, devices),
        "scores": 2 * _ring(SCORES * WIRE_ITEM * passes.tokens, devices),
    }
    return {name: round(count) for name, count in parts.items()}


def _sampler_bytes(shape: ModelShape, job: RunMemory, layout: DeviceLayout) -> int:
    """The sampler's copy, whole on every device; nothing where it reads the policy's own weights."""
    if job.sampler_item is None:
        return sum(p.numel * p.itemsize for p in shape.parameters) if layout.spread else 0
    return job.sampler_item * _numel(shape.parameters)


def _ring(size: float, devices: int) -> float:
    return size * (devices - 1) / devices


def _part_bytes(parameters: Iterable[Parameter], shards: int) -> int:
    return sum(p.part(shards) * p.itemsize for p in parameters)


def _trained(parameters: Iterable[Parameter]) -> list[Parameter]:
    return [p for p in parameters if p.trained]


def _numel(parameters: Iterable[Parameter]) -> int:
    return sum(p.numel for p in parameters)


def _gathered(parameters: Iterable[Parameter], job: RunMemory | None) -> int:
    """Bytes of gathered weights: blocks in the type of the passes, the rest in its own."""
    item = None if job is None else job.pass_item
    return sum(p.numel * (item or p.itemsize) for p in parameters)


def _reduced(parameter: Parameter, job: RunMemory) -> int:
    """Bytes of a gradient as FSDP sums it: in fp32 under mixed precision, else in the weights' type."""
    return parameter.numel * (parameter.itemsize if job.pass_item is None else WIRE_ITEM)
