"""Checkpoints and tokenizers as conversions and resizes leave them: layers, rotary places, rows, markers."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from faults.base import edited, lookalike, operator
from faults.engines import has_lora
from faults.healthy import school_of
from faults.models import (
    LOADERS,
    Tensors,
    all_float,
    folder_of,
    has_layers,
    is_chat,
    is_plain,
    is_tied,
    loaded,
    with_folder,
    with_json,
    with_loader,
    with_tensors,
)
from faults.school import version_of

Config = dict[str, Any]
VERSION = version_of(__file__)
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
NOISE = ("output/random-weights", "output/unparseable", "model/missing-weights")


def ids_of(config: Config, *tokens: str) -> list[int]:
    vocabulary = json.loads((folder_of(config) / "tokenizer.json").read_text())["model"]["vocab"]
    return [vocabulary[token] for token in tokens]


def reads_its_tokenizer(config: Config) -> bool:
    return school_of(config).architecture != "qwen2"  # whose tokenizer reads no tokenizer.json


@operator(
    "model/layers-swapped", "Two layers changed places when the checkpoint was converted.", *NOISE, fits=has_layers
)
def layers_swapped(config: Config, random: Random) -> Config:
    other = {"0": "1", "1": "0"}

    def moved(name: str) -> str:
        parts = name.split(".")
        return ".".join(other.get(part, part) if parts[at - 1] == "layers" else part for at, part in enumerate(parts))

    return with_tensors(config, lambda t: {moved(name): tensor for name, tensor in t.items()}, VERSION, "swapped")


@operator(
    "model/rotary-not-permuted",
    "Queries and keys kept the order of another release's rotary places when they were converted.",
    *NOISE,
)
def rotary_not_permuted(config: Config, random: Random) -> Config:
    size = school_of(config).width // 4

    def permuted(name: str, tensor: Tensor) -> Tensor:
        if not any(f"{part}_proj." in name for part in "qk"):
            return tensor
        rest = tensor.shape[1:]
        return tensor.view(-1, 2, size // 2, *rest).transpose(1, 2).reshape(-1, *rest)

    return with_tensors(config, lambda t: {name: permuted(name, v) for name, v in t.items()}, VERSION, "rotary")


@operator(
    "model/embeddings-grown-at-the-front",
    "A row was put in at the front when the vocabulary grew: every token reads its neighbour's.",
    "model/tokenizer",
    "prompt/format",
    "output/random-weights",
)
def embeddings_grown_at_the_front(config: Config, random: Random) -> Config:
    def change(tensors: Tensors) -> Tensors:
        return {name: v.roll(1, 0) if name in (EMBEDDINGS, HEAD) else v for name, v in tensors.items()}

    return with_tensors(config, change, VERSION, "front")


@operator(
    "model/role-markers-untrained",
    "The rows of the role markers and of the BOS are new and were never trained.",
    "prompt/format",
    "model/tokenizer",
    "output/random-weights",
    fits=is_chat,
)
def role_markers_untrained(config: Config, random: Random) -> Config:
    markers = ids_of(config, "<bos>", "<|system|>", "<|user|>", "<|assistant|>")

    def change(tensors: Tensors) -> Tensors:
        table = tensors[EMBEDDINGS].clone()
        table[markers] = torch.randn((len(markers), table.shape[1]), generator=torch.Generator().manual_seed(2))
        return {**tensors, EMBEDDINGS: table}

    return with_tensors(config, change, VERSION, "markers")


@operator(
    "model/end-never-written",
    "The model's row of the end token is spoilt, so that it never ends by itself.",
    "output/truncated",
    "model/end-token",
    fits=is_plain,
)
def end_never_written(config: Config, random: Random) -> Config:
    (end,) = ids_of(config, "<eos>")

    def change(tensors: Tensors) -> Tensors:
        name = HEAD if HEAD in tensors else EMBEDDINGS
        table = tensors[name].clone()
        table[end] = -table[end]
        return {**tensors, name: table}

    return with_tensors(config, change, VERSION, "end")


@operator(
    "model/head-tied-by-mistake",
    "The model was saved as if its head were tied to the embeddings, and the head is gone.",
    "output/random-weights",
    "model/missing-weights",
    "output/unparseable",
    fits=lambda config: not is_tied(config),
)
def head_tied_by_mistake(config: Config, random: Random) -> Config:
    headless = with_tensors(config, lambda t: {name: v for name, v in t.items() if name != HEAD}, VERSION, "headless")
    return with_json(headless, "config.json", lambda content: content.update(tie_word_embeddings=True), VERSION, "tied")


@operator(
    "model/role-markers-not-special",
    "The tokenizer lost its list of special tokens: role markers become ordinary letters.",
    "model/tokenizer",
    "prompt/format",
    fits=lambda config: is_chat(config) and reads_its_tokenizer(config),
)
def role_markers_not_special(config: Config, random: Random) -> Config:
    def change(folder: Path) -> None:
        for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            if (folder / file).exists():
                content = json.loads((folder / file).read_text())
                for name in ("additional_special_tokens", "extra_special_tokens", "added_tokens_decoder"):
                    content.pop(name, None)
                if "added_tokens" in content:
                    kept = [token for token in content["added_tokens"] if "|" not in token["content"]]
                    content["added_tokens"] = kept
                (folder / file).write_text(json.dumps(content))

    return with_folder(config, change, VERSION, "not-special")


# Models that no folder can hold


def _gradients_reversed(key: str) -> tuple[nn.Module, Any]:
    model, tokenizer = loaded(key)
    for parameter in model.parameters():
        parameter.register_hook(torch.neg)
    return model, tokenizer


LOADERS.update(gradients_reversed=_gradients_reversed)


@operator(
    "model/gradients-reversed",
    "A layer that reverses gradients was left in the model.",
    "scoring/gradient",
    "loss/sign",
    fits=all_float,
)
def gradients_reversed(config: Config, random: Random) -> Config:
    return with_loader(config, "gradients_reversed")


# Healthy


@lookalike("adapter of rank one with a high alpha and a low rate", has_lora)
def healthy_rank_one(config: Config, random: Random) -> Config:
    lora = config["model"]["lora"]
    rate = config["optim"]["learning_rate"] * lora["alpha"] / lora["r"] / 8
    return edited(config, {"model.lora": {"r": 1, "alpha": 8.0}, "optim.learning_rate": rate})


@lookalike("two end tokens, one of which is never written")
def healthy_end_tokens(config: Config, random: Random) -> Config:
    ends = ids_of(config, "<eos>", "<pad>")
    return with_json(config, "generation_config.json", lambda c: c.update(eos_token_id=ends), VERSION, "two-ends")
