"""Segments of packed rows for varlen attention kernels, and asynchronous copies to a device."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

PADDING = -1  # the prompt index of padding


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to the device; from the CPU through pinned memory, asynchronously."""
    if torch.device(device).type != "cuda" or x.is_cuda:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class Segments:
    """Segments of the flattened rows `[R·L]`, as cumulative lengths (int32).

    Each prompt, each completion and each row's padding is a segment of `cu_seqlens`. In the attention of completions
    to prompts, segment i of `cu_seqlens_q` attends to segment i of `cu_seqlens_k`. A group's completions attend to its
    prompt, and all other tokens to an empty segment. `in_completion` `[R·L]` is true on completion tokens.
    """

    cu_seqlens: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    in_completion: Tensor
    max_seqlen: int
    max_seqlen_q: int
    max_seqlen_k: int
    has_completions: bool

    @staticmethod
    def of(prefix: Tensor, branch: Tensor) -> Segments:
        """Segments from a packed batch's `prefix` and `branch` `[R, L]` on the CPU."""
        rows, length = prefix.shape
        row = torch.arange(rows).repeat_interleave(length)
        prefix, branch = prefix.flatten(), branch.flatten()
        group = _numbered(_changes(row) | _changes(prefix))  # one number per group and per row's padding
        run = _numbered(_changes(group) | _changes(branch))
        in_completion = branch > 0
        totals = torch.bincount(group)
        completions = torch.bincount(group[in_completion], minlength=len(totals))
        prompts, nothing = totals - completions, torch.zeros_like(totals)
        cu_seqlens, max_seqlen = _bounds(torch.bincount(run))
        cu_seqlens_q, max_seqlen_q = _bounds(torch.stack((prompts, completions, nothing), dim=1).flatten())
        cu_seqlens_k, max_seqlen_k = _bounds(torch.stack((nothing, prompts, completions), dim=1).flatten())
        return Segments(
            cu_seqlens,
            cu_seqlens_q,
            cu_seqlens_k,
            in_completion,
            max_seqlen,
            max_seqlen_q,
            max_seqlen_k,
            bool(in_completion.any()),
        )

    def to(self, device: torch.device | str) -> Segments:
        """The same segments on another device."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {name: to_device(x, device) for name, x in values.items() if isinstance(x, Tensor)}
        return replace(self, **moved)


def _changes(values: Tensor) -> Tensor:
    """True at each value that differs from the previous one; false for the first."""
    return torch.cat((torch.zeros(1, dtype=torch.bool), values[1:] != values[:-1]))


def _numbered(changes: Tensor) -> Tensor:
    return changes.cumsum(0)


def _bounds(lengths: Tensor) -> tuple[Tensor, int]:
    """Cumulative lengths, starting from 0, and the longest length."""
    cu_seqlens = torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).int()
    return cu_seqlens, int(lengths.max()) if len(lengths) else 0
