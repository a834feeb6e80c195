"""Rollouts: engines that sample completions from the policy."""

from keel.rollout.native.engine import NativeEngine
from keel.rollout.request import Request, Turn
from keel.rollout.sampling import SamplingParams

__all__ = ["NativeEngine", "Request", "SamplingParams", "Turn"]
