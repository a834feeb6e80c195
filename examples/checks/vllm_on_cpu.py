"""TRL's weight sync for vLLM on CPUs, whose kernels pack weights: by vLLM's reload in place of load_weights."""

from typing import Any

from trl.generation.vllm_generation import VLLMGeneration

from keel.rollout.vllm.worker import KeelWorker


def load_by_reload() -> None:
    """Replace it; names and values are those that TRL sends."""

    def sync_weights(self: Any) -> None:
        named = [(name, parameter.clone()) for name, parameter in self._iter_named_params()]
        KeelWorker.keel_load(self.llm.llm_engine.model_executor.driver_worker, named)
        self.llm.reset_prefix_cache()

    VLLMGeneration.sync_weights = sync_weights  # type: ignore[method-assign]
