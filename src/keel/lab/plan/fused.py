"""What the fused modules of a GPU keep for the backward pass, on tensors without values."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from keel.models.fuse import fused_kind
from keel.models.low_rank import lora_forward


def fuse_as_on_cuda(model: nn.Module) -> None:
    """Give norms, gated MLPs and LoRA layers in half precision the memory of their fused forms.

    Layers in fp32 stay as they are: under autocast their fused forms keep about as much.
    """
    forwards = {"norm": _norm, "mlp": _mlp, "lora": lora_forward}
    for module in model.modules():
        forward = forwards.get(fused_kind(module) or "")
        if forward is not None and next(module.parameters()).dtype in (torch.float16, torch.bfloat16):
            module.forward = MethodType(forward, module)


class VocabularyKernels:
    """What the kernels of `keel.models.vocab_kernels` allocate."""

    @staticmethod
    def stats(*_: Any) -> None:
        """Write into tensors that are given."""

    @staticmethod
    def gradient(logits: Tensor, *_: Any, dtype: torch.dtype, **__: Any) -> Tensor:
        return logits if dtype == logits.dtype else torch.empty_like(logits, dtype=dtype)


def _norm(self: Any, x: Tensor) -> Tensor:
    out: Tensor = _Norm.apply(x, self.weight)
    return out


def _mlp(self: Any, x: Tensor) -> Tensor:
    down: Tensor = self.down_proj(_GatedSilu.apply(self.gate_proj(x), self.up_proj(x)))
    return down


class _Norm(torch.autograd.Function):
    """Keeps its input and a number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _, weight, _ = ctx.saved_tensors
        return torch.empty_like(grad), torch.empty_like(weight) if ctx.needs_input_grad[1] else None


class _GatedSilu(torch.autograd.Function):
    """Keeps its two inputs."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty_like(grad), torch.empty_like(grad)
