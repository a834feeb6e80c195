"""The weights of a reference, independent of its rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from keel.base.errors import KeelError


class NoSingleModel(KeelError):
    """The reference is no one model: teachers by task, or a server."""


class Sharder(Protocol):
    """Shards a model's weights over the processes, in place."""

    def __call__(self, model: nn.Module, *, offload: bool = False) -> None: ...


class ReferenceWeights(Protocol):
    """Weights to score with: a full copy, or adapters over the policy's own base."""

    def model(self) -> AbstractContextManager[nn.Module]:
        """The model with these weights in effect, without dropout or gradients, until the context is left."""

    def assign(self, policy: nn.Module) -> None:
        """Become the policy as it is now."""

    def blend(self, policy: nn.Module, alpha: float) -> None:
        """Become α × policy + (1 − α) × themselves, in the space of effective weights."""

    def tensors(self) -> dict[str, Tensor]:
        """The tensors to save."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the result of `tensors`."""

    def backup(self) -> Callable[[], None]:
        """Save the current weights; the returned function restores them."""

    def fingerprint(self) -> str:
        """A digest of the effective weights."""

    def shard(self, sharder: Sharder) -> None:
        """Shard weights that are a separate model over the processes, as the policy's."""


def unwrap(model: nn.Module) -> Any:
    """The model inside a distributed wrapper."""
    inner = getattr(model, "module", None)
    return unwrap(inner) if isinstance(inner, nn.Module) else model


class OffloadedTensors:
    """Tensors on the CPU that are moved to the device only while in use."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.device = tensors[0].device if tensors else torch.device("cpu")
        self.pairs = [(tensor, tensor.data.to("cpu")) for tensor in tensors]
        self.offload()

    def restore(self) -> None:
        """Move all tensors back to the device permanently."""
        for tensor, in_memory in self.pairs:
            tensor.data = in_memory.to(self.device)

    def offload(self) -> None:
        """Point each tensor at its CPU copy and drop the device's copy; nothing is copied."""
        for tensor, in_memory in self.pairs:
            tensor.data = in_memory

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """The tensors on the device within the context; if memory runs out, all stay on the CPU."""
        try:
            for tensor, in_memory in self.pairs:
                tensor.data = in_memory.to(self.device)
            yield
        finally:
            self.offload()
