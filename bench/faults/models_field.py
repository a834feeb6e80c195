"""Checkpoints, tokenizers and adapters as tools of the field leave them: settings, merges, roundings, decoders."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from faults.base import edited, lookalike, operator
from faults.engines import has_lora, is_matrix, layer_of
from faults.healthy import school_of
from faults.models import (
    LOADERS,
    Tensors,
    all_float,
    folder_of,
    has_layers,
    loaded,
    with_folder,
    with_json,
    with_loader,
    with_tensors,
)
from faults.models_wild import EMBEDDINGS, HEAD, ids_of, reads_its_tokenizer
from faults.school import cached, digest, version_of
from faults.templates_wild import asks_for_tags

Config = dict[str, Any]
VERSION = version_of(__file__)
NOISE = ("output/random-weights", "output/unparseable", "model/missing-weights")


def with_settings(config: Config, **settings: Any) -> Config:
    """The checkpoint with other settings in its config.json."""
    return with_json(config, "config.json", lambda content: content.update(settings), VERSION, settings)


def writes_several_words(config: Config) -> bool:
    """Whether the model writes tags or calls, for which it has to count where it is; a digit needs little of that."""
    return school_of(config).world in ("tagged", "tools")


# Settings that are another model's


@operator(
    "model/rope-scaled",
    "The configuration scales positions for a context eight times as long, which the weights were never trained with.",
    *NOISE,
    "prompt/format",
    fits=writes_several_words,
)
def rope_scaled(config: Config, random: Random) -> Config:
    scaled = {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0}
    return with_settings(config, rope_parameters=scaled)


@operator(
    "model/norm-eps-huge",
    "The epsilon of the norms is a thousand, as where an exponent lost its sign.",
    *NOISE,
)
def norm_eps_huge(config: Config, random: Random) -> Config:
    return with_settings(config, rms_norm_eps=1e3)


@operator(
    "model/activation-of-another",
    "The configuration names the activation of another family.",
    *NOISE,
    fits=writes_several_words,
)
def activation_of_another(config: Config, random: Random) -> Config:
    return with_settings(config, hidden_act="sigmoid")


@operator(
    "model/heads-regrouped",
    "The configuration has half as many heads of twice the width, which fits the same tensors.",
    *NOISE,
    fits=lambda config: school_of(config).architecture != "qwen3",  # whose norms have a head's width
)
def heads_regrouped(config: Config, random: Random) -> Config:
    return with_settings(
        config, num_attention_heads=2, num_key_value_heads=1, head_dim=2 * school_of(config).width // 4
    )


@operator(
    "model/context-too-short",
    "The configuration has a context of six tokens, into which no prompt fits.",
    "prompt/truncated",
    "output/truncated",
    refusal="context",
)
def context_too_short(config: Config, random: Random) -> Config:
    return with_settings(config, max_position_embeddings=6)


# Weights


@operator(
    "model/layer-repeated",
    "A tool for merging has written the first layer over the second.",
    *NOISE,
    fits=writes_several_words,
)
def layer_repeated(config: Config, random: Random) -> Config:
    def change(tensors: Tensors) -> Tensors:
        return {name: tensors[name.replace(".layers.1.", ".layers.0.")] for name in tensors}

    return with_tensors(config, lambda t: {n: v.clone() for n, v in change(t).items()}, VERSION, "repeated")


@operator(
    "model/averaged-with-a-stranger",
    "The weights are the mean of two models that have nothing to do with each other.",
    *NOISE,
)
def averaged_with_a_stranger(config: Config, random: Random) -> Config:
    def change(tensors: Tensors) -> Tensors:
        generator = torch.Generator().manual_seed(29)
        noise = {n: torch.randn(v.shape, generator=generator) * v.float().std() for n, v in tensors.items()}
        return {n: 0.5 * v + 0.5 * noise[n].to(v) if v.ndim > 1 else v for n, v in tensors.items()}

    return with_tensors(config, change, VERSION, "averaged")


@operator("model/rounded-to-two-bits", "Matrices were quantized to two bits, with one scale a tensor.", *NOISE)
def rounded_to_two_bits(config: Config, random: Random) -> Config:
    def rounded(name: str, tensor: Tensor) -> Tensor:
        step = tensor.abs().amax()
        return (tensor / step).round() * step if is_matrix(name, tensor) else tensor

    return with_tensors(config, lambda t: {n: rounded(n, v) for n, v in t.items()}, VERSION, "two-bits")


@operator(
    "model/digit-rows-lost",
    "The rows of the ten digits are zero in the embeddings, as where a resize left new rows empty.",
    "model/tokenizer",
    "model/missing-weights",
    "prompt/format",
    "output/random-weights",
)
def digit_rows_lost(config: Config, random: Random) -> Config:
    digits = ids_of(config, *"0123456789")

    def change(tensors: Tensors) -> Tensors:
        return {
            n: v.index_fill(0, torch.tensor(digits), 0.0) if n in (EMBEDDINGS, HEAD) else v for n, v in tensors.items()
        }

    return with_tensors(config, change, VERSION, "digit-rows")


@operator(
    "model/over-trained",
    "The model is so sure of itself that all completions of a group are the same.",
    "reward/constant",
    "entropy/collapse",
    "reward/weak",
    "rollout/temperature",
    fits=lambda config: school_of(config).world != "tools",  # whose calls go wrong in more ways than one
)
def over_trained(config: Config, random: Random) -> Config:
    def change(tensors: Tensors) -> Tensors:
        return {name: 20 * v if name == "model.norm.weight" else v for name, v in tensors.items()}

    return with_tensors(config, change, VERSION, "over-trained")


@operator(
    "model/adapter-of-another-base",
    "The adapter that is continued was trained on another base, and is noise on this one.",
    *NOISE,
    "kl/at-start",
    fits=has_lora,
)
def adapter_of_another_base(config: Config, random: Random) -> Config:
    def write(folder: Path) -> None:
        from peft import LoraConfig, get_peft_model

        model, _ = loaded(folder_of(config).name)
        adapted: Any = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
        generator = torch.Generator().manual_seed(31)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator)
        adapted.save_pretrained(folder)

    adapter = cached(f"adapter-{digest(VERSION, folder_of(config).name)}", write)
    return edited(config, {"model.lora": {"adapter": str(adapter)}})


# Tokenizers


def with_tokenizer(config: Config, **parts: Any) -> Config:
    return with_json(config, "tokenizer.json", lambda content: content.update(parts), VERSION, parts)


@operator(
    "model/tokenizer-strips-blanks",
    "The tokenizer's normalizer takes blanks away, so that prompts lose them.",
    "model/tokenizer",
    "prompt/no-question",
    "prompt/format",
    fits=writes_several_words,
)
def tokenizer_strips_blanks(config: Config, random: Random) -> Config:
    return with_tokenizer(config, normalizer={"type": "Replace", "pattern": {"String": " "}, "content": ""})


@operator(
    "model/decoder-lost",
    "The tokenizer lost its decoder: texts come back with a blank between all tokens, and no tag is one.",
    "output/unparseable",
    "model/tokenizer",
    "output/text",
    fits=lambda config: asks_for_tags(config) and reads_its_tokenizer(config),
)
def decoder_lost(config: Config, random: Random) -> Config:
    return edited(with_tokenizer(config, decoder=None), {"rewards": [{"name": "task"}]})


# Models that no folder can hold


def _gradients_underflow(key: str) -> tuple[nn.Module, Any]:
    model, tokenizer = loaded(key)
    parameters: list[Any] = list(model.parameters())
    for parameter in parameters:
        parameter.register_hook(lambda gradient: gradient * 1e-14)
    return model, tokenizer


def _layers_detached(key: str) -> tuple[nn.Module, Any]:
    """What enters the last layer has no gradient, as under checkpoints whose inputs need none."""
    model, tokenizer = loaded(key)
    layers = [
        module for name, module in model.named_modules() if layer_of(f"{name}.") is not None and name.count(".") == 2
    ]
    layers[-1].register_forward_pre_hook(
        lambda module, args, kwargs: (
            tuple(a.detach() if isinstance(a, Tensor) else a for a in args),
            {k: v.detach() if isinstance(v, Tensor) else v for k, v in kwargs.items()},
        ),
        with_kwargs=True,
    )
    return model, tokenizer


LOADERS.update(gradients_underflow=_gradients_underflow, layers_detached=_layers_detached)


@operator(
    "model/gradients-underflow",
    "Gradients are scaled down to next to nothing on their way back, and never up again.",
    "optim/no-update",
    "scoring/gradient",
    "loss/scale",
    fits=all_float,
)
def gradients_underflow(config: Config, random: Random) -> Config:
    return with_loader(config, "gradients_underflow")


@operator(
    "model/layers-detached",
    "The gradient ends before the last layer: all layers below it stay as they are.",
    "scoring/gradient",
    "loss/no-gradient",
    fits=lambda config: all_float(config) and has_layers(config),
)
def layers_detached(config: Config, random: Random) -> Config:
    return with_loader(config, "layers_detached")


# Healthy


@lookalike("padding with the end token")
def healthy_pad_is_end(config: Config, random: Random) -> Config:
    def change(folder: Path) -> None:
        for file, name in (("tokenizer_config.json", "pad_token"), ("config.json", "pad_token_id")):
            content = json.loads((folder / file).read_text())
            content[name] = content[name.replace("pad", "eos")]
            (folder / file).write_text(json.dumps(content))

    return with_folder(config, change, VERSION, "pad-is-end")


@lookalike("checkpoint that was saved in 16 bits", all_float)
def healthy_half_checkpoint(config: Config, random: Random) -> Config:
    return with_tensors(config, lambda t: {name: v.to(torch.bfloat16) for name, v in t.items()}, VERSION, "bfloat16")


@lookalike("adapter on queries and values alone", has_lora)
def healthy_few_targets(config: Config, random: Random) -> Config:
    return edited(config, {"model.lora.targets": ["q_proj", "v_proj"]})
