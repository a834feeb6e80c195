"""From rewards to advantages, within groups of completions of the same prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from keel.base.errors import KeelError, unknown

BASELINES = ("group_mean", "leave_one_out", "none")
SCALES = ("group", "batch", "none")
EPSILON = 1e-4  # added to the standard deviation, as peers do


def _numbered(group: Tensor) -> Tensor:
    """One number below B for each group `[B]`; how many groups there are, only the device knows."""
    return torch.searchsorted(group.sort().values, group)


def _group_sums(values: Tensor, index: Tensor) -> Tensor:
    return torch.zeros_like(values).index_add_(0, index, values)


def _floating(rewards: Tensor) -> Tensor:
    """fp32 at least; whole numbers and booleans are rewards too."""
    wide = rewards.is_floating_point() and rewards.dtype not in (torch.float16, torch.bfloat16)
    return rewards if wide else rewards.float()


def group_statistics(rewards: Tensor, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, unbiased standard deviation and size of each completion's group, each `[B]`; a lone one has std 0."""
    if rewards.dim() != 1 or group.shape != rewards.shape:
        raise KeelError(f"rewards {tuple(rewards.shape)} and group {tuple(group.shape)} must both be [B]")
    rewards = _floating(rewards)
    index = _numbered(group)
    size = _group_sums(torch.ones_like(rewards), index)
    mean = _group_sums(rewards, index) / size
    squares = _group_sums((rewards - mean[index]).square(), index)
    std = (squares / (size - 1).clamp_min(1)).sqrt()
    return mean[index], std[index], size[index]


def advantages(
    rewards: Tensor, group: Tensor, *, baseline: str = "group_mean", scale: str = "group", epsilon: float = EPSILON
) -> Tensor:
    """A = (R − baseline) / (σ + ε), one a completion, `[B]`.

    baseline: `group_mean` (GRPO), `leave_one_out` (RLOO: the mean of the *other* completions), `none`.
    scale: `group` deviation (GRPO), `batch` deviation, `none` (Dr. GRPO 2503.20783).
    """
    if baseline == "leave_one_out" and bool((group_statistics(rewards, group)[2] < 2).any()):
        raise KeelError("baseline leave_one_out needs at least 2 completions a group: raise num_generations")
    spread = deviation(rewards, group, baseline=baseline, scale=scale, epsilon=epsilon)
    return centred(rewards, group, baseline) / spread


def centred(rewards: Tensor, group: Tensor, baseline: str = "group_mean") -> Tensor:
    """R − baseline `[B]`. Under a baseline a group of equal rewards is exactly 0: its mean's rounding is no signal."""
    if baseline not in BASELINES:
        raise unknown("baseline", baseline, BASELINES)
    mean, _, size = group_statistics(rewards, group)
    rewards = _floating(rewards)
    if baseline == "none":
        return rewards
    above = rewards - mean
    if baseline == "leave_one_out":
        above = above * size / (size - 1)
    return torch.where(zero_variance(rewards, group), torch.zeros_like(above), above)


def deviation(
    rewards: Tensor, group: Tensor, *, baseline: str = "group_mean", scale: str = "group", epsilon: float = EPSILON
) -> Tensor:
    """σ + ε, what advantages are divided by, `[B]`; ones for scale `none`.

    σ is measured from the baseline: the standard deviation about a mean; without a baseline the root mean square, as
    R / std would grow without bound where a group's rewards agree.
    """
    if scale not in SCALES:
        raise unknown("scale_rewards", scale, SCALES)
    _, std, _ = group_statistics(rewards, group)
    rewards = _floating(rewards)
    if scale == "none":
        return torch.ones_like(rewards)
    if baseline == "none":
        squares = group_statistics(rewards.square(), group)[0] if scale == "group" else rewards.square().mean()
        return squares.sqrt().expand_as(rewards) + epsilon
    if scale == "group":
        return std + epsilon
    spread = rewards.std() if rewards.numel() > 1 else rewards.new_zeros(())
    return spread.expand_as(rewards) + epsilon


def zero_variance(rewards: Tensor, group: Tensor) -> Tensor:
    """True for completions whose whole group has one and the same reward: no signal in the policy term, `[B]`.

    Their KL term stays: dropping the group would also drop the penalty on it.
    """
    rewards = _floating(rewards)
    index = _numbered(group)
    low = torch.full_like(rewards, float("inf")).scatter_reduce_(0, index, rewards, "amin")
    high = torch.full_like(rewards, float("-inf")).scatter_reduce_(0, index, rewards, "amax")
    return (low == high)[index]
