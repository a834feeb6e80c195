"""The worker extension of a verl run that SyncCheck reads: vLLM takes one extension, and verl has its own."""

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from keel.rollout.vllm.worker import KeelWorker


class SyncWorker(vLLMColocateWorkerExtension, KeelWorker):
    """Takes weights as verl's worker does, and reports digests of them."""
