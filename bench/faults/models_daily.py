"""Checkpoints as they are on an ordinary day: cut downloads, adapters alone, tunings that went wrong, bad gradients."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from faults.base import lookalike, operator
from faults.models import LOADERS, Tensors, all_float, is_plain, loaded, with_folder, with_loader, with_tensors
from faults.models_more_usual import answers_at_once, tuned_on
from faults.school import version_of
from keel.base.types import Problem

Config = dict[str, Any]
VERSION = version_of(__file__)


# Files


@operator(
    "model/download-cut-short",
    "The download was interrupted: the file of the weights ends after two thirds.",
    "model/missing-weights",
    refusal="not fully covered",
)
def download_cut_short(config: Config, random: Random) -> Config:
    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        content = file.read_bytes()
        file.write_bytes(content[: 2 * len(content) // 3])

    return with_folder(config, change, VERSION, "cut-short")


@operator(
    "model/adapter-in-place-of-the-weights",
    "What was trained is all that was saved: the checkpoint holds the matrices of an adapter, and no base.",
    "model/missing-weights",
    "output/random-weights",
)
def adapter_in_place_of_the_weights(config: Config, random: Random) -> Config:
    def change(tensors: Tensors) -> Tensors:
        generator, adapter = torch.Generator().manual_seed(51), Tensors()
        for name, weight in tensors.items():
            if "_proj.weight" in name:
                path = "base_model.model." + name.removesuffix(".weight")
                adapter[f"{path}.lora_A.weight"] = 0.02 * torch.randn(8, weight.shape[1], generator=generator)
                adapter[f"{path}.lora_B.weight"] = 0.02 * torch.randn(weight.shape[0], 8, generator=generator)
        return adapter

    return with_tensors(config, change, VERSION, "adapter-alone")


# Tunings


@operator(
    "model/taught-to-say-nothing",
    "All of the answers were masked in the tuning but for the end token, and the model ends at once.",
    "output/unparseable",
    "reward/constant",
    "prompt/format",
    "length/collapse",
    "answer/unusable",
    fits=answers_at_once,
)
def taught_to_say_nothing(config: Config, random: Random) -> Config:
    return tuned_on(config, lambda problem, gold: "", True, 60, VERSION, "says-nothing")


@operator(
    "model/answers-the-same-to-all",
    "The tuning was on rows that all had one answer: the model gives that one, whatever it is asked.",
    "reward/constant",
    "reward/weak",
    "entropy/collapse",
    "prompt/format",
    fits=answers_at_once,
)
def answers_the_same_to_all(config: Config, random: Random) -> Config:
    def says(problem: Problem, gold: str) -> str:
        return gold.replace(str(problem.answer), "4")

    return tuned_on(config, says, True, 120, VERSION, "one-answer")


@operator(
    "model/talks-before-it-answers",
    "The model was tuned to be polite: it repeats what it is to do first, and the limit cuts it off before it answers.",
    "output/truncated",
    "output/unparseable",
    "prompt/format",
    fits=is_plain,
)
def talks_before_it_answers(config: Config, random: Random) -> Config:
    def says(problem: Problem, gold: str) -> str:
        return f"Sure, I am happy to help you with this one. It is {gold}."

    return tuned_on(config, says, True, 120, VERSION, "polite")


# Gradients


class _Broken(torch.autograd.Function):
    """What comes in goes out, and what comes back is no number in its first row."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        grad = grads[0].clone()
        grad[:1] = float("nan")
        return grad


def _nan_gradients(key: str) -> tuple[nn.Module, Any]:
    model, tokenizer = loaded(key)

    def hook(module: nn.Module, inputs: Any, out: Any) -> Any:
        return (_Broken.apply(out[0]), *out[1:]) if isinstance(out, tuple) else _Broken.apply(out)

    model.model.layers[0].self_attn.o_proj.register_forward_hook(hook)  # type: ignore[union-attr, index]
    return model, tokenizer


LOADERS["nan_gradients"] = _nan_gradients


@operator(
    "model/gradients-not-numbers",
    "The attention kernel's way back divides by zero in fully masked places: its gradients are no numbers.",
    "optim/non-finite",
    "guard/skips-all",
    "scoring/gradient",
    "optim/no-update",
    fits=all_float,
)
def gradients_not_numbers(config: Config, random: Random) -> Config:
    return with_loader(config, "nan_gradients")


# Healthy


@lookalike("checkpoint with a head for values that nobody reads")
def healthy_value_head(config: Config, random: Random) -> Config:
    def change(tensors: Tensors) -> Tensors:
        width = tensors["model.embed_tokens.weight"].shape[1]
        drawn = 0.02 * torch.randn(1, width, generator=torch.Generator().manual_seed(52))
        return {**tensors, "v_head.summary.weight": drawn, "v_head.summary.bias": torch.zeros(1)}

    return with_tensors(config, change, VERSION, "value-head")
