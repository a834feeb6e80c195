"""What an engine is: it samples completions from the policy. Engines are made by name in `keel.rollout.registry`."""

from typing import TYPE_CHECKING

from keel.base.lazy import lazy_attributes

if TYPE_CHECKING:
    from keel.rollout.engine import Engine, EngineWrapper
    from keel.rollout.request import Request, Turn
    from keel.rollout.sampling import SamplingParams
else:
    __getattr__ = lazy_attributes(__name__, "engine request sampling")

__all__ = ["Engine", "EngineWrapper", "Request", "SamplingParams", "Turn"]
