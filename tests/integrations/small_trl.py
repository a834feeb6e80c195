"""A model of two layers with a vocabulary of tens, and TRL trainers around it that take a second for some steps."""

from __future__ import annotations

import gc
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from keel.integrations.trl import KeelGRPOTrainer, KeelRunCallback
from keel.kl import KLOptions

gc.freeze()  # accelerate collects garbage at every start of training: what is imported is none
WORDS = [*(f"w{number}" for number in range(20)), "<eos>", "<pad>"]
TRLS_OWN = KLOptions(estimator="k3", gradient="rho", reduction="loss")
STEADY = KLOptions(beta=0.1)
SAVED = tempfile.TemporaryDirectory(prefix="keel-trl-")  # removed when this process ends


def tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", pad_token="<pad>", unk_token="w0")


@cache
def model_folder(seed: int = 0) -> str:
    """The start of every run here, saved: TRL reads its reference from there."""
    folder = f"{SAVED.name}/{seed}"
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.6,  # so that answers differ
        eos_token_id=WORDS.index("<eos>"),
        pad_token_id=WORDS.index("<pad>"),
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def small_model() -> Any:
    return LlamaForCausalLM.from_pretrained(model_folder(), dtype=torch.float32)


def even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that a random model earns now and then."""
    return [sum(token % 2 == 0 for token in tokens) / max(1, len(tokens)) for tokens in completion_ids]


def arguments(out: Path, **changes: Any) -> GRPOConfig:
    options: dict[str, Any] = {
        "learning_rate": 0.02,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "max_completion_length": 5,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "gradient_accumulation_steps": 1,
        "max_steps": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "beta": 0.2,
        "seed": 1,
    }
    return GRPOConfig(output_dir=str(out), **{**options, **changes})


def build(
    trainer: type[GRPOTrainer], out: Path, *, model: Any = None, keel: Any = None, reward: Any = even, **changes: Any
) -> Any:
    """A trainer on the tiny model; `changes` are of GRPOConfig, `keel` are arguments of KeelGRPOTrainer."""
    rows = Dataset.from_dict({"prompt": [f"w{number} w{number + 1}" for number in range(16)]})
    return trainer(
        model=small_model() if model is None else model,
        reward_funcs=reward,
        args=arguments(out, **changes),
        train_dataset=rows,
        processing_class=tokenizer(),
        **(keel or {}),
    )


def keel_trainer(
    out: Path,
    kl: KLOptions = STEADY,
    cls: type[KeelGRPOTrainer] = KeelGRPOTrainer,
    *,
    more: Any = None,
    if_exists: str = "refuse",
    rollouts_every: int | None = None,
    **changes: Any,
) -> Any:
    """Keel's trainer without a report; `more` are further arguments of its own."""
    callback = KeelRunCallback(report=False, if_exists=if_exists, rollouts_every=rollouts_every)
    return build(cls, out, beta=0.0, keel={"kl": kl, "callbacks": [callback], **(more or {})}, **changes)


def lora(**more: Any) -> LoraConfig:
    return LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **more)


def lines(out: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The records of a run's file."""
    return [json.loads(line) for line in (Path(out) / name).read_text().splitlines()]


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}


def gap(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """The largest difference between two sets of weights."""
    return max((first[name] - second[name]).abs().max().item() for name in first)


def scripted(prompts: list[str], trainer: Any, *, outside: bool = False) -> dict[str, Any]:
    """A `rollout_func` whose completions go by prompt, place in the group and step, whichever process asks.

    `outside`: the token after the first is an environment's, not the policy's.
    """
    prompt_ids = [trainer._tokenizer(prompt)["input_ids"] for prompt in prompts]
    ids, masks = [], []
    for row, prompt in enumerate(prompt_ids):
        place = row % trainer.num_generations
        draw = torch.Generator().manual_seed(hash((*prompt, place, trainer.state.global_step)) % 2**31)
        tokens = torch.randint(0, 20, (int(torch.randint(2, 6, (), generator=draw)),), generator=draw).tolist()
        ids.append(tokens if place == 0 else [*tokens[:-1], WORDS.index("<eos>")])  # the first was cut off
        masks.append([0 if outside and index == 1 else 1 for index in range(len(tokens))])
    output = {"prompt_ids": prompt_ids, "completion_ids": ids, "logprobs": None}
    return {**output, "env_mask": masks} if outside else output
