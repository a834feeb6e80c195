"""Find and build an engine by its name: a built-in engine or a user's `module:attr`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from keel.base.errors import KeelError, unknown
from keel.base.options import Options
from keel.base.parts import import_object, is_import_path, make_part, part_arguments
from keel.rollout.options import EngineOptions, RolloutOptions

if TYPE_CHECKING:
    from torch import nn

    from keel.base.world import World
    from keel.rollout.engine import Engine
    from keel.rollout.native.engine import NativeEngine
    from keel.rollout.vllm.engine import VllmEngine

# Options of `rollout` that only some built-in engines read.
READ_BY = {"kv_cache_gib": ("native",), "cuda_graphs": ("native",), "dtype": ("native", "vllm"), "vllm": ("vllm",)}
PLACEHOLDER_URL = "http://ray"  # placeholder for servers that are not started yet
_OF_SERVERS = ("url", "secret", "transfer", "wait_s")
_OF_ENGINES = ("tensor_parallel_size", "gpu_memory_utilization", "max_model_len", "cuda_graphs")


def native(model: nn.Module, tokenizer: Any, *, rollout: RolloutOptions, own_weights: bool = False) -> NativeEngine:
    """Build Keel's own engine. It keeps no KV cache between turns if there is only one turn.

    With dtype `auto` it shares the policy's weights unless `own_weights` is true.
    """
    from keel.models.head import module_dtype
    from keel.models.precision import DTYPES
    from keel.rollout.native.engine import NativeEngine

    kv_cache_bytes = int(rollout.kv_cache_gib * 2**30) if rollout.max_turns > 1 else 0
    dtype = None if rollout.dtype == "auto" else DTYPES[rollout.dtype]
    return NativeEngine(
        model,
        tokenizer,
        copy=own_weights,
        dtype=None if dtype == module_dtype(model) else dtype,
        kv_cache_bytes=kv_cache_bytes,
        graphs=rollout.cuda_graphs,
    )


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


ENGINES: dict[str, Callable[..., Engine]] = {"native": native, "vllm": vllm}


def find_engine(name: str, option: str = "rollout.engine") -> Callable[..., Engine]:
    """The factory of the engine `name`. Raises for a class that is not an engine."""
    if name in ENGINES:
        return ENGINES[name]
    if not is_import_path(name):
        raise unknown(option, name, ENGINES)
    make = import_object(name, option)
    if isinstance(make, type):
        from keel.rollout.engine import check_engine

        check_engine(make, f"{option}={name}")
    return make


def build_engine(
    rollout: RolloutOptions, model: nn.Module, tokenizer: Any, *, own_weights: bool = False, world: World | None = None
) -> Engine:
    """Build the engine that `rollout.engine` names.

    A factory receives each of these arguments that its signature names: `rollout` is the whole section; `own_weights`
    is true if it must hold a copy because the weights are sharded or change while it samples; `world` is the processes.
    """
    from keel.base.world import SINGLE_PROCESS
    from keel.rollout.engine import check_engine

    chosen = rollout.named_engine
    make = find_engine(chosen.name)
    option, arguments = (
        f"rollout.engine={chosen.name}",
        _arguments(chosen, make, rollout, own_weights, world or SINGLE_PROCESS),
    )
    engine: Engine = make_part(option, make, model, tokenizer, **arguments)
    check_engine(engine, option)
    return engine


def check_rollout(rollout: RolloutOptions, *, placed: bool = False) -> None:
    """Refuse greedy sampling, an unknown engine, and options that the engine does not read.

    `placed` means that the training command starts the servers with these options.
    """
    if rollout.temperature == 0:
        raise KeelError(
            "rollout.temperature is 0: greedy completions of a problem are all equal and give no gradient; "
            "set it above 0 (1.0 is usual), or eval.temperature=0 for greedy evaluation"
        )
    chosen = rollout.named_engine
    for name, readers in READ_BY.items():
        if chosen.name not in readers and getattr(rollout, name) != type(rollout).model_fields[name].default:
            raise KeelError(
                f"rollout.{name} is for the engine {' or '.join(readers)}: leave it out with "
                f"rollout.engine={chosen.name}"
            )
    if chosen.name == "vllm":
        check_vllm(rollout, placed=placed)
    _arguments(chosen, find_engine(chosen.name), rollout)


def check_vllm(rollout: RolloutOptions, *, placed: bool = False) -> None:
    """Refuse a server without an address, and options that the mode does not read.

    The training command starts `placed` servers with its options. Other servers have their own options.
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
        raise KeelError(
            f"rollout.{own[0]} is an option of the server: leave it out here, and start keel serve with {flag}"
        )


def _changed(options: Options, names: Sequence[str]) -> list[str]:
    return [name for name in names if getattr(options, name) != type(options).model_fields[name].default]


def _arguments(
    chosen: EngineOptions,
    make: Callable[..., Engine],
    rollout: RolloutOptions,
    own_weights: bool = False,
    world: World | None = None,
) -> dict[str, Any]:
    offered: dict[str, Any] = {"rollout": rollout, "own_weights": own_weights, "world": world}
    return part_arguments(f"engine {chosen.name}", make, chosen.params, positional=2, **offered)
