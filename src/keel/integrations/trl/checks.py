"""Callbacks for an unmodified GRPOTrainer.

They check the sampler's weights after every sync, check which weights drew the tokens, and write a file of traces.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import TrainerCallback

from keel.base.errors import KeelError
from keel.integrations.sync import Sampler, SyncLedger, SyncResult, logger, merged_weights, stop_or_warn
from keel.lab.traces.sampler import LEVEL, DrawnReport, check_drawn
from keel.lab.traces.tokens import Trace, write_traces
from keel.rollout.engine import StaleWeights


class SyncCheck(TrainerCallback):
    """Compare the sampler's weights with the policy's after every sync: `trainer.add_callback(SyncCheck(trainer))`.

    The policy's digests are stored after each update, and before TRL syncs again in the same step. The sampler's
    digests are read at the next request for completions. A mismatch raises (`on_mismatch="stop"`) or is logged
    (`"warn"`). `results` stores all comparisons, and TRL logs their `sync/wrong_tensors`. `adapter` is the id of a LoRA
    adapter that the sampler stores separately from the base weights; TRL itself merges adapters.
    """

    def __init__(
        self, trainer: Any, *, on_mismatch: Literal["stop", "warn"] = "stop", adapter: int | None = None
    ) -> None:
        if not getattr(trainer, "use_vllm", False):
            raise KeelError("SyncCheck compares vLLM's weights with the policy's: set use_vllm=True in GRPOConfig")
        self.trainer, self.on_mismatch, self.results = trainer, on_mismatch, list[SyncResult]()
        generation = trainer.vllm_generation
        self.policy = trainer.accelerator.unwrap_model(trainer.model)
        self.ledger: SyncLedger | None = None
        self._step, self._fresh, self._due = -1, False, False
        generation.sync_weights = _after(self._before_sync, generation.sync_weights)
        if generation.mode == "server":
            if not trainer.accelerator.is_main_process:  # only the main process sends requests to the server
                return
            sampler, asked = Sampler.served(generation.vllm_client.base_url), generation.vllm_client
        else:
            if generation.tensor_parallel_size > 1:
                raise KeelError(
                    f"vllm_tensor_parallel_size={generation.tensor_parallel_size}: SyncCheck does not compare "
                    "tensor-parallel shards; set it to 1, or use DrawnCheck"
                )
            sampler, asked = Sampler.colocated(generation.llm), generation.llm
        self.ledger = SyncLedger(sampler, self.policy, adapter)
        asked.generate = _after(self._compare, asked.generate)

    def _before_sync(self) -> None:
        """Store the digests again if TRL syncs twice in a step, for example after vLLM's sleep mode."""
        if not self._fresh:
            self.note()
        self._fresh = False

    def _compare(self) -> None:
        if self._step < 0:  # there was no sync yet
            self.note()
        if self.ledger is not None and self._due:
            self._due = False
            self.results.append(self.ledger.compare(self._step))
            mode = "train" if self.trainer.model.training else "eval"
            self.trainer._metrics[mode]["sync/wrong_tensors"].append(len(self.results[-1].wrong))
            stop_or_warn(self.results[-1], self.on_mismatch)

    def note(self) -> None:
        """Store the current policy's digests. All processes take part, because shards are gathered."""
        self._step, self._fresh, self._due = self.trainer.state.global_step, True, True
        if self.ledger is not None:
            self.ledger.note(self._step)
        else:
            for _ in merged_weights(self.policy, torch.float32):
                pass

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.note()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.note()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Store the digests again: TRL may have loaded the best checkpoint, which it does not sync."""
        self.note()
        if self.ledger is not None and not self.results:
            logger.warning("SyncCheck compared nothing: this trainer does not request completions by vLLM's generate")


def _after(first: Callable[[], None], function: Callable[..., Any]) -> Callable[..., Any]:
    def both(*args: Any, **named: Any) -> Any:
        first()
        return function(*args, **named)

    return both


@dataclass(frozen=True)
class Drawn:
    """A batch from `GRPOTrainer._generate`, before truncated completions are masked, and TRL's scored inputs."""

    prompts: Sequence[Any]
    prompt_ids: Sequence[Sequence[int]]
    completion_ids: Sequence[Sequence[int]]
    action: Sequence[Sequence[bool]]  # false on the tokens of tools
    completions: Sequence[Any]
    inputs: Mapping[str, Any]

    def traces(self, step: int | None = None) -> list[Trace]:
        """One trace per completion, with `messages` if prompts are conversations."""

        def of(name: str, row: int) -> tuple[float, ...] | None:
            values = self.inputs.get(name)
            return None if values is None else tuple(values[row][: len(self.completion_ids[row])].float().tolist())

        def messages(row: int) -> tuple[Any, ...] | None:
            prompt, completion = self.prompts[row], self.completions[row]
            return (*prompt, *completion) if isinstance(completion, list) else None

        return [
            Trace(
                tuple(self.prompt_ids[row]),
                tuple(self.completion_ids[row]),
                tuple(self.action[row]),
                of("sampling_per_token_logps", row),
                of("old_per_token_logps", row),
                messages(row),
                step,
            )
            for row in range(len(self.completion_ids))
        ]


