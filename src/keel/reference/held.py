"""What a reference holds and shows: the part that every kind of reference shares, whatever moves it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Held(Protocol):
    """Weights to score with: a full copy, or adapters over the policy's own base."""

    def model(self) -> AbstractContextManager[nn.Module]:
        """The model with the held weights in effect, without dropout or gradients, until the context is left."""

    def assign(self, policy: nn.Module) -> None:
        """Become the policy as it is now."""

    def blend(self, policy: nn.Module, alpha: float) -> None:
        """Become α × policy + (1 − α) × held, in the space of effective weights."""

    def tensors(self) -> dict[str, Tensor]:
        """Everything that has to be saved."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `tensors` gave."""

    def fingerprint(self) -> str:
        """A digest of the effective weights."""


def unwrap(model: nn.Module) -> Any:
    """The model inside a distributed wrapper."""
    inner = getattr(model, "module", None)
    return unwrap(inner) if isinstance(inner, nn.Module) else model


class Parked:
    """Tensors that rest on the CPU and visit the device only while they are used."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.device = tensors[0].device if tensors else torch.device("cpu")
        self.pairs = [(tensor, tensor.data.to("cpu")) for tensor in tensors]
        self.park()

    def park(self) -> None:
        """Point each tensor at its copy in main memory; the device's copy is dropped, nothing travels."""
        for tensor, resting in self.pairs:
            tensor.data = resting

    @contextmanager
    def visiting(self) -> Iterator[None]:
        """The tensors on the device until the context is left; a device too full for them leaves all at rest."""
        try:
            for tensor, resting in self.pairs:
                tensor.data = resting.to(self.device)
            yield
        finally:
            self.park()
