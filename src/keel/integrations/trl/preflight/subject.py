"""A TRL trainer as a subject of the doctor: its parts, and one batch from its own methods."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from trl.trainer.utils import split_tensor_dict, use_adapter

from keel.base.errors import KeelError, first_line
from keel.base.types import Completion, Group, Problem
from keel.config import Config
from keel.doctor.findings import Options
from keel.doctor.names import option_name
from keel.doctor.subject import RELATIVE_NOISE, Budget, Power, Subject, perturbed_weights
from keel.doctor.thresholds import Thresholds
from keel.integrations.trl.preflight.trainer import patched, trainable
from keel.integrations.trl.scoring import policy_of
from keel.integrations.trl.settings import config_of
from keel.integrations.trl.trainer import KeelGRPOTrainer
from keel.models.head import is_lora
from keel.models.options import LoadedModel
from keel.models.pack import right_pad
from keel.reference.weights import unwrap
from keel.rollout.sampling import SamplingParams

_SPELLED = {"model.scorer": "_get_per_token_logps_and_entropies", "model.lora.dropout": "lora_dropout"}
_RANDOM = {"scoring/dropout", "scoring/nondeterministic"}  # findings that two passes over the same tokens differ


@dataclass(frozen=True)
class TrlSubject(Subject):
    """A trainer, the data rows of its first batch, and the batch.

    `generated` is the output of `_generate`: token ids without padding, the mask of tool tokens, texts and
    log-probabilities. `to_rewards` are the completions that the reward functions received. `rewards` is
    `[B, functions]`. `error` is a reward function's exception. `weights` are the weights that were trainable before any
    pass, because peft unfreezes an adapter when it is disabled and enabled again.
    """

    powers: ClassVar[frozenset[Power]] = frozenset({"score", "sample", "sync", "reference", "loss", "first_update"})

    trainer: Any
    rows: Sequence[Mapping[str, Any]]
    prompts: Sequence[Any]
    generated: tuple[Any, ...]
    to_rewards: Sequence[Any]
    rewards: Tensor
    error: str | None
    batch: dict[str, Any]
    weights: list[Tensor]
    thresholds: Thresholds
    budget: Budget = field(default_factory=Budget)
    found: set[str] = field(default_factory=set)
    shared: dict[str, Any] = field(default_factory=dict)  # results that the measures share
    of_batch: dict[str, Any] = field(default_factory=dict)

    def lacks(self, power: Power) -> str:
        trainer, frozen = self.trainer, "" if self.weights else "no weight is trainable"
        random = "two passes over the same tokens differ" if _RANDOM & self.found else ""
        vllm = "the preflight does not sync changed weights to vLLM" if trainer.use_vllm else ""
        no_reference = "β is 0, so TRL scores no reference" if self.beta == 0 else "no ref_per_token_logps"
        backward = any(part in str(trainer.args.optim) for part in ("lomo", "layerwise"))
        reasons: dict[Power, str] = {
            "loss": frozen or random,
            "sync": vllm or ("completions contain tokens of tools" if self.tools else frozen),
            "reference": random if self.batch.get("ref_per_token_logps") is not None else no_reference,
            "gradient": "for a TRL trainer only values are compared, not gradients",
            "golds": "a TRL trainer has no gold answers",
            "first_update": "this optimizer updates during the backward pass" if backward else "",
        }
        return reasons.get(power) or super().lacks(power)

    def spelled(self, options: Options) -> Options:
        spelled: dict[str, Any] = {}
        for name, value in options.items():
            if name == "model.dropout":
                spelled["disable_dropout"] = not value
            else:
                own = self.keel and name.startswith(("kl.", "guards.", "reference."))
                spelled[name if own else _SPELLED.get(name) or option_name(name, "TRL")] = value
        return spelled

    @cached_property
    def config(self) -> Config:  # type: ignore[override]
        trainer = self.trainer
        adapters = getattr(unwrap(trainer.model), "peft_config", {}).values()
        lora = {"model__lora": {"dropout": max(float(a.lora_dropout) for a in adapters)}} if adapters else {}
        own = {"model__dropout": not trainer.args.disable_dropout, **lora}
        return config_of(trainer.args, trainer.keel if self.keel else None, **own)[0]

    @cached_property
    def policy(self) -> LoadedModel:
        return policy_of(self.trainer)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        return self._grouped(self.generated)

    @property
    def sampling(self) -> SamplingParams:
        t = self.trainer
        return SamplingParams(t.temperature, t.top_p or 1.0, t.top_k or 0, t.min_p or 0.0, t.max_completion_length, 1)

    @property
    def in_half_precision(self) -> bool:
        with self.trainer.accelerator.autocast():
            narrow = torch.is_autocast_enabled(self.policy.device.type)
        return narrow or any(parameter.dtype != torch.float32 for parameter in self.policy.model.parameters())

    @contextmanager
    def without_autocast(self) -> Iterator[None]:
        with patched(self.trainer.accelerator, autocast=nullcontext):
            yield

    @property
    def keel(self) -> bool:
        return isinstance(self.trainer, KeelGRPOTrainer)

    @property
    def beta(self) -> float:
        """The coefficient of the KL term, without a warm-up."""
        return float(self.trainer.keel_state.kl.base if self.keel else self.trainer.beta)

    @property
    def tools(self) -> bool:
        """Whether completions contain tokens that the policy did not sample."""
        return self.generated[2] is not None

    @property
    def sampled(self) -> Tensor:
        """A mask `[B, T]` of the tokens that the policy sampled, independent of the trainer's masks."""
        rows = (c.action for group in self.groups for c in group.completions)
        return right_pad(rows, False).bool().to(self.policy.device)

    @property
    def advantages(self) -> Tensor:
        """The batch's own advantages; if all are 0, artificial ones of both signs."""
        own: Tensor = self.batch["advantages"]
        return own if bool(own.any()) else signs(own)

    def of_batch_width(self, values: Tensor) -> Tensor:
        """Pad `[B, T]` to the width of the batch's tensors."""
        return pad(values, (0, self.batch["completion_ids"].shape[1] - values.shape[1]))

    def batch_values(self, name: str) -> Tensor:
        """A tensor of the batch, cut to `[B, T]` with T of the longest completion."""
        values = self.batch[name].float()
        return pad(values, (0, self.written.shape[1] - values.shape[1]))

    # ------------------------------------------------------------------------ the sampler, and training's scores

    def sample(self, *, step: int = 0) -> list[Group]:
        torch.manual_seed(step)
        return list(self._grouped(self.trainer._generate(copy.deepcopy(self.prompts))))

    def sync(self) -> None:
        self.trainer.state.global_step += 1  # TRL syncs its samplers once per step

    def _grouped(self, generated: tuple[Any, ...]) -> tuple[Group, ...]:
        """One group per completion, because TRL renders the prompt for each."""
        prompts, completions, foreign, _, reported = generated[:5]
        groups = []
        for row, (prompt, ids) in enumerate(zip(prompts, completions, strict=True)):
            tokens, nothing = tuple(map(int, ids)), (math.nan,) * len(ids)
            action = (True,) * len(tokens) if foreign is None else tuple(map(bool, foreign[row]))
            drawn = nothing
            if reported is not None:  # these are log-probabilities after vLLM's filters
                drawn = tuple(math.nan if logp is None else float(logp) for logp in reported[row])
            plain = nothing if self.sampling.filtered else drawn
            ended = bool(tokens) and tokens[-1] in self.policy.eos_ids
            completion = Completion(tokens, action, plain, drawn, "", "eos" if ended else "length")
            groups.append(Group(Problem(str(row), self.prompts[row]), tuple(map(int, prompt)), (completion,)))
        return tuple(groups)

    def score(self, groups: Sequence[Group] | None = None) -> Tensor:
        texts = [(group.prompt_tokens, c.tokens) for group in self.chosen(groups) for c in group.completions]
        pad_id = self.policy.pad_id
        prompts = right_pad([prompt[::-1] for prompt, _ in texts], pad_id).flip(1)  # left-padded, as in TRL
        completions = right_pad([tokens for _, tokens in texts], pad_id)
        given = right_pad([(1,) * len(prompt) for prompt, _ in texts], 0).flip(1)
        written = right_pad([(1,) * len(tokens) for _, tokens in texts], 0)
        device, width, size = self.policy.device, written.shape[1], self.trainer.args.per_device_train_batch_size
        ids, seen = torch.cat([prompts, completions], 1).to(device), torch.cat([given, written], 1).to(device)
        score, model = self.trainer._get_per_token_logps_and_entropies, self.trainer.model
        parts = (slice(start, start + size) for start in range(0, len(ids), size))
        logp = torch.cat([score(model, ids[part], seen[part], width)[0].detach().float() for part in parts])
        return logp.masked_fill(seen[:, -width:] == 0, 0.0)

    def each_logits(self, groups: Sequence[Group] | None = None) -> Iterator[tuple[int, Tensor]]:
        with self.trainer.accelerator.autocast():
            yield from super().each_logits(groups)

    @contextmanager
    def reference(self) -> Iterator[TrlSubject]:
        """The subject with the reference's model: `ref_model`, or the policy's model with the adapter disabled."""
        trainer, policy = self.trainer, unwrap(self.trainer.model)

        def of(model: nn.Module) -> TrlSubject:
            return self.swapped(policy=replace(self.policy, model=model))

        if self.keel:
            with trainer.keel_reference.model() as model:
                yield of(model)
        elif trainer.ref_model is not None or not is_lora(policy):
            yield of(trainer.model if trainer.ref_model is None else trainer.ref_model)
        else:
            with use_adapter(policy, "ref" if "ref" in policy.peft_config else None):
                yield self

    # ------------------------------------------------------------------------ the weights changed, and the loss

    @contextmanager
    def perturbed(self, relative: float = RELATIVE_NOISE, seed: int = 0) -> Iterator[None]:
        with perturbed_weights(self.weights, relative, seed):
            yield

    def rescored(self) -> dict[str, Any]:
        """Pass the same tokens and rewards through `_generate_and_score_completions` with the current weights."""
        generated, rewards = copy.deepcopy(self.generated), self.rewards.clone()
        with patched(self.trainer, _generate=lambda _: generated, _calculate_rewards=lambda *_, **__: rewards):
            batch: dict[str, Any] = self.trainer._generate_and_score_completions([dict(row) for row in self.rows])
        return batch

    def micro(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The first microbatch of a batch, as training splits it."""
        first: dict[str, Any] = split_tensor_dict(dict(batch), self.trainer.args.steps_per_generation)[0]
        return first

    def loss(self, inputs: Mapping[str, Any], beta: float | None = None) -> tuple[Tensor, Tensor]:
        """The trainer's loss of a microbatch and the log-probabilities in it, at the trainer's β or a given one."""
        trainer, seen, settings = self.trainer, list[Tensor](), {}
        score = trainer._get_per_token_logps_and_entropies

        def keep(*args: Any, **named: Any) -> Any:
            scored = score(*args, **named)
            seen.append(scored[0])
            return scored

        if self.keel:
            state, own = trainer.keel_state, self.beta if beta is None else beta
            settings = {"keel_state": replace(state, kl=replace(state.kl, beta=own))}
        elif beta is not None:
            settings = {"beta": beta}
        scoring = patched(trainer, _get_per_token_logps_and_entropies=keep, **settings)
        with scoring, torch.enable_grad(), trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(trainer.model, dict(inputs))
        return loss, seen[-1]

    def logp_gradient(self, inputs: Mapping[str, Any], beta: float | None = None) -> Tensor:
        """∂loss/∂logp `[B, T]` of a microbatch."""
        loss, logp = self.loss(inputs, beta)
        (gradient,) = torch.autograd.grad(loss, logp, allow_unused=True)
        return torch.zeros_like(logp) if gradient is None else gradient.double()

    def gradients(self, inputs: Mapping[str, Any], beta: float | None = None) -> list[Tensor]:
        """The gradient of every trainable weight."""
        loss, _ = self.loss(inputs, beta)
        given = torch.autograd.grad(loss, self.weights, allow_unused=True) if loss.requires_grad else self.weights
        return [torch.zeros_like(w) if g is None or g is w else g for w, g in zip(self.weights, given, strict=True)]


def signs(advantages: Tensor) -> Tensor:
    """Advantages of the same shape that alternate between 1 and −1 from row to row."""
    sign = 1.0 - 2.0 * (torch.arange(len(advantages), device=advantages.device) % 2)
    return (sign if advantages.dim() == 1 else sign[:, None].expand_as(advantages)).to(advantages)


def first_batch(trainer: Any, thresholds: Thresholds) -> TrlSubject:
    """The first batch of training, from `_generate_and_score_completions`. Call it inside `untouched`."""
    weights = trainable(trainer)
    trainer.model.train()
    trainer.model.zero_grad()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    loader = trainer.get_train_dataloader()
    rows = next(iter(loader), None)
    loader.end()
    if not rows:
        completions, each = trainer.args.generation_batch_size, trainer.num_generations
        raise KeelError(
            f"the training data is too small for a batch: {completions} completions with {each} per prompt need "
            f"{completions // each} rows"
        )
    seen: dict[str, Any] = {"error": None}
    generate, judge = trainer._generate, trainer._calculate_rewards

    def keep_generated(prompts: Any) -> Any:
        seen["prompts"] = copy.deepcopy(prompts)
        generated = generate(prompts)
        seen["generated"] = copy.deepcopy(generated)
        return generated

    def keep_judged(inputs: Any, prompts: Any, completions: Any, ids: Any) -> Any:
        seen["to_rewards"] = completions
        try:
            seen["rewards"] = judge(inputs, prompts, completions, ids)
        except Exception as raised:  # a user's reward may raise anything; the other measures still run
            seen["rewards"] = torch.zeros(len(prompts), len(trainer.reward_funcs), device=trainer.accelerator.device)
            seen["error"] = f"{type(raised).__name__}: {first_line(raised)}"
        return seen["rewards"]

    with patched(trainer, _generate=keep_generated, _calculate_rewards=keep_judged):
        batch = trainer._generate_and_score_completions([dict(row) for row in rows])
    return TrlSubject(trainer=trainer, rows=rows, batch=batch, weights=weights, thresholds=thresholds, **seen)


__all__ = ["TrlSubject", "first_batch", "signs"]
