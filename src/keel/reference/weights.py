"""The weights of a reference: what every kind of reference shares, whatever moves it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Sharder(Protocol):
    """Spreads a model's weights over the processes, in place."""

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
        """Everything that has to be saved."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `tensors` gave."""

    def backup(self) -> Callable[[], None]:
        """Remember the weights as they are now; what is returned puts them back."""

    def fingerprint(self) -> str:
        """A digest of the effective weights."""

    def shard(self, sharder: Sharder) -> None:
        """Spread weights that are a model of their own over the processes, as the policy's are by now."""


def unwrap(model: nn.Module) -> Any:
    """The model inside a distributed wrapper."""
    inner = getattr(model, "module", None)
    return unwrap(inner) if isinstance(inner, nn.Module) else model


class OffloadedTensors:
    """Tensors in main memory that are on the device only while they are used."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.device = tensors[0].device if tensors else torch.device("cpu")
        self.pairs = [(tensor, tensor.data.to("cpu")) for tensor in tensors]
        self.offload()

    def restore(self) -> None:
        """All tensors back on the device, for good."""
        for tensor, in_memory in self.pairs:
            tensor.data = in_memory.to(self.device)

    def offload(self) -> None:
        """Point each tensor at its copy in main memory; the device's copy is dropped, nothing travels."""
        for tensor, in_memory in self.pairs:
            tensor.data = in_memory

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """The tensors on the device until the context is left; a device too full for them leaves all in main memory."""
        try:
            for tensor, in_memory in self.pairs:
                tensor.data = in_memory.to(self.device)
            yield
        finally:
            self.offload()
