"""A worker extension for SyncCheck in verl runs: vLLM accepts only one, so this one includes verl's."""

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from keel.rollout.vllm.worker import KeelWorker


class SyncWorker(vLLMColocateWorkerExtension, KeelWorker):
    """Load weights as verl's worker does, and report their digests."""
