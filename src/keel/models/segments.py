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

    Each prompt, each completion and the padding of each row is a run of `bounds`. `completions` indexes the tokens of
    all completions and `prompts` those of their prompts; a group's are a run of `completion_bounds` and of
    `prompt_bounds`.
    """

    bounds: Tensor
    completions: Tensor
    completion_bounds: Tensor
    prompts: Tensor
    prompt_bounds: Tensor
    longest: int
    longest_completions: int
    longest_prompt: int

    @staticmethod
    def of(prefix: Tensor, branch: Tensor) -> Segments:
        """From the two numbers a token `[R, L]` of a packed batch; on the CPU, so that nothing waits for a device."""
        rows, length = prefix.shape
        row = torch.arange(rows).repeat_interleave(length)
        prefix, branch = prefix.flatten(), branch.flatten()
        group = _numbered(_changes(row) | _changes(prefix))  # each prompt with its completions, each row's padding
        run = _numbered(_changes(group) | _changes(branch))
        is_completion = branch > 0
        counts = torch.bincount(group[is_completion], minlength=int(group[-1]) + 1)
        is_prompt = ~is_completion & (prefix != PADDING) & (counts > 0)[group]
        bounds, longest = _bounds(torch.bincount(run))
        completion_bounds, longest_completions = _bounds(counts[counts > 0])
        prompt_bounds, longest_prompt = _bounds(torch.bincount(group[is_prompt], minlength=len(counts))[counts > 0])
        completions, prompts = (mask.nonzero().squeeze(1) for mask in (is_completion, is_prompt))
        return Segments(
            bounds,
            completions,
            completion_bounds,
            prompts,
            prompt_bounds,
            longest,
            longest_completions,
            longest_prompt,
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
