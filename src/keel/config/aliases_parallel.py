"""Names of other trainers for several devices, as data: how weights are spread is `parallel`; how many there are, the
launcher is told; what cuts a layer, a row or the stack of layers is refused by name.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from keel.base.errors import KeelError
from keel.config import text
from keel.config.alias import Alias, Options, Settings, boolean, choice, harmless

SHARDING = "parallel.sharding"
LAUNCHED = "the number of devices is the launcher's: keel train CONFIG --nproc N, or torchrun on several machines"
TENSOR = "tensor parallelism is not built in: weights that do not fit a device are spread by parallel.sharding=full"
CONTEXT = (
    "context (sequence) parallelism is not built in: a smaller optim.microbatch_tokens and "
    "model.gradient_checkpointing=true save memory"
)
PIPELINE = "pipeline parallelism is not built in: parallel.sharding=full spreads every layer over all devices"
EXPERT = "expert parallelism is not built in: parallel.sharding=full spreads experts like all weights"


def only_one(note: str, *names: str) -> list[Alias]:
    """Sizes that have to be 1 (or absent)."""
    return [replace(harmless(name, note, 1, None), note=f"refused above 1: {note}") for name in names]


def _words(value: Any) -> set[str]:
    return set(value.replace(",", " ").split()) if isinstance(value, str) else set(value or ())


def _fsdp(value: Any, settings: Settings) -> Options:
    """transformers' `fsdp`: words such as full_shard, hybrid_shard, offload and auto_wrap; or true."""
    if isinstance(value, bool):
        return {SHARDING: "full"} if value else {}
    by_word = {"full_shard": "full", "shard_grad_op": "full", "no_shard": "none"}
    by_word |= {"hybrid_shard": "hybrid", "hybrid_shard_zero2": "hybrid"}
    words = _words(value) - {"auto_wrap"}
    if wrong := words - by_word.keys() - {"offload"}:
        known = ", ".join((*by_word, "offload", "auto_wrap"))
        raise KeelError(f"fsdp={text.dump(value)} has no counterpart: {sorted(wrong)[0]} is none of {known}")
    sharding = next((by_word[word] for word in words if word in by_word), None)
    options = {SHARDING: sharding, "parallel.offload": "offload" in words}
    return {name: option for name, option in options.items() if option}


def _fsdp_size(value: Any, settings: Settings) -> Options:
    """verl's number of devices that hold one copy: -1 is all of them."""
    if value in (-1, 0, None):
        return {}
    return {SHARDING: "hybrid", "parallel.shard_size": value} if value != 1 else {SHARDING: "none"}


def _offload(name: str, option: str = "parallel.offload") -> Alias:
    """A switch of FSDP's offload, or the name of the device that it is to."""

    def convert(value: Any, settings: Settings) -> Options:
        on = value == "cpu" if isinstance(value, str) and value in ("cpu", "none") else boolean(name, value)
        return {option: True} if on else {}

    return Alias(name, option, "true or cpu", convert)


def fsdp_size(name: str) -> Alias:
    """How many devices hold one copy of the weights."""
    note = "N is hybrid with parallel.shard_size=N, 1 is none, -1 leaves Keel's"
    return Alias(name, "parallel.shard_size", note, _fsdp_size)


def zero_stage(name: str) -> Alias:
    """DeepSpeed's ZeRO: below stage 3 weights stay whole, which FSDP2 does not have."""
    stages: dict[Any, Options] = {"0": {SHARDING: "none"}, **{str(n): {SHARDING: "full"} for n in (1, 2, 3)}}
    return choice(name, SHARDING, stages, "0 is none, 3 full; 1 and 2 become full too, which spreads weights as well")


TRL_PARALLEL = [
    Alias("fsdp", SHARDING, "full_shard is full, hybrid_shard hybrid, no_shard none; offload: parallel.offload", _fsdp),
    *only_one(LAUNCHED, "num_processes", "num_machines"),
    *only_one(TENSOR, "vllm_tensor_parallel_size"),
]
OTHER_PARALLEL = [
    *only_one(LAUNCHED, "num_gpus", "n_gpus", "gpus_per_node", "num_gpus_per_node", "n_gpus_per_node", "num_nodes"),
    *only_one(LAUNCHED, "nnodes", "nproc", "nproc_per_node", "world_size", "data_parallel_size", "dp_size"),
    *only_one(TENSOR, "tensor_parallel_size", "tensor_parallel_degree", "tp_size", "tensor_model_parallel_size"),
    *only_one(CONTEXT, "context_parallel_size", "context_parallel_degree", "cp_size", "sequence_parallel_size"),
    *only_one(CONTEXT, "ulysses_sequence_parallel_size", "ulysses_size", "sp_size"),
    *only_one(
        PIPELINE, "pipeline_parallel_size", "pipeline_parallel_degree", "pp_size", "pipeline_model_parallel_size"
    ),
    *only_one(EXPERT, "expert_parallel_size", "expert_model_parallel_size", "expert_parallel_degree", "ep_size"),
    zero_stage("deepspeed.zero_optimization.stage"),
    fsdp_size("fsdp_size"),
    fsdp_size("data_parallel_shard_degree"),
    choice(
        "sharding_strategy",
        SHARDING,
        {
            **{name: {SHARDING: "full"} for name in ("FULL_SHARD", "SHARD_GRAD_OP")},
            **{name: {SHARDING: "hybrid"} for name in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")},
            "NO_SHARD": {SHARDING: "none"},
        },
    ),
    choice(
        "distributed_type",
        SHARDING,
        {"NO": {}, "MULTI_GPU": {SHARDING: "none"}, "FSDP": {SHARDING: "full"}},
        "MULTI_GPU is none, FSDP full",
    ),
    *(_offload(name) for name in ("cpu_offload", "fsdp_cpu_offload", "fsdp_offload_params", "offload_param_device")),
]
