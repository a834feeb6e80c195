"""Memory: the largest possible pass, and out-of-memory errors that name the phase and the option to change."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from keel.base.errors import KeelError, first_line
from keel.eval.options import EvalOptions
from keel.models.chunked import LOGIT_BYTES, default_chunk
from keel.models.head import body_of, causal_lm
from keel.models.memory import SMALLEST_PASS, fitting_tokens, free_bytes, measure_pass_bytes
from keel.models.options import LoadedModel
from keel.rollout.options import RolloutOptions
from keel.trainer.batch import StepBatch
from keel.trainer.optim import Optimizer
from keel.trainer.state import TrainingRun

# Without a GPU, and in libraries that torch calls, running out of memory is a plain RuntimeError.
_MESSAGES = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


class Remedy(NamedTuple):
    """An option that reduces memory, with its current value and a smaller one."""

    option: str
    now: str
    value: str

    @property
    def override(self) -> str:
        return f"{self.option}={self.value}"


class OutOfMemory(KeelError):
    """Memory ran out in a phase; `remedy` is an option that reduces memory."""

    def __init__(self, phase: str, cause: str, remedy: Remedy) -> None:
        super().__init__(f"out of memory in {phase} ({cause}): {remedy.option} is {remedy.now}, try {remedy.override}")
        self.remedy = remedy


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that a GPU or the CPU is out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)


@contextmanager
def memory_guard(phase: str, remedy: Callable[[], Remedy]) -> Iterator[None]:
    """Convert out-of-memory errors to `OutOfMemory`, with the message "out of memory in PHASE"."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        cause = ". ".join(first_line(error).split(". ")[:2]).rstrip(".")  # the rest is advice about the allocator
        raise OutOfMemory(phase, cause, remedy()) from None


def free_frames(error: BaseException) -> None:
    """Release the tensors held by the frames of an error and its cause, to free memory for a checkpoint."""
    for raised in (error, error.__context__):
        if raised is not None:
            traceback.clear_frames(raised.__traceback__)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def max_pass_tokens(
    loaded: LoadedModel,
    optimizer: Optimizer,
    autocast: Callable[[], AbstractContextManager[Any]],
    *,
    shared_prefix: bool,
    cached_tokens: int = 0,
) -> int | None:
    """Tokens of the largest pass that fits in the GPU's free memory, measured on the model before training begins.

    None on a CPU and for models that cannot be measured; then only the option limits a pass. `cached_tokens` is the
    number of tokens whose hidden states are kept during a step.
    """
    if loaded.device.type != "cuda" or getattr(body_of(loaded.model), "_compiled_call_impl", None):
        return None
    try:
        passes = measure_pass_bytes(loaded.model, autocast, shared_prefix=shared_prefix)
    except Exception as error:  # a user's model may raise anything here and may still be trainable
        return SMALLEST_PASS if is_out_of_memory(error) else None
    vocabulary, width = causal_lm(loaded.model).get_output_embeddings().weight.shape
    chunk = LOGIT_BYTES * vocabulary * default_chunk(vocabulary, loaded.device)
    kept = cached_tokens * width * loaded.dtype.itemsize
    return fitting_tokens(free_bytes(loaded.device), passes, optimizer.moment_bytes + chunk + kept)


class StepMemory:
    """Memory guards for the phases of a step, each with its own remedy."""

    def __init__(self, run: TrainingRun, step: int) -> None:
        self._run, self._step = run, step

    def __call__(self, phase: str, batch: StepBatch | None = None) -> AbstractContextManager[None]:
        run = self._run
        largest = run.microbatch_tokens if batch is None else batch.largest_pass
        passes = partial(
            self._passes, largest, run.rollout.max_completion_length if batch is None else batch.longest_sequence
        )
        remedies: dict[str, Callable[[], Remedy]] = {"rollout": self._sampling, "score": passes, "update": passes}
        return memory_guard(f"the {phase} of step {self._step + 1}", remedies.get(phase, self._persistent))

    def _sampling(self) -> Remedy:
        rollout = self._run.rollout
        return fewer_rows(rollout, _largest_shard(self._run, rollout.prompts_per_step) * rollout.num_generations)

    def _passes(self, largest: int, longest: int) -> Remedy:
        run = self._run
        remedy = smaller_passes(run.policy, run.microbatch_tokens, largest, longest)
        if remedy is not None:
            return remedy
        if not run.optim.offload:
            return Remedy("optim.offload", "false", "true")
        return _shorter(run.rollout)

    def _persistent(self) -> Remedy:
        return smaller_weights(self._run.policy)


def evaluation_memory(run: TrainingRun, options: EvalOptions, step: int) -> AbstractContextManager[None]:
    """A memory guard for an evaluation."""
    rows = _largest_shard(run, options.samples) * max(options.k)
    return memory_guard(f"the evaluation at step {step}", lambda: fewer_rows(run.rollout, rows))


def _largest_shard(run: TrainingRun, problems: int) -> int:
    """The number of problems of the process that has most of them."""
    return -(-problems // run.world.size)


def smaller_weights(policy: LoadedModel) -> Remedy:
    """A remedy for memory that is held across steps: LoRA, then a quantized base, then smaller adapters."""
    if policy.lora is None:
        return Remedy("model.lora", "null", "{r: 16}")
    if not getattr(causal_lm(policy.model), "is_quantized", False):
        return Remedy("model.quantization", "null", "4bit")
    return Remedy("model.lora.r", str(policy.lora.r), str(max(1, policy.lora.r // 2)))


def smaller_passes(policy: LoadedModel, tokens: int, largest: int, longest: int) -> Remedy | None:
    """Suggest half the largest pass if the longest sequence still fits, else gradient checkpointing, else None."""
    smaller = min(tokens, largest) // 2
    if smaller >= longest:
        return Remedy("optim.microbatch_tokens", f"{tokens}{_actual(largest, tokens)}", str(smaller))
    if not getattr(body_of(policy.model), "is_gradient_checkpointing", False):
        return Remedy("model.gradient_checkpointing", "false", "true")
    return None


def fewer_rows(rollout: RolloutOptions, rows: int) -> Remedy:
    """Suggest half the number of completions sampled at a time. If it is one, suggest half the length."""
    at_a_time = min(rollout.max_batch or rows, rows)
    if at_a_time == 1:
        return _shorter(rollout)
    now = "null" if rollout.max_batch is None else str(rollout.max_batch)
    return Remedy("rollout.max_batch", f"{now}{_actual(at_a_time, rollout.max_batch)}", str(at_a_time // 2))


def _actual(reached: int, allowed: int | None) -> str:
    return "" if reached == allowed else f" ({reached} here)"


def _shorter(rollout: RolloutOptions) -> Remedy:
    length = rollout.max_completion_length
    return Remedy("rollout.max_completion_length", str(length), str(max(1, length // 2)))
