"""The native engine: scheduling, KV cache, decoding."""

from keel.rollout.native.engine import NativeEngine

__all__ = ["NativeEngine"]
