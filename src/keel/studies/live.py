"""Bytes of live tensors: what a computation holds at its peak, measured on real tensors or foretold on fake ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations make while the mode is on, each once, until they are freed.

    What was there before is counted by `hold`. The sum does not know what an allocator keeps beside it (fragments,
    workspaces), and on fake tensors it costs no memory at all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def hold(self, tensors: Iterable[Tensor]) -> int:
        """Count tensors that are there already; returns the bytes that were new."""
        before = self.now
        for tensor in tensors:
            self._add(tensor)
        return self.now - before

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in tree_iter(result):
            if isinstance(item, torch.Tensor):
                self._add(item)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        size = storage.nbytes()
        self._seen[storage] = size
        weakref.finalize(storage, self._free, size)
        self.now += size
        self.peak = max(self.peak, self.now)

    def _free(self, size: int) -> None:
        self.now -= size
