"""Checkpoints, tokenizers and loaders as their users report them: shifted norms, swapped parts, lost gradients."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from faults.base import lookalike, operator
from faults.engines import has_lora
from faults.models import (
    LOADERS,
    Tensors,
    all_float,
    has_layers,
    is_chat,
    loaded,
    with_folder,
    with_json,
    with_loader,
    with_tensors,
)
from faults.models_field import writes_several_words
from faults.models_wild import EMBEDDINGS, HEAD, NOISE, ids_of, reads_its_tokenizer
from faults.school import version_of

Config = dict[str, Any]
VERSION = version_of(__file__)

# Conversions


@operator(
    "model/norms-shifted-once-more",
    "The layers' norms, which count from 0 in one format and from 1 in another, were raised by 1 twice.",
    *NOISE,
    "prompt/format",
)
def norms_shifted_once_more(config: Config, random: Random) -> Config:
    return with_tensors(config, lambda t: {n: v + 1 if "layernorm" in n else v for n, v in t.items()}, VERSION, "norms")


def _swapped(config: Config, one: str, other: str) -> Config:
    """The checkpoint with two kinds of tensors under each other's names."""
    names = {one: other, other: one}

    def moved(name: str) -> str:
        return ".".join(names.get(part, part) for part in name.split("."))

    return with_tensors(config, lambda t: {moved(name): v for name, v in t.items()}, VERSION, one, other)


@operator(
    "model/keys-and-values-swapped",
    "A fused matrix of queries, keys and values was split in the wrong order: keys and values changed places.",
    *NOISE,
    "prompt/format",
)
def keys_and_values_swapped(config: Config, random: Random) -> Config:
    return _swapped(config, "k_proj", "v_proj")


@operator(
    "model/gate-and-up-swapped",
    "The two halves of a fused matrix of the MLP were split in the wrong order.",
    *NOISE,
    "prompt/format",
    fits=writes_several_words,
)
def gate_and_up_swapped(config: Config, random: Random) -> Config:
    return _swapped(config, "gate_proj", "up_proj")


