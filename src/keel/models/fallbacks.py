"""What a model's training passes on a GPU compute another way than the fastest, and why: for the notes of a run."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from keel.models.chunked import why_not_one_kernel
from keel.models.flash_prefix import why_not_flash
from keel.models.head import body_of, head_of
from keel.models.prefix_attention import attends_by_flash, head_size, why_not_by_structure


def fallback_notes(model: nn.Module, amp_dtype: torch.dtype | None = None, *, planned: bool = False) -> tuple[str, ...]:
    """A line for each: attention, the vocabulary's statistics, norms and MLPs.

    `planned`: it will be on a GPU, which is taken for a new one.
    """
    body: Any = body_of(model)
    like = next(body.parameters())
    with torch.autocast(like.device.type, dtype=amp_dtype, enabled=amp_dtype is not None):
        reason = why_not_flash(like, head_size(body), planned=planned) or why_not_by_structure(body)
        if reason is None and like.is_cuda and not attends_by_flash(body):
            reason = "a trial showed that it is not plain attention"
    attention = () if reason is None else (f"attention of the training passes is not by flash kernels: {reason}",)
    reason = why_not_one_kernel(like, head_of(model), planned=planned)
    statistics = () if reason is None else (f"statistics of the vocabulary are not by one kernel: {reason}",)
    written_out = sorted({type(module).__name__ for module in body.modules() if _is_written_out(module)})
    modules = (f"{', '.join(written_out)} have no fused form and are computed by single operations",)
    return (*attention, *statistics, *(modules if written_out else ()))


def _is_written_out(module: nn.Module) -> bool:
    """Whether it is an RMS norm or an MLP with the forward of its class; torch's own norms are one kernel anyway."""
    return type(module).__name__.endswith(("RMSNorm", "MLP")) and "forward" not in vars(module)
