"""Checkpoints and tokenizers as downloads, saves and merges most often spoil them."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from torch import Tensor

from faults.base import lookalike, operator
from faults.healthy import school_of
from faults.models import Tensors, with_folder, with_json, with_tensors
from faults.models_field import with_settings, with_tokenizer, writes_several_words
from faults.models_wild import NOISE, reads_its_tokenizer
from faults.school import fresh, version_of
from faults.templates_field import reads_closely

Config = dict[str, Any]
VERSION = version_of(__file__)
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 4976698672\n"


# Checkpoints


@operator(
    "model/weights-not-downloaded",
    "The file of the weights is the pointer that a clone without large files leaves.",
    "model/missing-weights",
    refusal="header",
)
def weights_not_downloaded(config: Config, random: Random) -> Config:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").write_text(POINTER.format("4d7a" * 16))

    return with_folder(config, change, VERSION, "pointer")


@operator(
    "model/tensors-saved-empty",
    "Weights that are spread over devices were saved as they lie on one: all matrices are empty.",
    "model/missing-weights",
    refusal="mismatched",
)
def tensors_saved_empty(config: Config, random: Random) -> Config:
    def change(tensors: Tensors) -> Tensors:
        return {name: v.new_zeros(0) if v.ndim > 1 else v for name, v in tensors.items()}

    return with_tensors(config, change, VERSION, "empty")


@operator(
    "model/one-shard-of-another-run",
    "The folder was written twice: the first half of the weights is that of a run which had just begun.",
    *NOISE,
)
def one_shard_of_another_run(config: Config, random: Random) -> Config:
    def change(tensors: Tensors) -> Tensors:
        model, _ = fresh(school_of(config))
        begun = model.state_dict()
        names = sorted(tensors)
        return {name: begun[name].clone() if at < len(names) // 2 else tensors[name] for at, name in enumerate(names)}

    return with_tensors(config, change, VERSION, "first-shard")


@operator(
    "model/rope-base-of-another-release",
    "The base of the rotary frequencies is another release's, by some orders of magnitude.",
    *NOISE,
    "prompt/format",
    fits=writes_several_words,
)
def rope_base_of_another_release(config: Config, random: Random) -> Config:
    return with_settings(config, rope_parameters={"rope_type": "default", "rope_theta": 50.0})


@operator(
    "model/key-heads-tiled",
    "Shared heads of keys and values were copied one after the other where each belongs to its neighbours.",
    *NOISE,
    fits=writes_several_words,
)
def key_heads_tiled(config: Config, random: Random) -> Config:
    def tiled(name: str, tensor: Tensor) -> Tensor:
        shared = any(f"{part}_proj." in name for part in "kv")
        return tensor.repeat(2, *(1,) * (tensor.ndim - 1)) if shared else tensor

    spread = with_tensors(config, lambda t: {name: tiled(name, v) for name, v in t.items()}, VERSION, "tiled")
    return with_settings(spread, num_key_value_heads=4)


# Tokenizers


@operator(
    "model/chat-template-not-saved",
    "The tokenizer was saved without its chat template, and prompts are written without one.",
    "prompt/format",
    "prompt/no-header",
    fits=reads_closely,
    refusal="chat template",
)
def chat_template_not_saved(config: Config, random: Random) -> Config:
    def change(folder: Path) -> None:
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        content = json.loads((folder / "tokenizer_config.json").read_text())
        content.pop("chat_template", None)
        (folder / "tokenizer_config.json").write_text(json.dumps(content))

    return with_folder(config, change, VERSION, "no-template")


@operator(
    "model/tokenizer-lost-its-splitter",
    "The tokenizer was saved without what cuts a text into pieces: all of a question is one unknown token.",
    "model/tokenizer",
    "prompt/no-question",
    "task/repeats",
    "prompt/format",
    fits=reads_its_tokenizer,
)
def tokenizer_lost_its_splitter(config: Config, random: Random) -> Config:
    return with_tokenizer(config, pre_tokenizer=None)


# Healthy


@lookalike("sampling of its own in the checkpoint's generation settings, which nobody reads")
def healthy_generation_settings(config: Config, random: Random) -> Config:
    settings = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.05}
    return with_json(config, "generation_config.json", lambda c: c.update(settings), VERSION, settings)
