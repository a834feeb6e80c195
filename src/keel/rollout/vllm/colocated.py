"""vLLM in this process: it shares the device with the training and sleeps during updates."""

from __future__ import annotations

import random
import secrets
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import nn

from keel.base.errors import KeelError
from keel.base.world import World
from keel.models.head import causal_lm, is_lora, module_dtype
from keel.models.precision import DTYPES
from keel.models.tokenizer import context_length
from keel.rollout.options import RolloutOptions
from keel.rollout.vllm import COLOCATED_SHARE, engine_arguments, import_vllm, start_error
from keel.rollout.vllm.engine import (
    Drawing,
    Row,
    Sampled,
    SamplerInfo,
    VllmSampler,
    check_sampled,
    sampled,
    vllm_params,
    vllm_prompt,
)
from keel.rollout.vllm.transfer import (
    PartDigests,
    adapter_of,
    check_digests,
    checkpoint_weights,
    lora_rank,
    process_folder,
    save_adapter,
    save_shards,
)

_NAME = "vLLM in this process"


class ColocatedSampler(VllmSampler):
    """vLLM's engine, driven step by step; weights are passed as tensors."""

    def __init__(self, model: nn.Module, tokenizer: Any, rollout: RolloutOptions, world: World) -> None:
        self._alone = world.size == 1
        self._sleeps = cuda = next(model.parameters()).is_cuda
        vllm = import_vllm(in_process=True, cuda=cuda)
        inner = causal_lm(model)
        self._folder = process_folder("vllm")
        inner.config.save_pretrained(str(self._folder))
        tokenizer.save_pretrained(str(self._folder))
        self._adapter: Any = None
        self._dtype = module_dtype(model) if rollout.dtype == "auto" else DTYPES[rollout.dtype]
        rank = lora_rank(model)
        arguments = engine_arguments(
            str(self._folder),
            rollout.vllm,
            dtype=self._dtype,
            context=context_length(inner),
            max_lora_rank=rank,
            cuda=cuda,
        )
        if is_lora(model):  # vLLM loads the base once
            save_shards(checkpoint_weights(model, self._dtype), self._folder)
        else:
            arguments["load_format"] = "dummy"
        if world.size > 1:
            arguments["distributed_executor_backend"] = "external_launcher"
        try:
            with own_random_state():
                self._llm = vllm.LLM(**arguments, enable_sleep_mode=self._sleeps)
        except Exception as error:
            self.close()
            share = f"rollout.vllm.gpu_memory_utilization={rollout.vllm.gpu_memory_utilization or COLOCATED_SHARE}"
            raise start_error(error, share) from error
        config = self._llm.llm_engine.model_config
        self.info = SamplerInfo(config.max_model_len, config.get_vocab_size())
        self._asleep: set[str] = set()
        with ExitStack() as on_error:
            on_error.callback(self.close)
            self._part_digests = PartDigests(self._rpc("keel_parts"), model)
            self.load(model)
            on_error.pop_all()

    def _rpc(self, method: str, *args: Any) -> Any:
        return self._llm.collective_rpc(method, args=args)[0]

    def start(self, rows: Sequence[Row], drawing: Drawing) -> None:
        self._wake("weights", "kv_cache")
        for row in rows:
            prompt, params = vllm_prompt(row, self._salt), vllm_params(row, drawing)
            self._llm.llm_engine.add_request(row.id, prompt, params, lora_request=self._adapter)

    def finished(self) -> list[Sampled]:
        engine = self._llm.llm_engine
        while engine.has_unfinished_requests():
            ended = [sampled(output.request_id, output.outputs[0]) for output in engine.step() if output.finished]
            if ended:
                return [check_sampled(result, self.info.vocabulary, _NAME) for result in ended]
        raise KeelError(f"{_NAME} ended without a result for some completions: see its log, and start the run again")

    def cancel(self) -> None:
        engine = self._llm.llm_engine
        engine.abort_request(list(engine.output_processor.request_states), internal=True)  # by vLLM's internal ids
        while engine.has_unfinished_requests():
            engine.step()

    def load(self, policy: nn.Module) -> None:
        """Load all weights as tensors. Under LoRA, load the adapter with vLLM's loader, and verify the base once."""
        self._wake("weights")
        self._salt = secrets.token_hex(8)
        if not is_lora(policy) or not self._part_digests.digests:
            weights = self._part_digests.recorded(checkpoint_weights(policy, self._dtype))
            if is_lora(policy):
                deque(weights, maxlen=0)
            else:
                self._rpc("keel_load", weights)
            check_digests(self._rpc("keel_digests"), self._part_digests.digests, _NAME, sent=not is_lora(policy))
        self.read_back = len(self._part_digests.digests)
        if is_lora(policy):
            self.read_back += self._load_adapter(policy)
        self._llm.reset_prefix_cache()

    def _load_adapter(self, policy: nn.Module) -> int:
        from vllm.lora.request import LoRARequest

        adapter = adapter_of(policy, self._dtype)
        folder = save_adapter(policy, self._folder / "adapter")
        self._llm.llm_engine.add_lora(LoRARequest("policy", 1, str(folder), load_inplace=True))
        self._adapter = LoRARequest("policy", 1, str(folder))
        return check_digests(self._rpc("keel_adapter", 1, adapter.ranks), adapter.digests(), _NAME)

    def sleep(self) -> None:
        """Move weights to the CPU and free the KV cache, if the device has sleep mode."""
        if self._sleeps and not self._asleep:
            self._llm.sleep(level=1)
            self._asleep = {"weights", "kv_cache"}

    def _wake(self, *parts: str) -> None:
        """Wake these parts if asleep."""
        if asleep := [part for part in parts if part in self._asleep]:
            torch.cuda.empty_cache()
            self._llm.wake_up(tags=asleep)
            self._asleep.difference_update(asleep)

    def close(self) -> None:
        if hasattr(self, "_llm"):
            from vllm.distributed.parallel_state import cleanup_dist_env_and_memory, destroy_model_parallel

            with suppress(Exception):  # wake up first, because vLLM would free sleeping memory twice
                self._wake("weights", "kv_cache")
            self._llm.llm_engine.engine_core.shutdown()
            del self._llm
            if self._alone:
                cleanup_dist_env_and_memory()
            else:  # the process group belongs to the training
                destroy_model_parallel()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def own_random_state() -> Iterator[None]:
    """Restore the random states of this process, which vLLM seeds."""
    python, torch_state = random.getstate(), torch.get_rng_state()
    numpy_state = np.random.get_state()  # noqa: NPY002 — the global stream
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)  # noqa: NPY002
        torch.set_rng_state(torch_state)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
