"""Engines sample completions from the policy; `keel.rollout.registry` builds them by name."""

from typing import TYPE_CHECKING

from keel.base import lazy_attributes

if TYPE_CHECKING:
    from keel.rollout.engine import Engine, EngineWrapper
    from keel.rollout.request import Request, Turn
    from keel.rollout.sampling import SamplingParams
else:
    __getattr__ = lazy_attributes(__name__, "engine request sampling")

__all__ = ["Engine", "EngineWrapper", "Request", "SamplingParams", "Turn"]
