"""Find and build an engine by its name: a built-in engine or a user's `module:attr`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from keel.base.errors import KeelError, unknown
from keel.base.parts import import_object, is_import_path, make_part, part_arguments
from keel.rollout.options import EngineOptions, RolloutOptions
from keel.rollout.vllm import check_vllm, vllm

if TYPE_CHECKING:
    from torch import nn

    from keel.base.world import World
    from keel.rollout.engine import Engine
    from keel.rollout.native.engine import NativeEngine

# Options of `rollout` that only some built-in engines read.
READ_BY = {"kv_cache_gib": ("native",), "cuda_graphs": ("native",), "dtype": ("native", "vllm"), "vllm": ("vllm",)}


def native(model: nn.Module, tokenizer: Any, *, rollout: RolloutOptions, own_weights: bool = False) -> NativeEngine:
    """Build Keel's own engine. It keeps no KV cache between turns if there is only one turn.

    With dtype `auto` it shares the policy's weights unless `own_weights` is true.
    """
    from keel.models.dtypes import DTYPES
    from keel.models.head import module_dtype
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

    A factory receives those of these arguments that it has as parameters: `rollout`, the whole section; `own_weights`,
    true if it must hold a copy because the weights are sharded or change while it samples; `world`, the processes.
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

    `placed` means that the training command starts the samplers, from its options.
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
                f"rollout.{name} is for the engine {' and '.join(readers)}: leave it out with "
                f"rollout.engine={chosen.name}"
            )
    if chosen.name == "vllm":
        check_vllm(rollout, placed=placed)
    _arguments(chosen, find_engine(chosen.name), rollout)


def _arguments(
    chosen: EngineOptions,
    make: Callable[..., Engine],
    rollout: RolloutOptions,
    own_weights: bool = False,
    world: World | None = None,
) -> dict[str, Any]:
    offered: dict[str, Any] = {"rollout": rollout, "own_weights": own_weights, "world": world}
    return part_arguments(f"engine {chosen.name}", make, chosen.params, positional=2, **offered)
