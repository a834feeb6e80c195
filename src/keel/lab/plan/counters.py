"""Counters of a computation, on real tensors or on fake ones: FLOPs, and what autocast widens on CUDA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry


class FlopCounter(TorchDispatchMode):
    """Counts the FLOPs of matrix products and attention.

    torch's own counter marks modules with hooks on their gradients, which keep a recomputed layer's tensors alive until
    the end of the backward pass; this one holds nothing, so that it can stand beside `LiveBytes`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if packet is _ATTENTION:
            self.total += _attention(*args[:3])
        elif packet is _ATTENTION_BACKWARD:
            self.total += 2.5 * _attention(*args[1:4])  # five products for the forward's two
        elif packet is torch.ops.aten._flash_attention_forward:
            self.total += _flash(args[0], args[1], args[2], bounds=args[3], causal=args[8])
        elif packet is torch.ops.aten._flash_attention_backward:
            self.total += 2.5 * _flash(args[1], args[2], args[3], bounds=args[6], causal=args[11])
        elif packet in flop_registry:
            self.total += flop_registry[packet](*args, **(kwargs or {}), out_val=result)
        return result


_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _attention(query: Tensor, key: Tensor, value: Tensor) -> float:
    """Two products over all pairs of tokens, those that a mask hides included."""
    return 2.0 * query.shape[:-1].numel() * key.shape[-2] * (key.shape[-1] + value.shape[-1])


def _flash(query: Tensor, key: Tensor, value: Tensor, *, bounds: Tensor, causal: bool) -> float:
    """The same over runs of tokens, taken to be of one length: fake bounds cannot be read."""
    pairs = query.shape[0] * key.shape[0] / (len(bounds) - 1) * (0.5 if causal else 1.0)
    return 2.0 * query.shape[1] * pairs * (key.shape[-1] + value.shape[-1])


class CudaAutocast(TorchFunctionMode):
    """What autocast does on CUDA beyond what it does on a CPU: these functions compute in fp32, and keep fp32 inputs.

    GPT-2's activation is made of a power, so its intermediate results are twice as large there.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.__name__ in _IN_FP32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = tree_map(_widened, (args, dict(kwargs or {})))
        return func(*args, **(kwargs or {}))


_NORMS = {"group_norm", "layer_norm", "log_softmax", "logsumexp", "norm", "softmax"}
_SUMS = {"cumprod", "cumsum", "prod", "sum"}
_POWERS = {"__pow__", "__rpow__", "exp", "expm1", "log", "log10", "log1p", "log2", "pow", "reciprocal", "rsqrt"}
_IN_FP32 = _NORMS | _SUMS | _POWERS | {"softplus"}


def _widened(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.dtype in (torch.bfloat16, torch.float16) else x
