"""Rollouts: engines that sample completions from the policy."""

from keel.rollout.engine import Engine, WrappedEngine
from keel.rollout.native.engine import NativeEngine
from keel.rollout.registry import ENGINES, build_engine
from keel.rollout.request import Request, Turn
from keel.rollout.sampling import SamplingParams

__all__ = ["ENGINES", "Engine", "NativeEngine", "Request", "SamplingParams", "Turn", "WrappedEngine", "build_engine"]
