"""Callbacks for GRPOTrainer as it is: the sampler's weights after every sync, who drew the tokens, traces of a run."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import TrainerCallback

from keel.base.errors import KeelError
from keel.integrations.sync import Sampler, SyncLedger, SyncResult, act, logger
from keel.lab.traces.drawn import DrawnReport, check_drawn
from keel.lab.traces.records import Trace, write_traces
from keel.rollout.engine import StaleWeights


class SyncCheck(TrainerCallback):
    """Compare the sampler's weights with the policy's at every generation: `trainer.add_callback(SyncCheck(trainer))`.

    What the policy is after an update is noted before TRL syncs; what the sampler holds is read when it is asked for
    completions. A mismatch raises (`on_mismatch="stop"`) or is logged (`"warn"`).
    `results` keeps all comparisons, and TRL logs their `sync/wrong_tensors`.
    `adapter` is the id of a LoRA that the sampler keeps beside its base; TRL itself merges adapters.
    """

    def __init__(
        self, trainer: Any, *, on_mismatch: Literal["stop", "warn"] = "stop", adapter: int | None = None
    ) -> None:
        if not getattr(trainer, "use_vllm", False):
            raise KeelError("SyncCheck compares vLLM's weights with the policy's: set use_vllm=True in GRPOConfig")
        self.trainer, self.on_mismatch, self.results = trainer, on_mismatch, list[SyncResult]()
        generation = trainer.vllm_generation
        policy = trainer.accelerator.unwrap_model(trainer.model)
        if generation.mode == "server":
            sampler, asked = Sampler.served(generation.vllm_client.base_url), generation.vllm_client
        else:
            if generation.tensor_parallel_size > 1:
                raise KeelError(
                    f"vllm_tensor_parallel_size={generation.tensor_parallel_size}: SyncCheck does not compare "
                    "tensor-parallel shards; set it to 1, or use DrawnCheck"
                )
            sampler, asked = Sampler.colocated(generation.llm), generation.llm
        self.ledger = SyncLedger(sampler, policy, adapter)
        self._noted = self._checked = -1
        self._generate, asked.generate = asked.generate, self._checking(asked.generate)

    def _checking(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any, **named: Any) -> Any:
            step = self.trainer.state.global_step
            if self._noted < 0:  # generation before training, as an evaluation
                self.note(step)
            if self._checked != self._noted:
                self._checked = self._noted
                self.results.append(self.ledger.compare(self._noted))
                mode = "train" if self.trainer.model.training else "eval"
                self.trainer._metrics[mode]["sync/wrong_tensors"].append(len(self.results[-1].wrong))
                act(self.results[-1], self.on_mismatch)
            return generate(*args, **named)

        return checked

    def note(self, step: int) -> None:
        self.ledger.note(step)
        self._noted = step

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.note(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.note(state.global_step)


def traces(inputs: dict[str, Any], step: int | None = None) -> list[Trace]:
    """The traces of what GRPOTrainer's `_generate_and_score_completions` returns."""
    rows = []
    for row in range(len(inputs["completion_ids"])):
        prompt = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()]
        real = _real(inputs, row)
        tool = inputs.get("tool_mask")
        action = torch.ones_like(real) if tool is None else tool[row].bool()

        def of(name: str, real: Tensor = real, row: int = row) -> tuple[float, ...] | None:
            values = inputs.get(name)
            return None if values is None else tuple(values[row][real].float().tolist())

        rows.append(
            Trace(
                tuple(prompt.tolist()),
                tuple(inputs["completion_ids"][row][real].tolist()),
                tuple(action[real].tolist()),
                of("sampling_per_token_logps"),
                of("old_per_token_logps"),
                step=step,
            )
        )
    return rows


def _real(inputs: dict[str, Any], row: int) -> Tensor:
    return inputs["completion_mask"][row].bool()


