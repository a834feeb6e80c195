"""TRL trainers to look at: healthy ones of every kind, and ones with a fault each."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from peft import get_peft_model
from transformers import LlamaForCausalLM
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from integrations.small_trl import arguments, build, lora, model_folder, small_model, tokenizer
from keel.integrations.trl import KeelGRPOTrainer
from keel.kl import KLOptions

RATE = 0.002  # at which an update of the tiny model is neither lost nor too far


def trainer_of(out, cls: type[GRPOTrainer] = GRPOTrainer, **changes: Any) -> Any:
    return build(cls, out, **{"learning_rate": RATE, **changes})


def lora_trainer(out, **changes: Any) -> Any:
    return trainer_of(out, keel={"peft_config": lora()}, learning_rate=0.05, **changes)


def other_model(temperature: float = 1.0) -> Any:
    model = LlamaForCausalLM.from_pretrained(model_folder(seed=7), dtype=torch.float32)
    add_fused_lm_head(model, temperature=temperature)
    return model


# ------------------------------------------------------------------------------------------------- healthy


def with_truncation_masked(out):
    return trainer_of(out, mask_truncated_completions=True, per_device_train_batch_size=32, max_completion_length=12)


def of_keel(out, **options: Any):
    return trainer_of(out, KeelGRPOTrainer, beta=0.0, keel={"kl": KLOptions(beta=0.1, **options)})


def reporting(prompts, trainer, factor=1.0):
    """A `rollout_func` that samples as TRL does and reports `factor` times the log-probabilities."""
    asked, *_ = trainer._tokenize_prompts(prompts)
    completions, _ = trainer._generate_single_turn(asked, None, {}, trainer.num_generations)
    logps = []
    for prompt, tokens in zip(asked, completions, strict=True):
        with torch.no_grad():
            logits = trainer.model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        picked = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None]).squeeze(-1)
        logps.append((factor * picked).tolist())
    return {"prompt_ids": asked, "completion_ids": completions, "logprobs": logps}


def that_reports(out, factor=1.0):
    return trainer_of(out, keel={"rollout_func": partial(reporting, factor=factor)})


HEALTHY = {
    "full": trainer_of,
    "adam": lambda out: trainer_of(out, optim="adamw_torch", learning_rate=1e-3),
    "lora": lora_trainer,
    "pretrained adapter": lambda out: trainer_of(out, model=trained_adapter(), learning_rate=0.05),
    "several updates a batch": lambda out: trainer_of(out, steps_per_generation=4, gradient_accumulation_steps=2),
    "truncated left out": with_truncation_masked,
    "no penalty": lambda out: trainer_of(out, beta=0.0),
    "temperature": lambda out: trainer_of(out, temperature=0.7),
    "a sampler that reports": that_reports,
    "filters": lambda out: trainer_of(out, top_k=15),
    "keel": of_keel,
    "keel, exact": lambda out: of_keel(out, estimator="exact"),
    "keel, lora": lambda out: lora_trainer_of_keel(out),
}


def trained_adapter(**more):
    return get_peft_model(small_model(), lora(init_lora_weights=False, **more))


def lora_trainer_of_keel(out):
    own = {"kl": KLOptions(beta=0.1), "peft_config": lora()}
    return trainer_of(out, KeelGRPOTrainer, beta=0.0, keel=own, learning_rate=0.05)


# -------------------------------------------------------------------------------------------------- faults


def with_another_reference(out):
    trainer = lora_trainer(out)
    trainer.ref_model = other_model()
    return trainer


def without_the_copy_of_its_adapter(out):
    trainer = trainer_of(out, model=trained_adapter())
    trainer.model.delete_adapter("ref")
    return trainer


def with_a_policy_changed_since(out):
    model = small_model()
    with torch.no_grad():
        model.lm_head.weight.mul_(1.3)
    return trainer_of(out, model=model)


def with_the_policy_as_reference(out):
    trainer = trainer_of(out)
    trainer.ref_model = trainer.model
    return trainer


def with_mask(change):
    class Masked(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            output["completion_mask"] = change(output["completion_mask"])
            return output

    return Masked


def without_last(mask):
    return mask * (mask.cumsum(1) < mask.sum(1, keepdim=True))


def with_beta_taken_away(out):
    trainer = trainer_of(out, beta=0.04)
    trainer.beta = 0.0
    return trainer


def with_an_idle_reference(out):
    trainer = trainer_of(out, beta=0.0)
    trainer.ref_model = other_model()
    return trainer


class WithoutKL(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        beta, self.beta = self.beta, 0.0
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self.beta = beta


class TurnedKL(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        self.beta *= -1
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self.beta *= -1


class Turned(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        return super()._compute_loss(model, {**inputs, "advantages": -inputs["advantages"]})


def frozen(out):
    model = small_model()
    model.requires_grad_(False)
    return trainer_of(out, model=model)


def with_a_frozen_adapter(out):
    trainer = lora_trainer(out)
    trainer.model.requires_grad_(False)
    return trainer


class Stale(GRPOTrainer):
    """Samples with a copy of the model that nobody updates."""

    sampler: Any = None

    def _generate_single_turn(self, *args, **named):
        if self.sampler is None:
            self.sampler = copy.deepcopy(self.model)
            self.sampler.forward = type(self.sampler).forward.__get__(self.sampler)  # TRL's head is bound to the policy
        policy, self.model_wrapped = self.model_wrapped, self.sampler
        try:
            return super()._generate_single_turn(*args, **named)
        finally:
            self.model_wrapped = policy


class OfAnotherModel(Stale):
    def _generate_single_turn(self, *args, **named):
        if self.sampler is None:
            self.sampler = other_model()
        return super()._generate_single_turn(*args, **named)


class OfTheOppositeModel(Stale):
    """Any change of the policy makes its tokens likelier, as a sync that works does."""

    def _generate_single_turn(self, *args, **named):
        if self.sampler is None:
            self.sampler = small_model()
            with torch.no_grad():
                self.sampler.lm_head.weight.neg_()
        return super()._generate_single_turn(*args, **named)


class ScoresOfOtherRows(GRPOTrainer):
    def _get_per_token_logps_and_entropies(self, *args, **named):
        logp, *others = super()._get_per_token_logps_and_entropies(*args, **named)
        return logp.roll(1, 0), *others


class WithOtherAttention(GRPOTrainer):
    """Every place of the prompt, padding included, is seen or none."""

    seen: int

    def _get_per_token_logps_and_entropies(self, model, ids, mask, length, **named):
        mask = mask.clone()
        mask[:, :-length] = self.seen
        return super()._get_per_token_logps_and_entropies(model, ids, mask, length, **named)


class PromptsUnseen(WithOtherAttention):
    seen = 0


class PaddingSeen(WithOtherAttention):
    seen = 1


def with_an_optimizer_of_a_copy(out):
    optimizer = torch.optim.SGD(small_model().parameters(), lr=RATE)
    return trainer_of(out, keel={"optimizers": (optimizer, None)})


def with_another_end_in_its_template(out):
    words = tokenizer()
    words.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    words.chat_template = "{% for m in messages %}{{ m['content'] }} <turn> {% endfor %}"
    model = small_model()
    model.resize_token_embeddings(len(words))
    rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"w{n}"}] for n in range(16)]})

    def reward(completions, **_):
        return [float(len(completion[0]["content"]) % 2) for completion in completions]

    return GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=arguments(out, beta=0.0, learning_rate=RATE),
        train_dataset=rows,
        processing_class=words,
    )


class DividedTwice(GRPOTrainer):
    loss_is_scaled_for_ga = False


class OtherText(GRPOTrainer):
    def _generate(self, prompts):
        output = list(super()._generate(prompts))
        output[3] = [text + " w1" for text in output[3]]
        return tuple(output)


def with_rows_in_another_order(*names):
    class Rolled(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            return output | {name: output[name].roll(self.num_generations, 0) for name in names}

    return Rolled


class CutPrompts(GRPOTrainer):
    def _tokenize_prompts(self, prompts):
        ids, *others = super()._tokenize_prompts(prompts)
        return [row[:1] for row in ids], *others


class AfterTheEnd(GRPOTrainer):
    """Does not stop at the end token, and does not cut there."""

    def _generate_single_turn(self, *args, **named):
        ids, logprobs = super()._generate_single_turn(*args, **named)
        return [[*tokens[:1], self.eos_token_ids[0], *tokens[1:]] for tokens in ids], logprobs


def boring(completion_ids, **_):
    return [1.0 for _ in completion_ids]


def raising(completion_ids, answer, **_):
    raise AssertionError("never called")


def endless(completion_ids, **_):
    return [math.inf if tokens[0] % 3 == 0 else 1.0 for tokens in completion_ids]


FAULTS = {
    "the reference of another model under LoRA": ("reference/wrong", with_another_reference),
    "a trained adapter against its base": ("reference/wrong", without_the_copy_of_its_adapter),
    "a policy changed after it was saved": ("reference/wrong", with_a_policy_changed_since),
    "the policy as its own reference": ("reference/moving", with_the_policy_as_reference),
    "padding is trained": ("mask/not-actions", lambda out: trainer_of(out, with_mask(torch.ones_like), seed=3)),
    "the last token is not trained": ("mask/not-actions", lambda out: trainer_of(out, with_mask(without_last))),
    "beta taken away": ("kl/no-gradient", with_beta_taken_away),
    "a reference and no beta": ("kl/no-gradient", with_an_idle_reference),
    "a loss without its KL": ("kl/no-gradient", lambda out: trainer_of(out, WithoutKL)),
    "a KL of the wrong sign": ("kl/reversed", lambda out: trainer_of(out, TurnedKL)),
    "a loss of the wrong sign": ("loss/sign", lambda out: trainer_of(out, Turned)),
    "beta far too large": ("kl/too-strong", lambda out: trainer_of(out, beta=50.0)),
    "all frozen": ("optim/no-update", frozen),
    "a frozen adapter": ("optim/no-update", with_a_frozen_adapter),
    "an optimizer of a copy": ("optim/no-update", with_an_optimizer_of_a_copy),
    "a rate of 0": ("optim/no-update", lambda out: trainer_of(out, learning_rate=0.0)),
    "a rate far too high": ("optim/lr-too-high", lambda out: trainer_of(out, learning_rate=5.0)),
    "a stale sampler": ("sampler/stale", lambda out: trainer_of(out, Stale)),
    "a sampler of another model": (
        "sampler/stale",
        lambda out: trainer_of(out, OfAnotherModel, per_device_train_batch_size=32, max_completion_length=12),
    ),
    "a sampler of the opposite model": ("sampler/stale", lambda out: trainer_of(out, OfTheOppositeModel, seed=2)),
    "prompts that are not seen": ("mask/attention", lambda out: trainer_of(out, PromptsUnseen)),
    "padding that is seen": ("scoring/positions", lambda out: trainer_of(out, PaddingSeen)),
    "scores of other rows": ("scoring/mismatch", lambda out: trainer_of(out, ScoresOfOtherRows)),
    "a sampler that reports too little": ("sampler/mismatch", partial(that_reports, factor=0.5)),
    "a sampler that takes the likeliest": (
        "sampler/filter",
        lambda out: trainer_of(
            out, generation_kwargs={"top_k": 1}, per_device_train_batch_size=32, max_completion_length=12
        ),
    ),
    "another temperature": (
        "sampler/temperature",
        lambda out: trainer_of(out, generation_kwargs={"temperature": 0.3}),
    ),
    "another end in the template": ("model/end-token", with_another_end_in_its_template),
    "completions of other rows": (
        "sampler/swapped",
        lambda out: trainer_of(out, with_rows_in_another_order("completion_ids", "completion_mask")),
    ),
    "prompts of other rows": (
        "sampler/other-prompt",
        lambda out: trainer_of(out, with_rows_in_another_order("prompt_ids", "prompt_mask")),
    ),
    "prompts that are cut": ("prompt/no-question", lambda out: trainer_of(out, CutPrompts)),
    "text after the end": ("mask/end", lambda out: trainer_of(out, AfterTheEnd)),
    "another text is judged": ("output/text", lambda out: trainer_of(out, OtherText)),
    "a loss divided twice": ("loss/scale", lambda out: trainer_of(out, DividedTwice, gradient_accumulation_steps=2)),
    "dropout": ("scoring/dropout", lambda out: trainer_of(out, model=trained_adapter(lora_dropout=0.5))),
    "constant rewards": (
        "reward/constant",
        lambda out: trainer_of(out, reward=boring, per_device_train_batch_size=32),
    ),
    "a reward that raises": ("reward/failed", lambda out: trainer_of(out, reward=raising)),
    "infinite rewards": ("reward/non-finite", lambda out: trainer_of(out, reward=endless)),
}


def codes(diagnosis) -> list[str]:
    return [finding.code for finding in diagnosis.findings if finding.severity != "note"]
