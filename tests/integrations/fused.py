"""A sampler inside TRL whose weights lie as vLLM's do: fused projections, a padded vocabulary, a type of its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

JOINED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}


class Linear(nn.Module):
    """A matrix that may hold several projections below each other, or a vocabulary with rows of padding."""

    def __init__(self, weight: Tensor, *, sizes: list[int] | None = None, padded_from: int | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        if sizes is not None:
            self.output_sizes = sizes
        if padded_from is not None:
            self.shard_indices = SimpleNamespace(num_org_elements=padded_from, org_vocab_start_index=0)


class Fused(nn.Module):
    """The layout of vLLM's Llama for a model of transformers."""

    packed_modules_mapping = JOINED

    def __init__(self, model: LlamaForCausalLM, dtype: torch.dtype) -> None:
        super().__init__()
        vocabulary = model.config.vocab_size
        for name, tensor in model.state_dict().items():
            self.put(name, tensor.to(dtype), vocabulary)

    def put(self, name: str, tensor: Tensor, vocabulary: int) -> None:
        path, _, _ = name.rpartition(".")
        parent, _, leaf = path.rpartition(".")
        for fused, parts in JOINED.items():
            if leaf in parts:
                self._join(f"{parent}.{fused}", parts.index(leaf), len(parts), tensor)
                return
        padding = (
            torch.zeros(64 - vocabulary % 64, *tensor.shape[1:], dtype=tensor.dtype)
            if len(tensor) == vocabulary
            else None
        )
        whole = tensor.clone() if padding is None else torch.cat([tensor, padding])
        module = Linear(whole, padded_from=None if padding is None else vocabulary)
        self._set(path, module)

    def _join(self, path: str, index: int, count: int, tensor: Tensor) -> None:
        module = self._get(path)
        if module is None:
            module = Linear(torch.zeros(0, tensor.shape[1], dtype=tensor.dtype), sizes=[])
            module.pending = {}
            self._set(path, module)
        module.pending[index] = tensor.clone()
        if len(module.pending) == count:
            parts = [module.pending[at] for at in range(count)]
            module.weight = nn.Parameter(torch.cat(parts), requires_grad=False)
            module.output_sizes = [len(part) for part in parts]

    def _get(self, path: str) -> Any:
        here: Any = self
        for piece in path.split("."):
            if piece not in here._modules:
                return None
            here = here._modules[piece]
        return here

    def _set(self, path: str, module: nn.Module) -> None:
        here: Any = self
        *parents, last = path.split(".")
        for piece in parents:
            if piece not in here._modules:
                here.add_module(piece, nn.Module())
            here = here._modules[piece]
        here.add_module(last, module)


class FusedGeneration:
    """In the place of TRL's VLLMGeneration: samples from a copy of the weights, which `sync_weights` replaces.

    `skips` says of which tensors a sync takes nothing over, at which step.
    """

    mode, tensor_parallel_size = "colocate", 1

    def __init__(self, trainer: Any, dtype: torch.dtype = torch.float32) -> None:
        self.trainer, self.dtype, self.syncs = trainer, dtype, 0
        self.copy = LlamaForCausalLM(trainer.accelerator.unwrap_model(trainer.model).config).eval()
        self.runner = SimpleNamespace(model=None, get_model=lambda: self.runner.model)
        worker = SimpleNamespace(model_runner=self.runner)
        engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))
        self.llm = SimpleNamespace(llm_engine=engine, generate=self._sample)
        self._take(lambda name: True)

    def skips(self, name: str) -> bool:
        return False

    def sync_weights(self) -> None:
        self.syncs += 1
        self._take(lambda name: not self.skips(name))

    def _take(self, takes: Any) -> None:
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        if adapted := hasattr(model, "merge_adapter"):
            model.merge_adapter()
        held = self.copy.state_dict()
        for name, tensor in model.state_dict().items():
            plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
            if plain in held and takes(plain):
                held[plain].copy_(tensor.to(self.dtype))
        if adapted:
            model.unmerge_adapter()
        self.runner.model = Fused(self.copy, self.dtype)

    def _sample(self, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        """All prompts at once: they are as long as each other."""
        ids, logps = torch.tensor(prompts), []
        for _ in range(self.trainer.max_completion_length):
            logp = self.copy(ids).logits[:, -1].double().log_softmax(-1)
            token = torch.multinomial(logp.exp(), 1)
            ids = torch.cat([ids, token], 1)
            logps.append(logp.gather(1, token))
        eos, drawn = self.trainer.processing_class.eos_token_id, []
        for row, own in zip(ids[:, len(prompts[0]) :].tolist(), torch.cat(logps, 1).tolist(), strict=True):
            end = row.index(eos) + 1 if eos in row else len(row)
            drawn.append((row[:end], own[:end]))
        return drawn

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], images: Any, num_generations: int, profiler: Any = None) -> tuple:
        drawn = self.llm.generate(prompts)
        return prompts, [ids for ids, _ in drawn], [[[x] for x in logps] for _, logps in drawn], None


def with_sampler(trainer: Any, dtype: torch.dtype = torch.float32, cls: type = FusedGeneration) -> Any:
    """The trainer, sampling as with vLLM from a sampler of its own."""
    trainer.use_vllm, trainer._last_loaded_step = True, -1
    trainer.vllm_generation = cls(trainer, dtype)
    return trainer