class TraceRecorder(TrainerCallback):
    """Append the traces of every generation to a file: for check_tokens, check_depth and whatever comes later."""

    def __init__(self, trainer: Any, path: Path | str) -> None:
        self.trainer, self.path = trainer, Path(path)
        _after_generation(trainer, self._record)

    def _record(self, inputs: dict[str, Any]) -> None:
        if self.trainer.accelerator.is_main_process and self.trainer.model.training:
            write_traces(self.path, traces(inputs, self.trainer.state.global_step))


class DrawnCheck(TrainerCallback):
    """Which of the last weights drew the completions? `trainer.add_callback(DrawnCheck(trainer))`, for any sampler.

    The trained weights of the last `keep` steps stay in main memory; every `every` steps the completions are scored by
    each of them, and the evidence of several steps is added up until it decides for or against the policy.
    """

    def __init__(
        self, trainer: Any, *, keep: int = 2, every: int = 1, on_mismatch: Literal["stop", "warn"] = "stop"
    ) -> None:
        if trainer.top_p != 1.0 or trainer.top_k or (trainer.min_p or 0.0):
            raise KeelError("top_p, top_k or min_p change what is drawn: DrawnCheck needs a sampler without filters")
        self.trainer, self.keep, self.every, self.on_mismatch = trainer, keep, every, on_mismatch
        self.reports = list[DrawnReport]()
        self._past: OrderedDict[int, dict[str, Tensor]] = OrderedDict()
        self._evidence: dict[str, list[float]] = {}
        _after_generation(trainer, self._look)

    def _trained(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.trainer.model.named_parameters() if p.requires_grad}

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Keep the weights before each update; those of the step itself are the policy's."""
        self._past[state.global_step] = {n: p.detach().to("cpu", copy=True) for n, p in self._trained().items()}
        while len(self._past) > self.keep + 1:
            self._past.popitem(last=False)

    @torch.no_grad()
    def _look(self, inputs: dict[str, Any]) -> None:
        step = self.trainer.state.global_step
        older = [at for at in self._past if at < step]
        if not older or step % self.every or not self.trainer.model.training:
            return
        own = {name: p.detach().clone() for name, p in self._trained().items()}
        found = {"the policy": self._score(inputs)}
        try:
            for at in older:
                self._put(self._past[at])
                found[f"{step - at} step{'s' if step - at > 1 else ''} ago"] = self._score(inputs)
        finally:
            self._put(own)
        if set(found) != set(self._evidence):
            self._evidence = {name: [] for name in found}
        for name, values in found.items():
            self._evidence[name] += values
        self.reports.append(check_drawn(self._evidence, "the policy"))
        if self.reports[-1].sound:
            self._evidence = {}
        if self.reports[-1].stale:
            if self.on_mismatch == "stop":
                raise StaleWeights(f"step {step}: {self.reports[-1]}")
            logger.warning("step %d: %s", step, self.reports[-1])

    def _put(self, weights: dict[str, Tensor]) -> None:
        for name, parameter in self._trained().items():
            parameter.data.copy_(weights[name])

    def _score(self, inputs: dict[str, Any]) -> list[float]:
        """The log-probability of each completion's sampled tokens, at the sampling temperature."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        seen = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        was_training = self.trainer.model.training
        self.trainer.model.eval()
        try:
            logp, *_ = self.trainer._get_per_token_logps_and_entropies(
                self.trainer.model, ids, seen, inputs["completion_ids"].size(1)
            )
        finally:
            self.trainer.model.train(was_training)
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        return [x if math.isfinite(x) else 0.0 for x in (logp.double() * mask).sum(1).tolist()]


def _after_generation(trainer: Any, look: Callable[[dict[str, Any]], None]) -> None:
    """Show each batch of completions to `look`, as TRL has scored it."""
    generate = trainer._generate_and_score_completions

    def looking(*args: Any, **named: Any) -> Any:
        inputs = generate(*args, **named)
        look(inputs)
        return inputs

    trainer._generate_and_score_completions = looking
