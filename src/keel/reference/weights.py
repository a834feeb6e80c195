"""The weights of a reference, independent of its rule: the interface, offloading, and a full copy of the policy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from keel.base.errors import KeelError
from keel.models.fingerprint import fingerprint, persistent_buffers
from keel.models.head import evaluating
from keel.models.sharding import copy_into, gather_to_cpu, local_tensor


class NoSingleModel(KeelError):
    """The reference is not a single model: it is several teachers by task, or a server."""


class Sharder(Protocol):
    """Shards a model's weights over the processes, in place."""

    def __call__(self, model: nn.Module, *, offload: bool = False) -> None: ...


class ReferenceWeights(Protocol):
    """Weights to score with: a full copy, or adapters over the policy's own base."""

    def model(self) -> AbstractContextManager[nn.Module]:
        """The model with these weights in effect, without dropout or gradients, until the context is left."""

    def assign(self, policy: nn.Module) -> None:
        """Become a copy of the current policy."""

    def blend(self, policy: nn.Module, alpha: float) -> None:
        """Become α·policy + (1 − α)·reference, averaging effective weights."""

    def tensors(self) -> dict[str, Tensor]:
        """The tensors to save."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the result of `tensors`."""

    def backup(self) -> Callable[[], None]:
        """Save the current weights; the returned function restores them."""

    def fingerprint(self) -> str:
        """A digest of the effective weights."""

    def shard(self, sharder: Sharder) -> None:
        """Shard the weights over the processes like the policy's, if they are a separate model."""


class FrozenWeights:
    """A teacher's weights, which never move. A checkpoint stores only their fingerprint; a resume loads them again."""

    def assign(self, policy: nn.Module) -> None:
        raise NotImplementedError("a teacher never becomes the policy")

    def blend(self, policy: nn.Module, alpha: float) -> None:
        raise NotImplementedError("a teacher never becomes the policy")

    def tensors(self) -> dict[str, Tensor]:
        return {}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Nothing to restore; the fingerprint check detects a changed model."""

    def backup(self) -> Callable[[], None]:
        return lambda: None


def unwrap(model: nn.Module) -> Any:
    """The model inside a distributed wrapper."""
    inner = getattr(model, "module", None)
    return unwrap(inner) if isinstance(inner, nn.Module) else model


class OffloadedTensors:
    """Tensors that stay on the CPU and are copied to the device only while in use."""

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


class FullCopy:
    """A frozen copy of the policy; `offload` keeps it on the CPU between uses, except its head.

    The exact KL applies the reference's head during the policy's pass, outside the context, so the head stays on the
    device.
    """

    def __init__(self, policy: nn.Module, *, offload: bool = False) -> None:
        self._copy = copy.deepcopy(unwrap(policy)).eval().requires_grad_(False)
        self._copy.zero_grad(set_to_none=True)
        self._tensors = _state(self._copy)
        # fp32 masters: in lower precision a moving average stalls, because small steps round to 0.
        self._masters: dict[str, Tensor] = {}
        self._offloaded = OffloadedTensors(movable(self._copy)) if offload else None

    @contextmanager
    def model(self) -> Iterator[nn.Module]:
        with self._offloaded.on_device() if self._offloaded else nullcontext(), evaluating(self._copy):
            yield self._copy

    @torch.no_grad()
    def assign(self, policy: nn.Module) -> None:
        for name, source in self._sources(policy):
            copy_into(self._tensors[name], source)
        self._masters.clear()

    @torch.no_grad()
    def blend(self, policy: nn.Module, alpha: float) -> None:
        for name, source in self._sources(policy):
            tensor = self._tensors[name]
            if not tensor.is_floating_point():
                tensor.copy_(source)  # integer buffers are not averaged
                continue
            if tensor.dtype in (torch.float32, torch.float64):
                tensor.lerp_(source.to(tensor), alpha)
                continue
            master = self._masters.setdefault(name, tensor.float())
            tensor.copy_(master.lerp_(source.to(master), alpha))

    def tensors(self) -> dict[str, Tensor]:
        tensors = {name: self._masters.get(name, tensor.detach()) for name, tensor in self._tensors.items()}
        return {name: gather_to_cpu(tensor) for name, tensor in tensors.items()}

    def backup(self) -> Callable[[], None]:
        parts = {name: local_tensor(tensor.detach()).clone() for name, tensor in self._tensors.items()}
        masters = {name: master.clone() for name, master in self._masters.items()}

        def restore() -> None:
            with torch.no_grad():
                for name, tensor in self._tensors.items():
                    local_tensor(tensor).copy_(parts[name])
            self._masters = masters

        return restore

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        if set(tensors) != set(self._tensors):
            raise KeelError("the saved reference belongs to another model: its parameters have other names")
        for name, tensor in self._tensors.items():
            if tensors[name].shape != tensor.shape:
                raise KeelError(
                    f"the saved reference belongs to another model: {name} has shape {tuple(tensors[name].shape)}"
                )
        self._masters.clear()
        for name, tensor in self._tensors.items():
            copy_into(tensor, tensors[name])
            if tensors[name].dtype != tensor.dtype:
                master = torch.empty_like(tensor, dtype=tensors[name].dtype)
                copy_into(master, tensors[name])
                self._masters[name] = master

    def shard(self, sharder: Sharder) -> None:
        offloaded, self._offloaded = self._offloaded, None
        if offloaded is not None:
            offloaded.restore()
        sharder(self._copy, offload=offloaded is not None)
        self._tensors = _state(self._copy)

    def fingerprint(self) -> str:
        return fingerprint(self._copy)

    def _sources(self, policy: nn.Module) -> Iterator[tuple[str, Tensor]]:
        policy_tensors = _state(unwrap(policy))
        if set(policy_tensors) != set(self._tensors):
            raise KeelError("the reference is not a copy of this policy's model: build it from the same model")
        yield from ((name, tensor.detach()) for name, tensor in policy_tensors.items())


def _state(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers by name, which the fingerprint covers."""
    return {**dict(model.named_parameters()), **dict(persistent_buffers(model))}


def movable(model: nn.Module) -> list[Tensor]:
    """All tensors of the model except those of its output head."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    stays = {id(tensor) for tensor in head.parameters()} if isinstance(head, nn.Module) else set()
    return [tensor for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in stays]
