"""The engine that samples by vLLM, in this process or behind a server; vLLM itself is imported when it is used."""

from __future__ import annotations

from typing import Any

from torch import nn

from keel.base.world import ALONE, World
from keel.rollout.options import RolloutOptions
from keel.rollout.vllm.engine import VllmEngine

__all__ = ["VllmEngine", "vllm"]


def vllm(model: nn.Module, tokenizer: Any, *, rollout: RolloutOptions, world: World = ALONE) -> VllmEngine:
    """The engine that `rollout.vllm` describes."""
    from keel.rollout.vllm.client import ServerSampler
    from keel.rollout.vllm.colocated import ColocatedSampler

    make = ServerSampler if rollout.vllm.mode == "server" else ColocatedSampler
    return VllmEngine(make(model, tokenizer, rollout, world), model, tokenizer)
