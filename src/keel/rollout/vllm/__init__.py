"""The vLLM engine, in this process or behind a server; vLLM is imported on use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from keel.base.errors import KeelError
from keel.base.options import Options
from keel.rollout.options import RolloutOptions

if TYPE_CHECKING:
    from torch import nn

    from keel.base.world import World
    from keel.rollout.vllm.engine import VllmEngine

__all__ = ["PLACEHOLDER_URL", "check_vllm", "vllm"]


PLACEHOLDER_URL = "http://ray"  # placeholder for servers that are not started yet
_OF_SERVERS = ("url", "secret", "transfer", "wait_s")
_OF_ENGINES = ("tensor_parallel_size", "gpu_memory_utilization", "max_model_len", "cuda_graphs")


def check_vllm(rollout: RolloutOptions, *, placed: bool = False) -> None:
    """Refuse a server without an address, and options that the mode does not read.

    Servers `placed` with the training are started with its options; others have their own.
    """
    options = rollout.vllm
    if options.mode == "colocate":
        if options.tensor_parallel_size > 1:
            raise KeelError(
                "rollout.vllm.tensor_parallel_size above 1 needs a server: start `keel serve MODEL "
                f"--tensor-parallel-size {options.tensor_parallel_size}` and set rollout.vllm.mode=server"
            )
        for name in _changed(options, _OF_SERVERS):
            raise KeelError(f"rollout.vllm.{name} is for a server: leave it out, or set rollout.vllm.mode=server")
        return
    if not options.urls:
        raise KeelError("rollout.vllm.mode=server needs an address: start `keel serve MODEL` and set rollout.vllm.url")
    for url in options.urls:
        if not url.startswith(("http://", "https://")):
            raise KeelError(f"rollout.vllm.url is {url!r}: it must begin with http:// or https://")
    own = [f"vllm.{name}" for name in _changed(options, _OF_ENGINES)] + _changed(rollout, ("dtype",))
    if own and not placed and options.urls != (PLACEHOLDER_URL,):
        flag = f"--{own[0].removeprefix('vllm.').replace('_', '-')}"
        flag = "--no-cuda-graphs" if flag == "--cuda-graphs" else flag
        raise KeelError(f"rollout.{own[0]} is an option of the server: leave it out, and give keel serve {flag}")


def _changed(options: Options, names: Sequence[str]) -> list[str]:
    return [name for name in names if getattr(options, name) != type(options).model_fields[name].default]


def vllm(model: nn.Module, tokenizer: Any, *, rollout: RolloutOptions, world: World | None = None) -> VllmEngine:
    """The engine that `rollout.vllm` describes."""
    from keel.base.world import SINGLE_PROCESS
    from keel.rollout.vllm.client import ServerSampler
    from keel.rollout.vllm.colocated import ColocatedSampler
    from keel.rollout.vllm.engine import VllmEngine
    from keel.rollout.vllm.transfer import check_buffers

    check_buffers(model)
    make = ServerSampler if rollout.vllm.mode == "server" else ColocatedSampler
    return VllmEngine(make(model, tokenizer, rollout, world or SINGLE_PROCESS), model, tokenizer)
