"""Runs of tokens in packed rows, as attention kernels want them, and the way of a tensor to its device."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

PADDING = -1  # the prompt that a token of padding belongs to


def to_device(x: Tensor, device: torch.device | str) -> Tensor:
    """The tensor on the device; from main memory by pinned pages, so that nobody waits for the copy."""
    if torch.device(device).type != "cuda" or x.is_cuda:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class Segments:
    """Runs of tokens in the flattened rows `[R·L]`, as cumulative lengths (int32).

    Each prompt, each completion and the padding of each row is a run of `bounds`. For the attention of completions to
    their prompts, run i of `query_bounds` looks at run i of `key_bounds`: all of a group's completions at its prompt,
    what else there is at nothing, so that no token has to be moved. `in_completion` `[R·L]` says who looks at a prompt.
    """

    bounds: Tensor
    query_bounds: Tensor
    key_bounds: Tensor
    in_completion: Tensor
    longest: int
    longest_query: int
    longest_key: int
    has_completions: bool

    @staticmethod
    def of(prefix: Tensor, branch: Tensor) -> Segments:
        """From the two numbers a token `[R, L]` of a packed batch; on the CPU, so that nothing waits for a device."""
        rows, length = prefix.shape
        row = torch.arange(rows).repeat_interleave(length)
        prefix, branch = prefix.flatten(), branch.flatten()
        group = _numbered(_changes(row) | _changes(prefix))  # each prompt with its completions, each row's padding
        run = _numbered(_changes(group) | _changes(branch))
        in_completion = branch > 0
        totals = torch.bincount(group)
        completions = torch.bincount(group[in_completion], minlength=len(totals))
        prompts, nothing = totals - completions, torch.zeros_like(totals)
        bounds, longest = _bounds(torch.bincount(run))
        query_bounds, longest_query = _bounds(torch.stack((prompts, completions, nothing), dim=1).flatten())
        key_bounds, longest_key = _bounds(torch.stack((nothing, prompts, completions), dim=1).flatten())
        return Segments(
            bounds,
            query_bounds,
            key_bounds,
            in_completion,
            longest,
            longest_query,
            longest_key,
            bool(in_completion.any()),
        )

    def to(self, device: torch.device | str) -> Segments:
        """The same runs on another device."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {name: to_device(x, device) for name, x in values.items() if isinstance(x, Tensor)}
        return replace(self, **moved)


def _changes(values: Tensor) -> Tensor:
    """Where a value differs from the one before; the first is no change."""
    return torch.cat((torch.zeros(1, dtype=torch.bool), values[1:] != values[:-1]))


def _numbered(changes: Tensor) -> Tensor:
    return changes.cumsum(0)


def _bounds(lengths: Tensor) -> tuple[Tensor, int]:
    """Cumulative lengths from 0, and the longest."""
    bounds = torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).int()
    return bounds, int(lengths.max()) if len(lengths) else 0
