"""Rollouts: engines that sample completions from the policy."""

from keel.rollout.engine import Engine, EngineWrapper
from keel.rollout.native.engine import NativeEngine
from keel.rollout.registry import ENGINES, build_engine
from keel.rollout.request import Request, Turn
from keel.rollout.sampling import SamplingParams

__all__ = ["ENGINES", "Engine", "EngineWrapper", "NativeEngine", "Request", "SamplingParams", "Turn", "build_engine"]
