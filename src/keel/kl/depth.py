"""KL by depth: the mean of per-token values in each stretch of the context, each twice as long as the one before."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from keel.base.metrics import Number

FIRST = 64  # tokens: the first stretch ends there, the next at 128, 256, …
COMPLETIONS = 4  # that must reach a stretch
DEPTH = "kl/sampler_policy/depth_"  # of the metrics, with where a stretch begins and mean or se behind it


def stretch(position: Tensor) -> Tensor:
    """Where the stretch begins that a token at a position of the context lies in: 0, 64, 128, 256, …"""
    doublings = (position.double() / FIRST).clamp_min(0.5).log2().floor()
    return torch.where(doublings < 0, 0, FIRST * 2**doublings).long()


def positions(prompts: Sequence[int] | Tensor, width: int, device: torch.device | None = None) -> Tensor:
    """The position in the context of each token `[B, T]` of completions behind prompts of these lengths."""
    return torch.as_tensor(prompts, device=device)[:, None] + torch.arange(width, device=device)


def occupied(where: Tensor, mask: Tensor) -> tuple[int, ...]:
    """The stretches that hold tokens of at least `COMPLETIONS` rows of the mask: fewer tell no standard error."""
    own = stretch(where)
    starts = own[mask].unique().tolist()
    return tuple(start for start in starts if (mask & (own == start)).any(-1).sum() >= COMPLETIONS)


def by_depth(values: Tensor, mask: Tensor, where: Tensor, starts: Sequence[int]) -> dict[int, tuple[Number, Number]]:
    """Mean and standard error `{start: (mean, se)}` of values `[B, T]`; the completion is the unit of the error."""
    found: dict[int, tuple[Number, Number]] = {}
    own, values = stretch(where), values.detach().double()
    for start in starts:
        inside = mask & (own == start)
        count = inside.sum().clamp_min(1)
        mean = torch.where(inside, values, 0.0).sum() / count
        residual = torch.where(inside, values - mean, 0.0).sum(-1)
        rows = inside.any(-1).sum()
        spread = rows / (rows - 1).clamp_min(1) * residual.square().sum()
        found[start] = mean, spread.sqrt() / count
    return found


def depth_metrics(values: Tensor, mask: Tensor, where: Tensor, starts: Sequence[int]) -> dict[str, Number]:
    """The same as metrics; none where all tokens lie in one stretch."""
    if len(starts) < 2:
        return {}
    found = by_depth(values, mask, where, starts)
    named = {f"{DEPTH}{start}/mean": mean for start, (mean, _) in found.items()}
    return named | {f"{DEPTH}{start}/se": se for start, (_, se) in found.items()}
