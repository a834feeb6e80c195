"""What of the fast passes on a GPU a model cannot take, by name."""

from __future__ import annotations

import torch
from torch import nn

from keel.models.chunked import why_not_one_kernel
from keel.models.flash_prefix import why_not_flash
from keel.models.head import body_of, head_of
from keel.models.prefix_attention import attends_by_flash, head_size, why_not_by_structure


def fallback_notes(model: nn.Module, device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
    """A line for each part of a pass in `dtype` on `device` that takes the slower way, and why; none on a CPU.

    Of a model that is not there yet it tells what can be told without a trial.
    """
    if device.type != "cuda":
        return ()
    body = body_of(model)
    weight = next(body.parameters())
    like, planned = torch.empty(0, dtype=dtype, device=weight.device), not weight.is_cuda
    attention = why_not_by_structure(body) or why_not_flash(like, head_size(body), planned=planned)
    if attention is None and not planned:
        with torch.autocast("cuda", dtype, enabled=weight.dtype != dtype):
            attention = None if attends_by_flash(body) else "it computes something else than plain attention"
    statistics = why_not_one_kernel(like, head_of(model), planned=planned)
    notes = (
        ("rows are attended without flash kernels", attention),
        ("the vocabulary's statistics are computed without a kernel of their own", statistics),
    )
    return tuple(f"slower on this GPU: {what}, because {reason}" for what, reason in notes if reason is not None)
