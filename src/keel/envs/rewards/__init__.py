"""Reward functions by name, and their combination."""

from keel.envs.rewards.part import AGGREGATES, RewardFunction, RewardPart, as_reward, combine, wrap
from keel.envs.rewards.registry import REWARDS, TASK, build_reward, build_rewards, check_reward, probe_rewards
from keel.envs.rewards.text import code, cosine, exact, format, ladder, length, numeric, regex, tag_count

__all__ = [
    "AGGREGATES",
    "REWARDS",
    "TASK",
    "RewardFunction",
    "RewardPart",
    "as_reward",
    "build_reward",
    "build_rewards",
    "check_reward",
    "code",
    "combine",
    "cosine",
    "exact",
    "format",
    "ladder",
    "length",
    "numeric",
    "probe_rewards",
    "regex",
    "tag_count",
    "wrap",
]
