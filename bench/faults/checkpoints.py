"""Checkpoints, tokenizers and models that lack something, hold nothing, or run otherwise from pass to pass."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from faults.base import operator
from faults.healthy import school_of
from faults.models import LOADERS, all_float, loaded, with_json, with_loader, with_tensors
from faults.school import version_of

Config = dict[str, Any]
VERSION = version_of(__file__)


def without(config: Config, *stems: str) -> Config:
    """The checkpoint without the tensors whose names hold one of these."""
    return with_tensors(
        config, lambda t: {k: v for k, v in t.items() if not any(stem in k for stem in stems)}, VERSION, *stems
    )


@operator("model/embeddings-missing", "The checkpoint has no input embeddings.", "model/missing-weights")
def embeddings_missing(config: Config, random: Random) -> Config:
    return without(config, "embed_tokens")


@operator("model/norms-missing", "The checkpoint has no weights of norms.", "model/missing-weights")
def norms_missing(config: Config, random: Random) -> Config:
    return without(config, "norm")


@operator("model/mlp-of-another-release", "The MLP's tensors have another release's names.", "model/missing-weights")
def mlp_of_another_release(config: Config, random: Random) -> Config:
    names = {"mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3"}

    def change(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        renamed = tensors
        for ours, theirs in names.items():
            renamed = {name.replace(ours, theirs): tensor for name, tensor in renamed.items()}
        return renamed

    return with_tensors(config, change, VERSION, "mlp-names")


@operator(
    "model/biases-missing",
    "The checkpoint has no biases, and the model reads some.",
    "model/missing-weights",
    fits=lambda config: school_of(config).architecture == "qwen2",
)
def biases_missing(config: Config, random: Random) -> Config:
    return without(config, ".bias")


@operator(
    "model/zeros",
    "All matrices are zero, as where shards were saved without being gathered.",
    "output/random-weights",
    "model/missing-weights",
)
def zeros(config: Config, random: Random) -> Config:
    return with_tensors(config, lambda t: {n: v * (v.ndim < 2) for n, v in t.items()}, VERSION, "zeros")


@operator(
    "model/tokenizer-without-digits",
    "The tokenizer has no digits: those of the question become unknown tokens.",
    "model/tokenizer",
    "prompt/no-question",
    fits=lambda config: school_of(config).architecture != "qwen2",  # whose tokenizer reads no tokenizer.json
)
def tokenizer_without_digits(config: Config, random: Random) -> Config:
    def change(content: dict[str, Any]) -> None:
        vocabulary = content["model"]["vocab"]
        for digit in "0123456789":
            vocabulary[f"Ġ{digit}"] = vocabulary.pop(digit)

    return with_json(config, "tokenizer.json", change, VERSION, "digits")


# Models that no folder can hold


def _gradients_zeroed(key: str) -> tuple[nn.Module, Any]:
    model, tokenizer = loaded(key)
    for parameter in model.parameters():
        parameter.register_hook(torch.zeros_like)
    return model, tokenizer


def _batch_dependent(key: str) -> tuple[nn.Module, Any]:
    """Each row is moved by what else is in its batch, as by experts that are full."""
    model, tokenizer = loaded(key)
    embedding: Any = model.get_input_embeddings()
    embedding.register_forward_hook(lambda module, given, out: out - 0.5 * out.mean(0, keepdim=True))
    return model, tokenizer


LOADERS.update(
    gradients_zeroed=_gradients_zeroed,
    batch_dependent=_batch_dependent,
)


@operator(
    "model/gradients-zeroed",
    "A hook that was left in the model sets every gradient to zero.",
    "optim/no-update",
    "loss/no-gradient",
    "scoring/gradient",
    fits=all_float,
)
def gradients_zeroed(config: Config, random: Random) -> Config:
    return with_loader(config, "gradients_zeroed")


@operator(
    "model/depends-on-the-batch",
    "What a row gets depends on the rows beside it.",
    "scoring/nondeterministic",
    "scoring/mismatch",
    "sampler/mismatch",
    refusal="depend on other rows of the batch",
)
def depends_on_the_batch(config: Config, random: Random) -> Config:
    return with_loader(config, "batch_dependent")
