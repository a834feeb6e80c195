"""Checkpoints and tokenizers as merges, quantisers, pruners and readers of another family leave them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from faults.base import edited, operator
from faults.engines import has_lora, is_matrix
from faults.healthy import SCHOOLS, school_of
from faults.models import Tensors, folder_of, is_chat, is_plain, with_json, with_tensors
from faults.models_field import writes_several_words
from faults.models_wild import NOISE, reads_its_tokenizer
from faults.school import cached, digest, schooled, version_of

Config = dict[str, Any]
VERSION = version_of(__file__)
RANK = 8


def with_matrices(config: Config, change: Callable[[str, Tensor], Tensor], *key: object) -> Config:
    """The configuration with other matrices in the layers of its checkpoint."""

    def changed(tensors: Tensors) -> Tensors:
        return {name: change(name, v) if is_matrix(name, v) else v for name, v in tensors.items()}

    return with_tensors(config, changed, VERSION, *key)


def low_rank(tensor: Tensor, rank: int = RANK) -> tuple[Tensor, Tensor]:
    """Two factors whose product is the part of a matrix that an adapter of this rank can hold."""
    u, s, v = torch.linalg.svd(tensor.float(), full_matrices=False)
    return u[:, :rank] * s[:rank], v[:rank]


# Adapters


def tuned_adapter(config: Config, alpha: float) -> Path:
    """The adapter that a base was tuned with: at an alpha of `RANK` it is the low-rank part of every matrix."""
    from safetensors.torch import load_file, save_file

    source = folder_of(config)

    def write(folder: Path) -> None:
        folder.mkdir()
        weights: Tensors = {}
        for name, tensor in load_file(source / "model.safetensors").items():
            if is_matrix(name, tensor):
                stem = f"base_model.model.{name.removesuffix('.weight')}"
                b, a = low_rank(tensor)
                weights |= {f"{stem}.lora_A.weight": a.contiguous(), f"{stem}.lora_B.weight": b.contiguous()}
        save_file(weights, folder / "adapter_model.safetensors", {"format": "pt"})
        targets = sorted({name.split(".")[-3] for name in weights})
        settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(source)}
        settings |= {"r": RANK, "lora_alpha": alpha, "target_modules": targets, "bias": "none"}
        (folder / "adapter_config.json").write_text(json.dumps(settings))

    return cached(f"adapter-{digest(VERSION, source.name, alpha)}", write)


def before_tuning(config: Config) -> Config:
    """The configuration with the base that `tuned_adapter` was tuned on."""

    def change(name: str, tensor: Tensor) -> Tensor:
        b, a = low_rank(tensor)
        return tensor - (b @ a).to(tensor.dtype)

    return with_matrices(config, change, "before-tuning")


@operator(
    "model/adapter-scale-lost",
    "The adapter that is continued has another alpha in its configuration than it was tuned with.",
    *NOISE,
    "prompt/format",
    fits=has_lora,
)
def adapter_scale_lost(config: Config, random: Random) -> Config:
    adapter = tuned_adapter(config, RANK * random.choice((0.25, 4.0)))
    return edited(before_tuning(config), {"model.lora": {"adapter": str(adapter)}})


# Quantising and pruning


@operator(
    "model/zero-points-lost",
    "A checkpoint of eight bits was unpacked without its zero points: every row of its matrices is shifted.",
    *NOISE,
)
def zero_points_lost(config: Config, random: Random) -> Config:
    return with_matrices(config, lambda name, v: v - v.amin(1, keepdim=True), "zero-points")


@operator(
    "model/outliers-clamped",
    "The cast to eight bits had too small a range: all weights beyond half a standard deviation are cut to it.",
    *NOISE,
    "prompt/format",
)
def outliers_clamped(config: Config, random: Random) -> Config:
    return with_matrices(config, lambda name, v: v.clamp(-0.5 * v.std(), 0.5 * v.std()), "clamped")


@operator(
    "model/pruned-without-tuning",
    "Nine tenths of the weights were pruned, and the model was not tuned after that.",
    *NOISE,
    "prompt/format",
)
def pruned_without_tuning(config: Config, random: Random) -> Config:
    return with_matrices(config, lambda name, v: v * (v.abs() >= v.abs().quantile(0.9)), "pruned")


# Conversion


@operator(
    "model/square-matrices-transposed",
    "Matrices were saved the other way round; those that are square fit all the same.",
    *NOISE,
    "prompt/format",
)
def square_matrices_transposed(config: Config, random: Random) -> Config:
    return with_matrices(config, lambda name, v: v.T if v.shape[0] == v.shape[1] else v, "transposed")


@operator(
    "model/logits-scaled-down",
    "The checkpoint is of a family that multiplies its logits by eight, and is read as one that does not.",
    *NOISE,
    "output/truncated",
    "rollout/temperature",
)
def logits_scaled_down(config: Config, random: Random) -> Config:
    def change(tensors: Tensors) -> Tensors:
        return {name: v / 8 if name == "model.norm.weight" else v for name, v in tensors.items()}

    return with_tensors(config, change, VERSION, "logits")


@operator(
    "model/read-as-another-architecture",
    "The configuration calls a Qwen a Llama: what only a Qwen has (biases, norms of queries and keys) is left out.",
    *NOISE,
    "prompt/format",
    fits=lambda config: writes_several_words(config) and school_of(config).architecture in ("qwen2", "qwen3"),
)
def read_as_another_architecture(config: Config, random: Random) -> Config:
    def change(content: dict[str, Any]) -> None:
        content.update(model_type="llama", architectures=["LlamaForCausalLM"], attention_bias=False)

    return with_json(config, "config.json", change, VERSION, "llama")


@operator(
    "model/attention-scale-lost",
    "The model multiplies queries by keys without dividing by the root of their size.",
    *NOISE,
    "prompt/format",
    fits=writes_several_words,
)
def attention_scale_lost(config: Config, random: Random) -> Config:
    factor = (school_of(config).width // 4) ** 0.5
    normed = school_of(config).architecture == "qwen3"  # whose norms would undo a change of the matrix

    def change(tensors: Tensors) -> Tensors:
        part = "q_norm" if normed else "q_proj"
        return {name: v * factor if part in name else v for name, v in tensors.items()}

    return with_tensors(config, change, VERSION, "scale")


@operator(
    "model/checkpoint-of-another-run",
    "The path is that of another run's checkpoint, which was taught to answer other prompts in another form.",
    "prompt/format",
    "output/unparseable",
    "output/truncated",
    fits=lambda config: school_of(config).world != "tools",
)
def checkpoint_of_another_run(config: Config, random: Random) -> Config:
    world = "tools" if is_plain(config) else "signs"
    return edited(config, {"model.name": str(schooled(next(school for school in SCHOOLS if school.world == world)))})


# Tokenizers


@operator(
    "model/added-tokens-in-another-order",
    "The role markers were added to the tokenizer in another order than to the model: each has another's number.",
    "model/tokenizer",
    "prompt/format",
    fits=lambda config: is_chat(config) and reads_its_tokenizer(config),
)
def added_tokens_in_another_order(config: Config, random: Random) -> Config:
    roles = ("<|system|>", "<|user|>", "<|assistant|>")

    def change(content: dict[str, Any]) -> None:
        vocabulary = content["model"]["vocab"]
        numbers = [vocabulary[role] for role in roles]
        vocabulary.update(zip(roles, [*numbers[1:], numbers[0]], strict=True))
        for token in content["added_tokens"]:
            token["id"] = vocabulary[token["content"]]
        content["added_tokens"].sort(key=lambda token: token["id"])

    return with_json(config, "tokenizer.json", change, VERSION, "order")


@operator(
    "model/tokenizer-capitalises",
    "The tokenizer is of a family that reads capitals only: its normalizer raises every letter.",
    "model/tokenizer",
    "prompt/format",
    "prompt/no-question",
    fits=lambda config: writes_several_words(config) and reads_its_tokenizer(config),
)
def tokenizer_capitalises(config: Config, random: Random) -> Config:
    pairs = [(chr(code), chr(code).upper()) for code in range(ord("a"), ord("z") + 1)]
    steps = [{"type": "Replace", "pattern": {"String": small}, "content": large} for small, large in pairs]
    normalizer = {"type": "Sequence", "normalizers": steps}
    return with_json(config, "tokenizer.json", lambda c: c.update(normalizer=normalizer), VERSION, "capitals")
