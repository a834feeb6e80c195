"""One batch through the trainer's own methods, with the intermediate results."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from trl.trainer.utils import split_tensor_dict

from keel.base.errors import KeelError, first_line
from keel.doctor.draws import Draws
from keel.doctor.gap import average, largest
from keel.doctor.thresholds import Thresholds
from keel.doctor.weights import Text, each_logits, perturbed_weights
from keel.integrations.trl.preflight.subject import patched, trainable
from keel.integrations.trl.trainer import KeelGRPOTrainer
from keel.models.pack import right_pad
from keel.rollout.sampling import SamplingParams

ENOUGH_KL = 0.3  # nats per token between the policy and its perturbed self: far beyond rounding
FIRST_NOISE, MOST_TRIES = 0.05, 6


@dataclass(frozen=True)
class Judged:
    """Inputs and results of the rewards: `rewards` is `[B, functions]`; `error` is the exception of one of them."""

    completions: Sequence[Any]
    rewards: Tensor
    error: str | None = None


@dataclass(frozen=True)
class Subject:
    """The trainer, the rows of data of its first batch, and the batch.

    `generated` is what `_generate` gave: token ids without padding, the mask of tools, texts, log-probabilities.
    """

    trainer: Any
    rows: Sequence[Mapping[str, Any]]
    prompts: Sequence[Any]
    generated: tuple[Any, ...]
    judged: Judged
    batch: dict[str, Any]
    weights: list[Tensor]  # trainable before any pass: peft unfreezes an adapter that it has switched off and on
    shared: dict[str, Any] = field(default_factory=dict)  # what one probe measured and a later one reads

    @property
    def device(self) -> torch.device:
        device: torch.device = self.trainer.accelerator.device
        return device

    @property
    def texts(self) -> list[Text]:
        """Prompt and completion of every row, as they were sampled."""
        prompts, completions = self.generated[:2]
        return [(tuple(map(int, p)), tuple(map(int, c))) for p, c in zip(prompts, completions, strict=True)]

    @property
    def tools(self) -> bool:
        """Whether completions hold tokens that the policy did not sample."""
        return self.generated[2] is not None

    @property
    def sampled(self) -> Tensor:
        """`[B, T]`: true on the tokens that the policy sampled, independent of the trainer's masks."""
        foreign = self.generated[2]
        rows = [[1] * len(tokens) for _, tokens in self.texts] if foreign is None else foreign
        mask = right_pad([tuple(row) for row in rows], 0).bool().to(self.device)
        return torch.nn.functional.pad(mask, (0, self.width - mask.shape[1]))

    @property
    def present(self) -> Tensor:
        """`[B, T]`: true on every token of a completion, tools' answers too."""
        lengths = torch.tensor([len(tokens) for _, tokens in self.texts], device=self.device)
        return torch.arange(self.width, device=self.device) < lengths[:, None]

    @property
    def whole(self) -> dict[str, Any]:
        """The batch with the sampled ids and full masks in place of the trainer's."""
        pad, texts = self.trainer._tokenizer.pad_token_id, self.texts
        prompts = right_pad([prompt[::-1] for prompt, _ in texts], pad).flip(1)  # padded on the left, as TRL does
        seen = right_pad([(1,) * len(prompt) for prompt, _ in texts], 0).flip(1)
        completions = right_pad([tokens for _, tokens in texts], pad)
        ids = torch.nn.functional.pad(completions, (0, self.width - completions.shape[1]), value=pad)
        parts = {"prompt_ids": prompts, "prompt_mask": seen, "completion_ids": ids}
        return (
            self.batch
            | {name: x.to(self.device) for name, x in parts.items()}
            | {"completion_mask": self.present.long()}
        )

    @property
    def noisy(self) -> bool:
        """Whether two passes over the same tokens differ, so that comparisons of passes are unreliable."""
        return "noise of a pass" in self.shared

    @property
    def rows_hold(self) -> bool:
        """Whether the batch has the sampled tokens, row by row, as far as it was checked."""
        return "rows differ" not in self.shared

    @property
    def half(self) -> bool:
        """Whether training's passes run in 16 bits."""
        args = self.trainer.args
        return bool(args.bf16) or self.trainer.model.dtype != torch.float32

    def close(self, differences: Tensor, thresholds: Thresholds) -> bool:
        """Within rounding: the largest difference in fp32, the mean one in 16 bits."""
        if self.half:
            return average(differences) <= thresholds["scoring_gap_half"]
        return largest(differences) <= thresholds["scoring_gap"]

    @property
    def width(self) -> int:
        return int(self.batch["completion_ids"].shape[1])

    @property
    def beta(self) -> float:
        """The coefficient of the KL term, without a warm-up."""
        return float(self.trainer.keel_state.kl.base if self.keel else self.trainer.beta)

    @property
    def keel(self) -> bool:
        return isinstance(self.trainer, KeelGRPOTrainer)

    @property
    def sampling(self) -> SamplingParams:
        """The trainer's sampling options."""
        t = self.trainer
        return SamplingParams(t.temperature, t.top_p or 1.0, t.top_k or 0, t.min_p or 0.0)

    @property
    def advantages(self) -> Tensor:
        """The batch's own advantages; if all are 0, made-up ones of both signs."""
        own: Tensor = self.batch["advantages"]
        return own if bool(own.any()) else signs(own)

    def micro(self, batch: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The first microbatch of a batch, as training splits it."""
        whole = self.batch if batch is None else batch
        first: dict[str, Any] = split_tensor_dict(dict(whole), self.trainer.args.steps_per_generation)[0]
        return first

    # ------------------------------------------------------------------------------------- the model's own forward

    def forward_logp(self, model: nn.Module | None = None, texts: Sequence[Text] | None = None) -> Tensor:
        """Log-probabilities `[B, T]` by the model's own forward, row by row without padding, at the temperature."""
        chosen = self.texts if texts is None else texts
        scored = torch.zeros(len(chosen), max(len(tokens) for _, tokens in chosen), device=self.device)
        for row, drawn in self.each_draw(model, chosen):
            scored[row, : len(drawn)] = drawn.logp(SamplingParams(self.sampling.temperature)).float()
        if texts is not None:
            return scored
        return torch.nn.functional.pad(scored, (0, self.width - scored.shape[1]))

    def each_draw(self, model: nn.Module | None, texts: Sequence[Text]) -> Iterator[tuple[int, Draws]]:
        """Number of a row, its tokens and the logits that they were drawn from."""
        with self.trainer.accelerator.autocast():
            for row, logits in each_logits(self.trainer.model if model is None else model, texts, self.device):
                tokens = torch.tensor(texts[row][1], device=self.device)
                nothing = torch.full(tokens.shape, torch.nan, dtype=torch.float64, device=self.device)
                yield row, Draws(logits.double(), tokens, nothing, torch.full_like(tokens, row))

    # ---------------------------------------------------------------------------------------- the trainer's own way

    def scored(self, batch: Mapping[str, Any] | None = None) -> Tensor:
        """The log-probabilities `[B, T]` of a batch as training computes them, in training mode."""
        b = self.batch if batch is None else batch
        ids = torch.cat([b["prompt_ids"], b["completion_ids"]], dim=1)
        attention = torch.cat([b["prompt_mask"], b["completion_mask"]], dim=1)
        with torch.no_grad():
            logp, _, _ = self.trainer._get_per_token_logps_and_entropies(
                self.trainer.model,
                ids,
                attention,
                b["completion_ids"].shape[1],
                batch_size=self.trainer.args.per_device_train_batch_size,
            )
        return logp.float()

    def rescored(self) -> dict[str, Any]:
        """Pass the same tokens and rewards through `_generate_and_score_completions` with the current weights."""
        trainer = self.trainer
        with patched(
            trainer,
            _generate=lambda prompts: copy.deepcopy(self.generated),
            _calculate_rewards=lambda *_, **__: self.judged.rewards.clone(),
        ):
            batch: dict[str, Any] = trainer._generate_and_score_completions([dict(row) for row in self.rows])
        return batch

    def loss(self, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """The trainer's loss of a microbatch, and the log-probabilities `[B, T]` that it differentiates."""
        seen: list[Tensor] = []
        score = self.trainer._get_per_token_logps_and_entropies

        def keep(*args: Any, **named: Any) -> Any:
            scored = score(*args, **named)
            seen.append(scored[0])
            return scored

        trainer = self.trainer
        scoring = patched(trainer, _get_per_token_logps_and_entropies=keep)
        with scoring, torch.enable_grad(), trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(trainer.model, dict(inputs))
        return loss, seen[-1]

    def logp_gradient(self, inputs: Mapping[str, Any], beta: float | None = None) -> Tensor:
        """∂loss/∂logp `[B, T]` of a microbatch, at the trainer's β or another one."""
        with self.at_beta(self.beta if beta is None else beta):
            loss, logp = self.loss(inputs)
        (gradient,) = torch.autograd.grad(loss, logp, allow_unused=True)
        return torch.zeros_like(logp) if gradient is None else gradient.double()

    def gradients(self, inputs: Mapping[str, Any], beta: float | None = None) -> list[Tensor]:
        """The gradient of every trainable weight."""
        with self.at_beta(self.beta if beta is None else beta):
            loss, _ = self.loss(inputs)
        weights = self.weights
        if not loss.requires_grad:
            return [torch.zeros_like(weight) for weight in weights]
        given = torch.autograd.grad(loss, weights, allow_unused=True)
        return [torch.zeros_like(w) if g is None else g for w, g in zip(weights, given, strict=True)]

    @contextmanager
    def at_beta(self, beta: float) -> Iterator[None]:
        """Change the coefficient of the KL term within the context."""
        if self.keel:
            state = self.trainer.keel_state
            with patched(self.trainer, keel_state=replace(state, kl=replace(state.kl, beta=beta))):
                yield
        else:
            with patched(self.trainer, beta=beta):
                yield

    @contextmanager
    def perturbed(self, kl: float = ENOUGH_KL) -> Iterator[float]:
        """Add noise to the trainable weights for a KL of about `kl` nats per token; returns the measured KL."""
        scale, tries = self.shared.setdefault("noise", {}).get(kl, FIRST_NOISE), MOST_TRIES
        while kl not in self.shared["noise"]:
            with perturbed_weights(self.weights, scale):
                moved, tries = self._moved(), tries - 1
            if kl / 4 <= moved <= 4 * kl or tries == 0:
                self.shared["noise"][kl] = scale
            else:
                scale *= min(8.0, max(0.125, math.sqrt(kl / moved))) if 0 < moved < math.inf else 8.0
        with perturbed_weights(self.weights, scale):
            yield self._moved()

    def _moved(self) -> float:
        """The KL to the policy before the change, in nats per token, to second order."""
        moved = (self.forward_logp() - self.forward)[self.sampled].double()
        return float(moved.square().mean() / 2)

    @property
    def forward(self) -> Tensor:
        """The log-probabilities `[B, T]` of the model's own forward before any change."""
        if "forward" not in self.shared:
            self.shared["forward"] = self.forward_logp()
        logp: Tensor = self.shared["forward"]
        return logp


def signs(advantages: Tensor) -> Tensor:
    """Advantages of both signs in the same shape, 1 and −1 in turn from row to row."""
    sign = 1.0 - 2.0 * (torch.arange(len(advantages), device=advantages.device) % 2)
    return (sign if advantages.dim() == 1 else sign[:, None].expand_as(advantages)).to(advantages)


def first_batch(trainer: Any) -> Subject:
    """The first batch of training, through `_generate_and_score_completions`. Call it inside `untouched`."""
    weights = trainable(trainer)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    loader = trainer.get_train_dataloader()
    rows = next(iter(loader), None)
    loader.end()
    if not rows:
        completions, each = trainer.args.generation_batch_size, trainer.num_generations
        raise KeelError(
            f"the trainer's data give no batch: {completions} completions of {each} a prompt need "
            f"{completions // each} rows"
        )
    seen: dict[str, Any] = {}
    generate, judge = trainer._generate, trainer._calculate_rewards

    def keep_generated(prompts: Any) -> Any:
        seen["prompts"] = copy.deepcopy(prompts)
        seen["generated"] = generate(prompts)
        return seen["generated"]

    def keep_judged(inputs: Any, prompts: Any, completions: Any, ids: Any) -> Any:
        try:
            rewards, error = judge(inputs, prompts, completions, ids), None
        except Exception as raised:  # a user's reward may raise anything; the other probes still run
            rewards = torch.zeros(len(prompts), len(trainer.reward_funcs), device=trainer.accelerator.device)
            error = f"{type(raised).__name__}: {first_line(raised)}"
        seen["judged"] = Judged(completions, rewards, error)
        return rewards

    with patched(trainer, _generate=keep_generated, _calculate_rewards=keep_judged):
        batch = trainer._generate_and_score_completions([dict(row) for row in rows])
    return Subject(trainer, rows, seen["prompts"], copy.deepcopy(seen["generated"]), seen["judged"], batch, weights)


__all__ = ["ENOUGH_KL", "Judged", "Subject", "first_batch", "signs"]