@operator(
    "model/shards-joined-in-the-wrong-order",
    "The shards of matrices that are cut by columns were joined in the wrong order.",
    *NOISE,
    "prompt/format",
)
def shards_joined_in_the_wrong_order(config: Config, random: Random) -> Config:
    def joined(name: str, tensor: Tensor) -> Tensor:
        cut = "o_proj" in name or "down_proj" in name
        return tensor.roll(tensor.shape[1] // 2, 1) if cut else tensor

    return with_tensors(config, lambda t: {n: joined(n, v) for n, v in t.items()}, VERSION, "shards")


# Tokenizers and end tokens


@operator(
    "model/tokenizer-folds-digits",
    "The tokenizer's normalizer writes 0 for every digit, as cleaners of texts do.",
    "model/tokenizer",
    "prompt/no-question",
    "prompt/format",
    fits=reads_its_tokenizer,
)
def tokenizer_folds_digits(config: Config, random: Random) -> Config:
    folded = {"type": "Replace", "pattern": {"Regex": "[0-9]"}, "content": "0"}
    return with_json(config, "tokenizer.json", lambda content: content.update(normalizer=folded), VERSION, "folded")


@operator(
    "model/end-of-turn-is-no-end",
    "Turns end in a token that the template spells out, and another one is the end in all of the settings.",
    "model/end-token",
    "output/truncated",
    fits=is_chat,
)
def end_of_turn_is_no_end(config: Config, random: Random) -> Config:
    def change(folder: Path) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = tokenizer.chat_template.replace("eos_token", f"'{tokenizer.eos_token}'")
        tokenizer.eos_token = tokenizer.pad_token
        tokenizer.save_pretrained(folder)
        for file in ("config.json", "generation_config.json"):
            content = json.loads((folder / file).read_text())
            content["eos_token_id"] = tokenizer.pad_token_id
            (folder / file).write_text(json.dumps(content))

    return with_folder(config, change, VERSION, "end-of-turn")


# Models that no folder can hold


def _embeddings_scaled(key: str) -> tuple[nn.Module, Any]:
    """What is embedded is multiplied by the root of its width, as another family does it."""
    model, tokenizer = loaded(key)
    embedding: Any = model.get_input_embeddings()
    embedding.register_forward_hook(lambda module, given, out: out * math.sqrt(out.shape[-1]))
    return model, tokenizer


def _gradients_of_one_shard(key: str) -> tuple[nn.Module, Any]:
    model, tokenizer = loaded(key)
    for parameter in model.parameters():
        own = torch.arange(len(parameter)) < len(parameter) // 2
        own = own.view(-1, *[1] * (parameter.ndim - 1))
        parameter.register_hook(lambda gradient, own=own: gradient * own.to(gradient.device))
    return model, tokenizer


def _gradients_never_cleared(key: str) -> tuple[nn.Module, Any]:
    model, tokenizer = loaded(key)
    for parameter in model.parameters():
        total = torch.zeros_like(parameter)
        parameter.register_hook(lambda gradient, total=total: total.add_(gradient).clone())
    return model, tokenizer


def _lower_layers_without_graph(key: str) -> tuple[nn.Module, Any]:
    """All layers but the last run without a graph, as under checkpoints whose inputs need no gradient."""
    model, tokenizer = loaded(key)
    layers: Any = model.model.layers
    for layer in layers[:-1]:
        layer.forward = torch.no_grad()(layer.forward)
    return model, tokenizer


LOADERS.update(
    embeddings_scaled=_embeddings_scaled,
    gradients_of_one_shard=_gradients_of_one_shard,
    gradients_never_cleared=_gradients_never_cleared,
    lower_layers_without_graph=_lower_layers_without_graph,
)


@operator(
    "model/embeddings-scaled",
    "Embeddings are multiplied by the root of the width, which is done in another family of models.",
    *NOISE,
    "prompt/format",
    fits=all_float,
)
def embeddings_scaled(config: Config, random: Random) -> Config:
    return with_loader(config, "embeddings_scaled")


@operator(
    "model/gradients-of-one-shard",
    "Gradients are never gathered: of every tensor the first half is trained, and the second never moves.",
    "scoring/gradient",
    "loss/no-gradient",
    fits=all_float,
)
def gradients_of_one_shard(config: Config, random: Random) -> Config:
    return with_loader(config, "gradients_of_one_shard")


@operator(
    "model/gradients-never-cleared",
    "Gradients of all steps are added up, since nothing clears them.",
    "scoring/gradient",
    "loss/scale",
    fits=all_float,
)
def gradients_never_cleared(config: Config, random: Random) -> Config:
    return with_loader(config, "gradients_never_cleared")


@operator(
    "model/adapters-below-untrained",
    "Under checkpoints of a frozen base only the last layer's adapter has a gradient.",
    "scoring/gradient",
    "loss/no-gradient",
    fits=lambda config: has_lora(config) and has_layers(config) and "dtype" not in config["model"],
)
def adapters_below_untrained(config: Config, random: Random) -> Config:
    return with_loader(config, "lower_layers_without_graph")


# Healthy


@lookalike("checkpoint in two files with an index")
def healthy_two_files(config: Config, random: Random) -> Config:
    def change(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        whole = folder / "model.safetensors"
        tensors = load_file(whole)
        names = sorted(tensors)
        shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
        for file, held in shards.items():
            save_file({name: tensors[name] for name in held}, folder / file, {"format": "pt"})
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        places = {name: file for file, held in shards.items() for name in held}
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        whole.unlink()

    return with_folder(config, change, VERSION, "two-files")


@lookalike("vocabulary filled up to a multiple of 64 with tokens that nobody writes")
def healthy_padded_vocabulary(config: Config, random: Random) -> Config:
    (pad,) = ids_of(config, "<pad>")

    def change(tensors: Tensors) -> Tensors:
        def longer(table: Tensor) -> Tensor:
            return torch.cat((table, table[pad].expand(-len(table) % 64, -1)))

        return {name: longer(v) if name in (EMBEDDINGS, HEAD) else v for name, v in tensors.items()}

    def size(content: dict[str, Any]) -> None:
        content["vocab_size"] += -content["vocab_size"] % 64

    return with_json(with_tensors(config, change, VERSION, "filled"), "config.json", size, VERSION, "filled-size")
