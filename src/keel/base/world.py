"""The processes of a run: rank, number of processes, and collectives between them.

Every process draws all problems, samples its share and gathers all groups. It runs its share of the passes and
gathers all scores. All ranks therefore branch alike. Only rank 0 writes files.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from keel.base.errors import KeelError
from keel.base.metrics import Metric, Metrics, merge, to_host
from keel.base.redact import masked
from keel.base.watchdog import PeerFailed, process_count, process_rank, rendezvous, watch_next_rank

T = TypeVar("T")
BUCKET_ELEMENTS = 2**24  # elements of one all_reduce
COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # longest wait of a collective, such as for rank 0's report


@dataclass(frozen=True)
class World:
    """`rank` of `size` processes. With one process, collectives return at once.

    All processes call the collectives in the same order. `group` None is the default process group.
    """

    rank: int = 0
    size: int = 1
    group: Any = field(default=None, compare=False)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    def new_group(self) -> World:
        """The same processes over separate connections, for a thread whose collectives run beside the main thread's."""
        if self.size == 1:
            return self
        return FailFastWorld(self.rank, self.size, dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT))

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """If one process of a `new_group` fails in the block, all processes raise."""
        yield

    def shard(self, items: Sequence[T]) -> Sequence[T]:
        """This process's items: every `size`-th."""
        return items[self.rank :: self.size]

    def all_gather(self, value: T) -> list[T]:
        """The values of all processes, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_to_main(self, value: T) -> list[T] | None:
        """The values of all processes, by rank, on rank 0; None on the others."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_main else None
        dist.gather_object(value, values, dst=0, group=self.group)
        return values

    def broadcast(self, value: T) -> T:
        """Rank 0's value."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def any(self, flag: bool) -> bool:
        """Whether the flag is true on any rank."""
        return flag if self.size == 1 else any(self.all_gather(flag))

    def barrier(self) -> None:
        """Wait until all processes have called this."""
        if self.size > 1:
            dist.barrier(group=self.group)

    def reduce(self, metrics: Metrics) -> dict[str, Metric]:
        """Merge the metrics of all processes, as Python numbers; exact, for quantiles too."""
        merged: dict[str, Metric] = {}
        for part in self.all_gather(to_host(metrics)):
            merged = merge(merged, part)
        return merged

    def mesh(self, device: torch.device, shard_size: int | None = None) -> DeviceMesh:
        """A 1-D mesh, or a 2-D mesh whose rows of `shard_size` processes each hold one copy of the weights."""
        if shard_size is None:
            return init_device_mesh(device.type, (self.size,), mesh_dim_names=("shard",))
        if self.size % shard_size:
            raise KeelError(
                f"{self.size} processes cannot be divided into groups of {shard_size}: set parallel.shard_size to a "
                f"divisor of {self.size}"
            )
        shape = (self.size // shard_size, shard_size)
        return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))

    def all_reduce_(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over all processes; half precision is summed in fp32."""
        if self.size == 1:
            return
        for bucket in _buckets(tensors):
            wide = torch.promote_types(bucket[0].dtype, torch.float32)
            flat = torch.cat([tensor.detach().reshape(-1).to(wide) for tensor in bucket])
            dist.all_reduce(flat, group=self.group)
            for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(part.view_as(tensor))


@dataclass(frozen=True)
class _Failed:
    """Sent instead of a value after a failure."""


@dataclass(frozen=True)
class FailFastWorld(World):
    """After a failure in `fail_together`, the next collective of the other processes raises `PeerFailed`."""

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        try:
            yield
            self.all_gather(None)
        except PeerFailed:
            raise
        except BaseException:
            with suppress(RuntimeError):  # the connections are closed
                super().all_gather(_Failed())
            raise

    def all_gather(self, value: T) -> list[T]:
        values = super().all_gather(value)
        for rank, other in enumerate(values):
            if isinstance(other, _Failed):
                raise PeerFailed(f"rank {rank} of {self.size} has failed")
        return values

    def gather_to_main(self, value: T) -> list[T] | None:
        values = self.all_gather(value)
        return values if self.is_main else None

    def broadcast(self, value: T) -> T:
        return self.all_gather(value)[0]

    def barrier(self) -> None:
        self.all_gather(None)


SINGLE_PROCESS = World()


def is_main_process() -> bool:
    """Whether this is rank 0 or the only process."""
    return process_rank() == 0


@contextmanager
def open_world(device: str = "auto", *, settings: Mapping[str, Any] | None = None, resume: str = "") -> Iterator[World]:
    """The processes that torchrun or another launcher started; SINGLE_PROCESS if there is one.

    All must have the same `settings`. If one fails, all end, and the error shows the command `resume`.
    """
    if process_count() == 1:
        yield SINGLE_PROCESS
        return
    if dist.is_initialized():  # an outer call opened the group and closes it
        yield World(dist.get_rank(), dist.get_world_size())
        return
    world = World(process_rank(), process_count())
    if not world.is_main:
        logging.getLogger("keel").setLevel(logging.ERROR)
        warnings.simplefilter("ignore")
    with rendezvous(resume) as store:
        if device.startswith("cuda:"):
            raise KeelError(f"model.device={device} names one device for {world.size} processes: set model.device=cuda")
        cuda = torch.cuda.is_available() and device != "cpu"
        if cuda:
            _set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(
            backend, store=store, rank=world.rank, world_size=world.size, timeout=COLLECTIVE_TIMEOUT
        )
        with watch_next_rank(resume):
            _check_same_settings(world, settings or {})
            yield world
        dist.destroy_process_group()


def _check_same_settings(world: World, own: Mapping[str, Any]) -> None:
    """Refuse ranks whose settings differ from rank 0's."""
    first = world.broadcast(own)
    different = [name for name in dict.fromkeys((*first, *own)) if first.get(name) != own.get(name)]
    for rank, names in enumerate(world.all_gather([(name, own.get(name)) for name in different])):
        if names:
            name, value = names[0]
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise KeelError(
                f"rank {rank} of {world.size} has {name} {masked(value, name)}, rank 0 has "
                f"{masked(first.get(name), name)}{more}: start all ranks "
                "with the same command on the same installation"
            )


def _set_device(local_rank: int) -> None:
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise KeelError(
            f"local rank {local_rank} has no CUDA device, this machine has {count}: start at most {count} "
            "processes here, or set model.device=cpu"
        )
    torch.cuda.set_device(local_rank)


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive tensors of one dtype and device, up to BUCKET_ELEMENTS."""
    bucket: list[Tensor] = []
    count = 0
    for tensor in tensors:
        alike = not bucket or (bucket[0].dtype, bucket[0].device) == (tensor.dtype, tensor.device)
        if bucket and (not alike or count + tensor.numel() > BUCKET_ELEMENTS):
            yield bucket
            bucket, count = [], 0
        bucket.append(tensor)
        count += tensor.numel()
    if bucket:
        yield bucket