class TraceRecorder(TrainerCallback):
    """Append the traces of every generation to a file, for check_tokens and check_depth."""

    def __init__(self, trainer: Any, path: Path | str) -> None:
        self.trainer, self.path = trainer, Path(path)
        _after_generation(trainer, self._record)

    def _record(self, drawn: Drawn) -> None:
        if self.trainer.accelerator.is_main_process and self.trainer.model.training:
            write_traces(self.path, drawn.traces(self.trainer.state.global_step))


class DrawnCheck(TrainerCallback):
    """Find the step whose weights drew the completions, for any sampler: `trainer.add_callback(DrawnCheck(trainer))`.

    The trained weights of the last `keep` steps are kept in main memory. Every `every` steps, these and the current
    weights score the completions. Log-probabilities are added over steps until they decide for or against the policy.
    Then a new test begins. The n-th test has the level 10⁻⁴/n(n+1), so the probability of a false alarm in a run is
    below 10⁻⁴.
    """

    def __init__(
        self, trainer: Any, *, keep: int = 2, every: int = 1, on_mismatch: Literal["stop", "warn"] = "stop"
    ) -> None:
        args = trainer.args
        changed = {
            "top_p": args.top_p != 1.0,
            "top_k": args.top_k,
            "min_p": args.min_p,
            "repetition_penalty": args.repetition_penalty != 1.0,
            "vllm_structured_outputs_regex": args.vllm_structured_outputs_regex,
            "generation_kwargs": args.generation_kwargs,
        }
        if names := [name for name, on in changed.items() if on]:
            raise KeelError(
                f"DrawnCheck does not support {', '.join(names)} of GRPOConfig, because they change the sampling "
                "distribution: leave them at their defaults"
            )
        self.trainer, self.keep, self.every, self.on_mismatch = trainer, keep, every, on_mismatch
        self.reports = list[DrawnReport]()
        self._past: OrderedDict[int, dict[str, Tensor]] = OrderedDict()
        self._evidence: dict[str, list[float]] = {}
        self._starts = 0
        _after_generation(trainer, self._look)

    def _trained(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.trainer.model.named_parameters() if p.requires_grad}

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Store the weights before each update. The weights of the current step are the policy's."""
        self._past[state.global_step] = {n: p.detach().to("cpu", copy=True) for n, p in self._trained().items()}
        while len(self._past) > self.keep + 1:
            self._past.popitem(last=False)

    @torch.no_grad()
    def _look(self, drawn: Drawn) -> None:
        step = self.trainer.state.global_step
        older = [at for at in self._past if at < step]
        if not older or step % self.every or not self.trainer.model.training:
            return
        own = {name: p.detach().clone() for name, p in self._trained().items()}
        found = {"the policy": self._score(drawn)}
        try:
            for at in older:
                self._put(self._past[at])
                found[f"{step - at} step{'s' if step - at > 1 else ''} ago"] = self._score(drawn)
        finally:
            self._put(own)
        if set(found) != set(self._evidence):
            self._evidence, self._starts = {name: [] for name in found}, self._starts + 1
        for name, values in found.items():
            self._evidence[name] += values
        report = check_drawn(self._evidence, "the policy", LEVEL / (self._starts * (self._starts + 1)))
        self.reports.append(report)
        if report.sound or report.stale:
            self._evidence = {}
        if report.stale:
            if self.on_mismatch == "stop":
                raise StaleWeights(f"step {step}: {report}")
            logger.warning("step %d: %s", step, report)

    def _put(self, weights: dict[str, Tensor]) -> None:
        for name, parameter in self._trained().items():
            parameter.data.copy_(weights[name])

    def _score(self, drawn: Drawn) -> list[float]:
        """The log-probability of each completion's sampled tokens, at the sampling temperature."""
        inputs = drawn.inputs
        completion = inputs["completion_ids"]
        rows = [torch.tensor(row, dtype=torch.bool) for row in drawn.action]
        sampled = pad_sequence(rows, batch_first=True).to(completion.device)
        real = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True).to(completion.device)
        width = completion.size(1) - real.size(1)  # TRL may pad to a multiple of some length
        sampled, real = (functional.pad(mask, (0, width)) for mask in (sampled, real))
        was_training = self.trainer.model.training
        self.trainer.model.eval()
        try:
            logp, *_ = self.trainer._get_per_token_logps_and_entropies(
                self.trainer.model,
                torch.cat([inputs["prompt_ids"], completion], 1),
                torch.cat([inputs["prompt_mask"], real.to(inputs["prompt_mask"].dtype)], 1),
                completion.size(1),
            )
        finally:
            self.trainer.model.train(was_training)
        return list(torch.where(sampled, logp.double(), 0.0).sum(1).tolist())


def _after_generation(trainer: Any, look: Callable[[Drawn], None]) -> None:
    """Call `look` with each batch of completions and TRL's scored inputs."""
    generate, score = trainer._generate, trainer._generate_and_score_completions
    drawn: dict[str, Any] = {}

    def generating(prompts: Sequence[Any]) -> Any:
        made = generate(prompts)
        prompt_ids, completion_ids, tool_mask, completions = made[:4]
        action = tool_mask or [[1] * len(ids) for ids in completion_ids]
        drawn.update(
            prompts=prompts,
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
            action=[[bool(sampled) for sampled in row] for row in action],
            completions=completions,
        )
        return made

    def scoring(*args: Any, **named: Any) -> Any:
        inputs = score(*args, **named)
        look(Drawn(**drawn, inputs=inputs))
        return inputs

    trainer._generate, trainer._generate_and_score_completions = generating, scoring
