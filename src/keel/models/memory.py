"""Microbatch sizing: measured bytes of a training pass against free memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from keel.base.types import Completion, Group, Problem
from keel.models.pack import pack
from keel.models.scorer import hidden_states

_USED = 0.8  # share of free memory to use; the rest is for fragmentation, workspaces and CUDA graphs
SMALLEST_PASS = 256  # tokens; sizes are multiples of it, so that small changes of free memory do not change the size


class PassBytes(NamedTuple):
    """Peak bytes of a training pass of the body: `fixed` (gradients, casts) plus `per_token`."""

    fixed: int
    per_token: float


def fitting_tokens(free: int, passes: PassBytes, later: int = 0) -> int:
    """Tokens of the largest pass that fits in `free` bytes minus the `later` bytes that training allocates afterwards.

    At least SMALLEST_PASS, even if that does not fit.
    """
    tokens = (_USED * free - later - passes.fixed) / max(passes.per_token, 1.0)
    return max(SMALLEST_PASS, int(tokens) // SMALLEST_PASS * SMALLEST_PASS)


def free_bytes(device: torch.device) -> int:
    """Free bytes of a GPU, including those reserved by torch's allocator."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def measure_pass_bytes(
    model: nn.Module, autocast: Callable[[], AbstractContextManager[Any]], *, shared_prefix: bool
) -> PassBytes:
    """Measure two small forward and backward passes. Their difference gives the bytes per token.

    Gradients are larger than the activations of small passes. They are therefore freed at once, and their size is
    added afterwards. Existing gradients are restored.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    before, device = [p.grad for p in trained], next(model.parameters()).device
    hooks = [p.register_post_accumulate_grad_hook(_drop_gradient) for p in trained]
    sizes: list[tuple[int, int, int]] = []
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):  # dropout draws numbers
            for groups in (1, 2, 6):  # the first pass is a warm-up that checks prefix attention once
                packed = pack([_GROUP] * groups, 0, shared_prefix=shared_prefix).to(device)
                with LiveBytes() as live:
                    weights = live.hold((*model.parameters(), *model.buffers()))  # views of weights are not counted
                    with autocast():
                        hidden = hidden_states(model, packed)
                    held = live.now - weights
                    if hidden.requires_grad:
                        hidden.backward(torch.ones_like(hidden))
                    del hidden
                sizes.append((packed.input_ids.numel(), held, live.peak - weights))
    finally:
        for hook in hooks:
            hook.remove()
        for parameter, gradient in zip(trained, before, strict=True):
            parameter.grad = gradient
    _, (tokens, held, peak), (more_tokens, more_held, more_peak) = sizes
    per_token = max(more_held - held, more_peak - peak) / (more_tokens - tokens)
    gradients = sum(p.numel() * p.itemsize for p in trained)
    return PassBytes(gradients + max(0, int(held - per_token * tokens)), per_token)


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _completion(length: int) -> Completion:
    zeros = (0.0,) * length
    return Completion((1,) * length, (True,) * length, zeros, zeros, "", "length")


_GROUP = Group(Problem("", ""), (1,) * 32, (_completion(33),) * 3)


class LiveBytes(TorchDispatchMode):
    """Counts the live bytes of storages that operations allocate in this mode.

    `hold` adds earlier allocations. Fragmentation and workspaces are not counted. Fake tensors are supported.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def hold(self, tensors: Iterable[Tensor]) -> int:
        """Count tensors that already exist; return the bytes that were not counted before."""
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
