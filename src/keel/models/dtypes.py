"""Floating-point dtypes: names, device support and rounding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from keel.base.errors import KeelError
from keel.models.head import module_dtype

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


def has_bfloat16(device: torch.device) -> bool:
    """Whether a device supports bfloat16 natively; GPUs before Ampere do not."""
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def check_bfloat16(option: str, dtype: torch.dtype | None, device: torch.device, instead: str) -> None:
    """Refuse bfloat16 if the GPU only emulates it."""
    if dtype == torch.bfloat16 and not has_bfloat16(device):
        raise KeelError(f"{option}=bfloat16: this GPU has no bfloat16 (Ampere or later is needed): use {instead}")


def matmul_eps(model: nn.Module) -> float:
    """The relative rounding of the model's matrix products; TF32 has ten mantissa bits."""
    dtype = module_dtype(model)
    if dtype == torch.float32 and next(model.parameters()).is_cuda and _tf32():
        return 2.0**-10
    return torch.finfo(dtype).eps


def _tf32() -> bool:
    """Whether fp32 products are rounded to TF32. torch raises for the old flag if the new one has been set."""
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", "none")
    return precision == "tf32" if precision != "none" else torch.backends.cuda.matmul.allow_tf32


@contextmanager
def ieee_matmuls() -> Iterator[None]:
    """Within this context, fp32 products on a GPU are not rounded to TF32."""
    matmul = torch.backends.cuda.matmul
    older = getattr(matmul, "fp32_precision", "none") == "none"
    flag, ieee = ("allow_tf32", False) if older else ("fp32_precision", "ieee")
    before = getattr(matmul, flag)
    setattr(matmul, flag, ieee)
    try:
        yield
    finally:
        setattr(matmul, flag, before)
