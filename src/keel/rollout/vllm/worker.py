"""The worker extension of vLLM: load weights, and compute digests of the weights in effect.

`KeelWorker` is mixed into vLLM's worker class (`worker_extension_cls`). Digests use checkpoint names: joined
projections are split, padding is excluded, and weights that a kernel has packed are read by applying the layer to the
identity matrix.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn

from keel.rollout.vllm.direct import device_id
from keel.rollout.vllm.transfer import Part, adapter_digest, read_weights

_CHUNK = 1024  # rows of the identity per pass


class KeelWorker:
    """Methods of a worker for `collective_rpc`."""

    model_runner: Any
    reload_weights: Any
    device: torch.device

    def keel_load(self, weights: Any) -> None:
        """Load weights by checkpoint names: a folder of safetensors files, or (name, tensor) pairs."""
        named = read_weights(weights) if isinstance(weights, str) else weights
        self.reload_weights(weights_iterator=iter(named))
        for module in self.model_runner.get_model().modules():
            if _has_packed(module) and module.weight.numel():  # a tied head's kernels still hold the old weights
                module.quant_method.process_weights_after_loading(module)

    def keel_device(self) -> str:
        """The device of this worker."""
        return device_id(self.device) if self.device.type == "cuda" else str(self.device)

    def keel_alive(self) -> None:
        """Return, to show that this worker responds."""

    def keel_watch(self, server: int) -> None:
        """End this worker and vLLM's parent process when the server dies, to free the GPU."""
        Thread(target=_watch, args=(server,), name="keel-server-watch", daemon=True).start()

    def keel_parts(self) -> list[str]:
        """The parts of checkpoint tensors on this worker."""
        return [str(part) for part, _ in held_weights(self.model_runner.get_model())]

    def keel_dtype(self) -> str:
        """The dtype of its weights, such as `bfloat16`."""
        return str(next(self.model_runner.get_model().parameters()).dtype).removeprefix("torch.")

    def keel_digests(self) -> dict[str, str]:
        """The digest of each part in effect, cast to `keel_dtype` where a tensor has another floating-point type."""
        dtype: torch.dtype = getattr(torch, self.keel_dtype())

        def cast(value: Tensor) -> Tensor:
            return value.to(dtype) if value.is_floating_point() else value

        return {str(part): part.digest(cast(tensor())) for part, tensor in held_weights(self.model_runner.get_model())}

    def keel_adapter(self, adapter: int, ranks: dict[str, int]) -> dict[str, str]:
        """The digests of the adapter's matrices in its slot, by the layer's checkpoint name, each cut to its rank.

        A layer without an adapter has rank 0. A layer whose matrices are not 0 beyond its rank gets an invalid digest.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        if adapter not in manager.lora_index_to_id:
            return {}
        slot, digests = manager.lora_index_to_id.index(adapter), {}
        for layer, a, b in held_adapter(self.model_runner.get_model(), slot):
            rank = ranks.get(layer, 0)
            if a[rank:].any() or b[:, rank:].any():
                digests[layer] = "more than the adapter"
            elif rank:
                digests |= {f"{layer}.A": adapter_digest(a[:rank]), f"{layer}.B": adapter_digest(b[:, :rank])}
        return digests


def _watch(server: int) -> None:
    while True:
        time.sleep(1.0)
        try:
            os.kill(server, 0)
        except ProcessLookupError:
            if (parent := os.getppid()) > 1:
                os.kill(parent, signal.SIGKILL)
            os._exit(1)


def held_weights(model: nn.Module) -> Iterator[tuple[Part, Any]]:
    """The parts of checkpoint tensors that a worker holds, each with a function that reads it."""
    joined = getattr(model, "packed_modules_mapping", {})
    seen: set[int] = set()  # tied weights come once, unless a layer has packed its copy
    for path, module in model.named_modules():
        path = path.replace(".base_layer", "")
        for leaf, parameter in module.named_parameters(recurse=False):
            if leaf.startswith("lora_") or (id(parameter) in seen and not _has_packed(module)):
                continue
            seen.add(id(parameter))
            prefix, _, name = path.rpartition(".")
            names = [f"{prefix}.{part}.{leaf}" for part in joined.get(name, ())] or [f"{path}.{leaf}" if path else leaf]
            yield from _parts(module, leaf, parameter, names)


def _parts(module: nn.Module, leaf: str, parameter: Tensor, names: list[str]) -> Iterator[tuple[Part, Any]]:
    rank, ranks = getattr(module, "tp_rank", 0), getattr(module, "tp_size", 1)

    def read() -> Tensor:
        return packed_weight(module) if leaf == "weight" and _has_packed(module) else parameter

    if len(names) > 1:  # projections stacked in one matrix
        sizes = [size // ranks for size in module.output_sizes]  # type: ignore[union-attr]
        replicas = getattr(module, "num_kv_head_replicas", 1)
        for index, (name, size) in enumerate(zip(names, sizes, strict=True)):
            first, shard = sum(sizes[:index]), rank // replicas if index else rank
            part = Part(name) if ranks == 1 else Part(name, 0, shard * size, size)
            yield part, lambda first=first, size=size: read()[first : first + size]
    elif hasattr(module, "shard_indices"):  # a padded vocabulary
        shard = module.shard_indices
        count: int = shard.num_org_elements  # type: ignore[union-attr, assignment]
        part = Part(names[0]) if ranks == 1 else Part(names[0], 0, shard.org_vocab_start_index, count)  # type: ignore
        yield part, lambda: read()[:count]
    elif ranks == 1 or (leaf == "bias" and hasattr(module, "input_size_per_partition") and _splits_input(module)):
        yield Part(names[0]), read
    elif _splits_input(module):
        size = int(module.input_size_per_partition)  # type: ignore[arg-type]
        yield Part(names[0], 1, rank * size, size), read
    elif hasattr(module, "output_size_per_partition"):
        size = int(module.output_size_per_partition)  # type: ignore[arg-type]
        yield Part(names[0], 0, rank * size, size), read
    else:
        yield Part(names[0]), read


def _has_packed(module: nn.Module) -> bool:
    """Whether a kernel holds a packed form of the weight; embeddings read the weight itself."""
    if not hasattr(module, "cpu_linear"):
        return False
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    return isinstance(module, ParallelLMHead) or not isinstance(module, VocabParallelEmbedding)


def _splits_input(module: nn.Module) -> bool:
    return hasattr(module, "input_is_parallel")


@torch.no_grad()
def packed_weight(module: Any) -> Tensor:
    """The matrix `[out, in]` that a linear layer applies, read exactly from its output for the identity."""
    sizes = ("input_size_per_partition", "input_size", "embedding_dim")
    width = int(next(getattr(module, size) for size in sizes if hasattr(module, size)))
    weight = next(module.parameters())
    dtype, device = weight.dtype, weight.device
    columns = []
    for start in range(0, width, _CHUNK):
        rows = torch.arange(start, min(start + _CHUNK, width), device=device)
        identity = torch.zeros(len(rows), width, dtype=dtype, device=device)
        identity[torch.arange(len(rows), device=device), rows] = 1
        columns.append(module.quant_method.apply(module, identity, None))
    return torch.cat(columns).T.contiguous()


def held_adapter(model: nn.Module, slot: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Each layer's A and B in an adapter's slot, padded with zeros; B includes the scaling."""
    joined = getattr(model, "packed_modules_mapping", {})
    for path, module in model.named_modules():
        if not hasattr(module, "lora_a_stacked"):
            continue
        prefix, _, name = path.rpartition(".")
        names = [f"{prefix}.{part}" for part in joined.get(name, ())] or [path]
        both: Any = (module.lora_a_stacked, module.lora_b_stacked)
        if isinstance(both[0], Tensor):  # vocabulary layers have another layout
            yield path, both[0][slot].flatten(1), both[1][slot].flatten(1)
            continue
        yield from ((layer, a[slot, 0], b[slot, 0]) for layer, a, b in zip(names, *both, strict=True))
