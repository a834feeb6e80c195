"""Memory: how large a pass may be, and where it runs out one line that names the phase and the option to lower."""

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
from keel.models.loaded import LoadedModel
from keel.models.memory import SMALLEST_PASS, fitting_tokens, free_bytes, measure_pass_bytes
from keel.rollout.options import RolloutOptions
from keel.trainer.batch import StepBatch
from keel.trainer.optim import Optimizer
from keel.trainer.state import TrainingRun

# Libraries behind torch, and torch on a CPU, have no exception of their own for it.
_MESSAGES = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


class Remedy(NamedTuple):
    """An option that asks for less memory, what it is now, and what to try."""

    option: str
    now: str
    value: str

    @property
    def override(self) -> str:
        return f"{self.option}={self.value}"


class OutOfMemory(KeelError):
    """Memory ran out in a phase; `remedy` says what would need less."""

    def __init__(self, phase: str, cause: str, remedy: Remedy) -> None:
        super().__init__(f"out of memory in {phase} ({cause}): {remedy.option} is {remedy.now}, try {remedy.override}")
        self.remedy = remedy


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or main memory, has no room for a tensor."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)


@contextmanager
def memory_guard(phase: str, remedy: Callable[[], Remedy]) -> Iterator[None]:
    """Turn what is raised where memory runs out into `OutOfMemory`; the phase is said as in "in the update"."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        cause = ". ".join(first_line(error).split(". ")[:2]).rstrip(".")  # past that torch explains its allocator
        raise OutOfMemory(phase, cause, remedy()) from None


def free_frames(error: BaseException) -> None:
    """Let go of the tensors that the frames of an error and of its cause hold, so that there is room to save."""
    for raised in (error, error.__context__):
        if raised is not None:
            traceback.clear_frames(raised.__traceback__)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def measure_fit(
    loaded: LoadedModel,
    optimizer: Optimizer,
    autocast: Callable[[], AbstractContextManager[Any]],
    *,
    shared_prefix: bool,
    kept_tokens: int = 0,
) -> int | None:
    """Tokens of the largest pass that a GPU's free memory holds, counted on the model itself before training begins.

    None on a CPU, and for a model of which it cannot be counted: then the option alone decides. `kept_tokens` are those
    whose hidden states a step keeps beside its passes.
    """
    if loaded.device.type != "cuda" or getattr(body_of(loaded.model), "_compiled_call_impl", None):
        return None
    try:
        passes = measure_pass_bytes(loaded.model, autocast, shared_prefix=shared_prefix)
    except Exception as error:  # whatever a foreign model raises here, a step may still work
        return SMALLEST_PASS if is_out_of_memory(error) else None
    vocabulary, width = causal_lm(loaded.model).get_output_embeddings().weight.shape
    chunk = LOGIT_BYTES * vocabulary * default_chunk(vocabulary, loaded.device)
    kept = kept_tokens * width * loaded.dtype.itemsize
    return fitting_tokens(free_bytes(loaded.device), passes, optimizer.moment_bytes + chunk + kept)


class StepMemory:
    """The phases of a step, each guarded with what it can do with less of."""

    def __init__(self, run: TrainingRun, step: int) -> None:
        self._run, self._step = run, step

    def __call__(self, phase: str, batch: StepBatch | None = None) -> AbstractContextManager[None]:
        run = self._run
        largest = run.microbatch_tokens if batch is None else batch.largest
        passes = partial(self._passes, largest, run.rollout.max_completion_length if batch is None else batch.longest)
        remedies: dict[str, Callable[[], Remedy]] = {"rollout": self._sampling, "score": passes, "update": passes}
        return memory_guard(f"the {phase} of step {self._step + 1}", remedies.get(phase, self._held))

    def _sampling(self) -> Remedy:
        rollout = self._run.rollout
        return fewer_rows(rollout, rollout.prompts_per_step * rollout.num_generations)

    def _passes(self, largest: int, longest: int) -> Remedy:
        run = self._run
        remedy = smaller_passes(run.policy, run.microbatch_tokens, largest, longest)
        if remedy is not None:
            return remedy
        if not run.optim.offload:
            return Remedy("optim.offload", "false", "true")
        return _shorter(run.rollout)

    def _held(self) -> Remedy:
        """What is there from step to step: weights, moments, copies."""
        if self._run.policy.lora is None:
            return Remedy("model.lora", "null", "{r: 16}")
        return Remedy("model.quantization", "null", "4bit")


def evaluation_memory(run: TrainingRun, options: EvalOptions, step: int) -> AbstractContextManager[None]:
    """The same for an evaluation, which samples more completions or fewer than a step."""
    rows = options.samples * max(options.k)
    return memory_guard(f"the evaluation at step {step}", lambda: fewer_rows(run.rollout, rows))


def smaller_passes(policy: LoadedModel, tokens: int, largest: int, longest: int) -> Remedy | None:
    """Half the largest pass while that holds the longest completion, then recomputed activations, then None."""
    smaller = min(tokens, largest) // 2
    if smaller >= longest:
        return Remedy("optim.microbatch_tokens", f"{tokens}{_here(largest, tokens)}", str(smaller))
    if not getattr(body_of(policy.model), "is_gradient_checkpointing", False):
        return Remedy("model.gradient_checkpointing", "false", "true")
    return None


def fewer_rows(rollout: RolloutOptions, rows: int) -> Remedy:
    """Half as many completions sampled at a time; of one alone, half as long a one."""
    at_a_time = min(rollout.max_batch or rows, rows)
    if at_a_time == 1:
        return _shorter(rollout)
    now = "null" if rollout.max_batch is None else str(rollout.max_batch)
    return Remedy("rollout.max_batch", f"{now}{_here(at_a_time, rollout.max_batch)}", str(at_a_time // 2))


def _here(reached: int, allowed: int | None) -> str:
    return "" if reached == allowed else f" ({reached} here)"


def _shorter(rollout: RolloutOptions) -> Remedy:
    length = rollout.max_completion_length
    return Remedy("rollout.max_completion_length", str(length), str(max(1, length // 2)))
