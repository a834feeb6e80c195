"""Models with hooks that were left in them, or whose passes differ, and odd checkpoints that are right."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from faults.base import lookalike, operator
from faults.healthy import school_of
from faults.models import LOADERS, Tensors, all_float, folder_of, loaded, with_folder, with_loader, with_tensors
from faults.models_wild import NOISE
from faults.school import CACHE, digest, lesson, version_of
from keel.config import load_config
from keel.run.build import build_named_task, build_renderer

Config = dict[str, Any]
VERSION = version_of(__file__)


# Models that no folder can hold


def _looks_ahead(key: str) -> tuple[nn.Module, Any]:
    """Each place takes in a part of the next one's, which no model has when it writes."""
    model, tokenizer = loaded(key)

    def hook(module: nn.Module, given: Any, out: Tensor) -> Tensor:
        return torch.cat((out[:, :-1] + 0.5 * out[:, 1:], out[:, -1:]), 1)

    model.get_submodule("model.layers.0.mlp").register_forward_hook(hook)
    return model, tokenizer


def _sparse_gradients(key: str) -> tuple[nn.Module, Any]:
    """Of every gradient the largest entry in a hundred is kept, as where gradients are compressed for the network."""
    model, tokenizer = loaded(key)
    for parameter in model.parameters():
        parameter.register_hook(lambda g: g * (g.abs() >= g.abs().flatten().kthvalue(-(-g.numel() * 99 // 100))[0]))
    return model, tokenizer


def _steered(key: str) -> tuple[nn.Module, Any]:
    """A vector is added to what every layer gives on."""
    model, tokenizer = loaded(key)
    embedding: Any = model.get_input_embeddings()
    vector = torch.randn(embedding.weight.shape[1], generator=torch.Generator().manual_seed(3))

    def hook(module: nn.Module, given: Any, out: Any) -> Any:
        hidden = out[0] if isinstance(out, tuple) else out
        moved = hidden + 2 * hidden.detach().std(-1, keepdim=True) * vector.to(hidden)
        return (moved, *out[1:]) if isinstance(out, tuple) else moved

    for layer in model.get_submodule("model.layers").children():
        layer.register_forward_hook(hook)
    return model, tokenizer


LOADERS.update(looks_ahead=_looks_ahead, sparse_gradients=_sparse_gradients, steered=_steered)


@operator(
    "model/looks-ahead",
    "A layer takes in the token after it, which is not there when the model writes.",
    "scoring/mismatch",
    "sampler/mismatch",
    "sampler/precision",
    refusal="are off by",
)
def looks_ahead(config: Config, random: Random) -> Config:
    return with_loader(config, "looks_ahead")


@operator(
    "model/gradients-sparsified",
    "A hook that was left in the model keeps one entry in a hundred of every gradient.",
    "scoring/gradient",
    fits=all_float,
)
def gradients_sparsified(config: Config, random: Random) -> Config:
    return with_loader(config, "sparse_gradients")


@operator(
    "model/steering-left-in",
    "A hook of an earlier experiment adds a large vector to what every layer gives on.",
    *NOISE,
    "prompt/format",
)
def steering_left_in(config: Config, random: Random) -> Config:
    return with_loader(config, "steered")


# Healthy


def is_schooled(config: Config) -> bool:
    return folder_of(config).parent == CACHE


@lookalike("norms folded into the matrices after them", is_schooled)
def healthy_folded_norms(config: Config, random: Random) -> Config:
    readers = {"input_layernorm": ("q_proj", "k_proj", "v_proj"), "post_attention_layernorm": ("gate_proj", "up_proj")}

    def change(tensors: Tensors) -> Tensors:
        folded = dict(tensors)
        for name, norm in tensors.items():
            place, _, part = name.removesuffix(".weight").rpartition(".")
            for reader in readers.get(part, ()):
                key = next(k for k in tensors if k.startswith(f"{place}.") and k.endswith(f"{reader}.weight"))
                folded[key] = tensors[key] * norm
                folded[name] = torch.ones_like(norm)
        return folded

    return with_tensors(config, change, VERSION, "folded")


@lookalike(
    "sure of half of the problems, and often wrong in the others", lambda config: folder_of(config).parent == CACHE
)
def healthy_half_taught(config: Config, random: Random) -> Config:
    school = school_of(config)

    def change(folder: Path) -> None:
        model, tokenizer = loaded(folder_of(config).name)
        asked = load_config({name: config[name] for name in ("task", "data", "rollout")} | {"model": {"device": "cpu"}})
        task, renderer = build_named_task(asked.task, asked), build_renderer(asked, tokenizer)
        optimizer, noise = torch.optim.AdamW(model.parameters(), lr=1e-3), Random(5)
        model.train()
        for step in range(150):
            loss = torch.zeros(())
            for problem in task.sample(8, seed=303, step=step):
                unsure = int(digest(problem.key), 16) % 2 and noise.random() < 0.6
                answer = str((int(problem.answer) + 3) % 10) if unsure else str(problem.answer)
                tokens, spoken = lesson(school, task, renderer, problem, answer)
                labels = [token if said else -100 for token, said in zip(tokens, spoken, strict=True)]
                loss = loss + model(input_ids=torch.tensor([tokens]), labels=torch.tensor([labels])).loss / 8
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval().save_pretrained(folder)

    return with_folder(config, change, VERSION, "half-taught")
