"""KL by depth: the mean of per-token values in bins of the context position, each twice as wide as the previous one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from keel.base.metrics import Number

FIRST_BIN_TOKENS = 64  # the first bin ends here, the next at 128, 256, …
MIN_COMPLETIONS = 4  # bins with fewer completions are left out, because they give no standard error
METRIC_PREFIX = "kl/sampler_policy/depth_"  # followed by the bin's start, then /mean or /se


def depth_bin(position: Tensor) -> Tensor:
    """The start of each context position's bin: 0, 64, 128, 256, …"""
    doublings = (position.double() / FIRST_BIN_TOKENS).clamp_min(0.5).log2().floor()
    return torch.where(doublings < 0, 0, FIRST_BIN_TOKENS * 2**doublings).long()


def positions(prompts: Sequence[int] | Tensor, width: int, device: torch.device | None = None) -> Tensor:
    """The context position of each completion token `[B, T]`, given the prompts' lengths."""
    return torch.as_tensor(prompts, device=device)[:, None] + torch.arange(width, device=device)


def occupied_bins(where: Tensor, mask: Tensor) -> tuple[int, ...]:
    """The starts of the bins in which at least `MIN_COMPLETIONS` rows have a token of the mask."""
    own = depth_bin(where)
    starts = own[mask].unique().tolist()
    return tuple(start for start in starts if (mask & (own == start)).any(-1).sum() >= MIN_COMPLETIONS)


def mean_by_depth(
    values: Tensor, mask: Tensor, where: Tensor, starts: Sequence[int]
) -> dict[int, tuple[Number, Number]]:
    """Mean and standard error `{start: (mean, se)}` of values `[B, T]`, clustered by completion."""
    result: dict[int, tuple[Number, Number]] = {}
    own, values = depth_bin(where), values.detach().double()
    for start in starts:
        inside = mask & (own == start)
        count = inside.sum().clamp_min(1)
        mean = torch.where(inside, values, 0.0).sum() / count
        residual = torch.where(inside, values - mean, 0.0).sum(-1)
        rows = inside.any(-1).sum()
        squares = rows / (rows - 1).clamp_min(1) * residual.square().sum()
        result[start] = mean, squares.sqrt() / count
    return result


def depth_metrics(values: Tensor, mask: Tensor, where: Tensor, starts: Sequence[int]) -> dict[str, Number]:
    """`mean_by_depth` as metrics; empty if all tokens are in one bin."""
    if len(starts) < 2:
        return {}
    means = mean_by_depth(values, mask, where, starts)
    named = {f"{METRIC_PREFIX}{start}/mean": mean for start, (mean, _) in means.items()}
    return named | {f"{METRIC_PREFIX}{start}/se": se for start, (_, se) in means.items()}
