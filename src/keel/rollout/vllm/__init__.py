"""The engine that samples by vLLM, in this process or behind a server; vLLM itself is imported when it is used."""

from __future__ import annotations

from typing import Any

from torch import nn

from keel.base.errors import KeelError
from keel.base.world import ALONE, World
from keel.rollout.options import RolloutOptions, VllmOptions
from keel.rollout.vllm.engine import VllmEngine

__all__ = ["VllmEngine", "check_vllm", "vllm"]


def check_vllm(options: VllmOptions) -> None:
    """Refuse a server without an address, and what one of the two modes would not read."""
    if options.mode == "server":
        if not options.urls:
            raise KeelError(
                "rollout.vllm.mode=server needs an address: start `keel serve MODEL` and set rollout.vllm.url"
            )
        for url in options.urls:
            if not url.startswith(("http://", "https://")):
                raise KeelError(f"rollout.vllm.url is {url!r}: it must begin with http:// or https://")
        return
    for name in ("url", "secret", "direct"):
        if getattr(options, name) is not None:
            name = "transfer" if name == "direct" else name
            raise KeelError(f"rollout.vllm.{name} is for a server: leave it out, or set rollout.vllm.mode=server")
    if options.tensor_parallel_size > 1:
        raise KeelError(
            "rollout.vllm.tensor_parallel_size above 1 needs a server: start `keel serve MODEL "
            f"--tensor-parallel-size {options.tensor_parallel_size}` and set rollout.vllm.mode=server"
        )


def vllm(model: nn.Module, tokenizer: Any, *, rollout: RolloutOptions, world: World = ALONE) -> VllmEngine:
    """The engine that `rollout.vllm` describes."""
    from keel.rollout.vllm.client import ServerSampler
    from keel.rollout.vllm.colocated import ColocatedSampler

    make = ServerSampler if rollout.vllm.mode == "server" else ColocatedSampler
    return VllmEngine(make(model, tokenizer, rollout, world), model, tokenizer)
