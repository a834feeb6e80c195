"""Rollouts: engines that sample completions from the policy."""

from keel.rollout.native import NativeEngine, Request
from keel.rollout.sampling import SamplingParams

__all__ = ["NativeEngine", "Request", "SamplingParams"]
