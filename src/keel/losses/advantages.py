"""Compute advantages from rewards, within groups of completions of the same prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from keel.base.errors import KeelError, unknown

BASELINES = ("group_mean", "leave_one_out", "none")
SCALES = ("group", "batch", "none")
EPSILON = 1e-4  # added to the standard deviation, as in other trainers


def _group_index(group: Tensor) -> Tensor:
    """An index below B for each group `[B]`, without a device synchronisation."""
    return torch.searchsorted(group.sort().values, group)


def _group_sums(values: Tensor, index: Tensor) -> Tensor:
    return torch.zeros_like(values).index_add_(0, index, values)


def _floating(rewards: Tensor) -> Tensor:
    """Convert rewards to at least fp32, also from integers and booleans."""
    wide = rewards.is_floating_point() and rewards.dtype not in (torch.float16, torch.bfloat16)
    return rewards if wide else rewards.float()


def group_statistics(rewards: Tensor, group: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, unbiased standard deviation and size of each completion's group, each `[B]`.

    A group of one completion has std 0. `weight` `[B]` sums to 1 over the rows of an episode.
    """
    if rewards.dim() != 1 or group.shape != rewards.shape:
        raise KeelError(f"rewards {tuple(rewards.shape)} and group {tuple(group.shape)} must both be [B]")
    rewards = _floating(rewards)
    index = _group_index(group)
    weight = torch.ones_like(rewards) if weight is None else weight.to(rewards.dtype)
    size = _group_sums(weight, index)
    mean = _group_sums(weight * rewards, index) / size
    squares = _group_sums(weight * (rewards - mean[index]).square(), index)
    std = (squares / (size - 1).clamp_min(1)).sqrt()
    return mean[index], std[index], size[index]


def advantages(
    rewards: Tensor, group: Tensor, *, baseline: str = "group_mean", scale: str = "group", epsilon: float = EPSILON
) -> Tensor:
    """A = (R − baseline) / (σ + ε) per completion, `[B]`.

    baseline: `group_mean` (GRPO), `leave_one_out` (RLOO: the mean of the *other* completions), `none`.
    scale: `group` deviation (GRPO), `batch` deviation, `none` (Dr. GRPO 2503.20783).
    """
    if baseline == "leave_one_out" and bool((group_statistics(rewards, group)[2] < 2).any()):
        raise KeelError("baseline leave_one_out needs at least 2 completions per group: raise rollout.num_generations")
    sigma = deviation(rewards, group, baseline=baseline, scale=scale, epsilon=epsilon)
    return centred(rewards, group, baseline) / sigma


def centred(rewards: Tensor, group: Tensor, baseline: str = "group_mean", weight: Tensor | None = None) -> Tensor:
    """R − baseline `[B]`. With a baseline, groups of equal rewards give exactly 0, without rounding errors."""
    if baseline not in BASELINES:
        raise unknown("baseline", baseline, BASELINES)
    mean, _, size = group_statistics(rewards, group, weight)
    rewards = _floating(rewards)
    if baseline == "none":
        return rewards
    above = rewards - mean
    if baseline == "leave_one_out":
        above = above * size / (size - 1)
    return torch.where(zero_variance(rewards, group), torch.zeros_like(above), above)


def deviation(
    rewards: Tensor,
    group: Tensor,
    *,
    baseline: str = "group_mean",
    scale: str = "group",
    epsilon: float = EPSILON,
    weight: Tensor | None = None,
) -> Tensor:
    """σ + ε, the divisor of the advantages, `[B]`; 1 for scale `none`.

    With a baseline, σ is the standard deviation. Without one, σ is the root mean square, because R / std is unbounded
    for groups of equal rewards.
    """
    if scale not in SCALES:
        raise unknown("scale_rewards", scale, SCALES)
    _, std, _ = group_statistics(rewards, group, weight)
    rewards = _floating(rewards)
    if scale == "none":
        return torch.ones_like(rewards)
    if baseline == "none":
        squares = (
            group_statistics(rewards.square(), group, weight)[0]
            if scale == "group"
            else _mean(rewards.square(), weight)
        )
        return squares.sqrt().expand_as(rewards) + epsilon
    if scale == "group":
        return std + epsilon
    if weight is not None:
        return group_statistics(rewards, torch.zeros_like(group), weight)[1] + epsilon
    std = rewards.std() if rewards.numel() > 1 else rewards.new_zeros(())
    return std.expand_as(rewards) + epsilon


def _mean(values: Tensor, weight: Tensor | None) -> Tensor:
    return values.mean() if weight is None else (values * weight).sum() / weight.sum()


def zero_variance(rewards: Tensor, group: Tensor) -> Tensor:
    """True for completions of groups with equal rewards, `[B]`: they have no policy gradient.

    Keep such groups for their KL term.
    """
    rewards = _floating(rewards)
    index = _group_index(group)
    low = torch.full_like(rewards, float("inf")).scatter_reduce_(0, index, rewards, "amin")
    high = torch.full_like(rewards, float("-inf")).scatter_reduce_(0, index, rewards, "amax")
    return (low == high)[index]
