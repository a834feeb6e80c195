"""The engine that samples from the policy's own weights: scheduling, KV cache, decoding."""

from keel.rollout.native.engine import NativeEngine

__all__ = ["NativeEngine"]
