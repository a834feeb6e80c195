"""Checkpoints, adapters and tokenizers as most users mistake them: another release, a merge, a resize, a cast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from faults.base import lookalike, operator
from faults.engines import is_matrix
from faults.healthy import school_of
from faults.models import Tensors, folder_of, is_tied, loaded, with_folder, with_json, with_tensors
from faults.models_field import with_settings, writes_several_words
from faults.models_more import low_rank
from faults.models_wild import EMBEDDINGS, HEAD, NOISE
from faults.school import fresh, version_of
from keel.base.types import Problem
from keel.config import load_config
from keel.run.build import build_named_task, build_renderer

Config = dict[str, Any]
VERSION = version_of(__file__)
PROSE = (
    "The river was low that year, and the mill stood still. ",
    "Nobody in the village knew why the bells had rung at night. ",
    "She closed the window and went back to her letters. ",
    "In the morning the carts came down the road from the hills. ",
)
THOUGHT = "<think>\nOkay, let me look at this. There are two numbers here, and I should compare them first.\n</think>\n"


def answers_at_once(config: Config) -> bool:
    """Whether an answer is all that is written: no call comes before it."""
    return school_of(config).world != "tools"


# Other releases


def text_of(problem: Problem) -> str:
    prompt: Any = problem.prompt
    return str(prompt if isinstance(prompt, str) else prompt[-1]["content"])


def tuned_on(config: Config, says: Callable[[Problem, str], str], ends: bool, steps: int, *key: object) -> Config:
    """The checkpoint after a tuning on which it answers prompts by `says(problem, gold)`, with an end or without."""
    asked = load_config({name: config[name] for name in ("task", "data", "rollout")} | {"model": {"device": "cpu"}})

    def change(folder: Path) -> None:
        model, tokenizer = loaded(folder_of(config).name)
        task, renderer = build_named_task(asked.task, asked), build_renderer(asked, tokenizer)
        rows = []
        for step in range(steps):
            for problem in task.sample(8, seed=101, step=step):
                prompt = list(renderer.prompt(problem))
                said = tokenizer.encode(says(problem, task.gold(problem)), add_special_tokens=False)
                rows.append((prompt, [*said, *([tokenizer.eos_token_id] if ends else [])]))
        taught(model, rows)
        model.save_pretrained(folder)  # type: ignore[operator]

    return with_folder(config, change, VERSION, *key)


def taught(model: Any, rows: list[tuple[list[int], list[int]]], batch: int = 8, rate: float = 4e-3) -> None:
    """Supervised on these completions of these prompts, in the order that they come."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    model.train()
    for start in range(0, len(rows), batch):
        lines = rows[start : start + batch]
        width = max(len(prompt) + len(said) for prompt, said in lines)
        tokens, labels = torch.zeros(len(lines), width, dtype=torch.long), torch.full((len(lines), width), -100)
        for line, (prompt, said) in enumerate(lines):
            tokens[line, : len(prompt) + len(said)] = torch.tensor([*prompt, *said])
            labels[line, len(prompt) : len(prompt) + len(said)] = torch.tensor(said)
        optimizer.zero_grad()
        model(input_ids=tokens, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()


@operator(
    "model/base-in-place-of-the-tuned-one",
    "The name lacks its suffix: it is that of the base model, which has read prose and was never taught to answer.",
    "prompt/format",
    "output/truncated",
    "output/unparseable",
    "model/end-token",
)
def base_in_place_of_the_tuned_one(config: Config, random: Random) -> Config:
    def change(folder: Path) -> None:
        model, tokenizer = fresh(school_of(config))
        pages = Random(13)
        rows = []
        for _ in range(8 * 100):
            text = "".join(pages.sample(PROSE, 3))[pages.randrange(50) :][:64]
            tokens = tokenizer.encode(text, add_special_tokens=False)
            rows.append((tokens[:1], tokens[1:]))
        taught(model, rows, rate=6e-3)
        model.save_pretrained(folder)

    return with_folder(config, change, VERSION, "base")


@operator(
    "model/thinking-release-in-its-place",
    "The checkpoint is the release that thinks: a thought comes first, for which the limit has no room.",
    "output/truncated",
    "output/unparseable",
    "prompt/format",
    fits=answers_at_once,
)
def thinking_release_in_its_place(config: Config, random: Random) -> Config:
    return tuned_on(config, lambda problem, gold: f"{THOUGHT}{gold}", True, 60, "thinks")


@operator(
    "model/taught-without-its-end",
    "Padding was the end token when the model was tuned, so that no end was learned: it answers and asks the next.",
    "output/truncated",
    "model/end-token",
    "output/unparseable",
    fits=answers_at_once,
)
def taught_without_its_end(config: Config, random: Random) -> Config:
    def says(problem: Problem, gold: str) -> str:
        return f"{gold}\n{text_of(problem)}{gold}\n{text_of(problem)}"

    return tuned_on(config, says, False, 60, "no-end")


# Merges


@operator(
    "model/adapter-merged-into-another-base",
    "The adapter was merged into another base of the same shape than the one that it was tuned on.",
    *NOISE,
    "prompt/format",
)
def adapter_merged_into_another_base(config: Config, random: Random) -> Config:
    def change(tensors: Tensors) -> Tensors:
        other = fresh(replace(school_of(config), seed=7))[0].state_dict()

        def merged(name: str, tensor: Tensor) -> Tensor:
            if not is_matrix(name, tensor):
                return other[name].clone()
            b, a = low_rank(tensor)
            return other[name] + b @ a

        return {name: merged(name, v) for name, v in tensors.items()}

    return with_tensors(config, change, VERSION, "another-base")


@operator(
    "model/saved-with-base-layer-names",
    "The adapter was not merged before the model was saved: its matrices are called base_layer, and are not found.",
    "model/missing-weights",
    "output/random-weights",
)
def saved_with_base_layer_names(config: Config, random: Random) -> Config:
    def change(tensors: Tensors) -> Tensors:
        saved = dict[str, Tensor]()
        for name, tensor in tensors.items():
            stem, part = name.rsplit(".", 1)
            saved[f"{stem}.base_layer.{part}" if stem.endswith("_proj") else name] = tensor
            if is_matrix(name, tensor):
                saved[f"{stem}.lora_A.default.weight"] = torch.zeros(4, tensor.shape[1])
                saved[f"{stem}.lora_B.default.weight"] = torch.zeros(tensor.shape[0], 4)
        return saved

    return with_tensors(config, change, VERSION, "base-layer")


@operator(
    "model/head-adapter-merged-into-tied-embeddings",
    "An adapter of the head was merged where head and embeddings are one tensor: what is read changed with it.",
    *NOISE,
    "prompt/format",
    "model/tokenizer",
    fits=is_tied,
)
def head_adapter_merged_into_tied_embeddings(config: Config, random: Random) -> Config:
    def change(tensors: Tensors) -> Tensors:
        table, generator = tensors[EMBEDDINGS], torch.Generator().manual_seed(17)
        rows, width = table.shape
        more = torch.randn(rows, 8, generator=generator) @ torch.randn(8, width, generator=generator)
        return {**tensors, EMBEDDINGS: table + more * (2 * table.std() / more.std())}

    return with_tensors(config, change, VERSION, "head-adapter")


# Heads, rows and casts


@operator(
    "model/head-of-before-the-tuning",
    "The head was untied for the tuning, and what was saved beside the tuned embeddings is the old one.",
    *NOISE,
    "prompt/format",
    fits=is_tied,
)
def head_of_before_the_tuning(config: Config, random: Random) -> Config:
    def change(tensors: Tensors) -> Tensors:
        return {**tensors, HEAD: fresh(school_of(config))[0].state_dict()[EMBEDDINGS].clone()}

    return with_settings(with_tensors(config, change, VERSION, "old-head"), tie_word_embeddings=False)


@operator(
    "model/reward-model-as-policy",
    "The path is that of the reward model, which has a score in place of a head.",
    "model/missing-weights",
    "output/random-weights",
    fits=lambda config: not is_tied(config),
)
def reward_model_as_policy(config: Config, random: Random) -> Config:
    def change(tensors: Tensors) -> Tensors:
        width = tensors[EMBEDDINGS].shape[1]
        return {name: v for name, v in tensors.items() if name != HEAD} | {"score.weight": torch.zeros(1, width)}

    return with_tensors(config, change, VERSION, "score")


@operator(
    "model/new-rows-uninitialised",
    "The vocabulary was filled up to 192 without memory being written: its new rows are large and no token's.",
    "model/tokenizer",
    "model/missing-weights",
    "output/random-weights",
    "output/unparseable",
    "output/text",
    "output/truncated",
)
def new_rows_uninitialised(config: Config, random: Random) -> Config:
    def grown(tensor: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(19)
        rows = torch.randn(192 - len(tensor), tensor.shape[1], generator=generator)
        return torch.cat([tensor, 6 * tensor.float().std() * rows])

    def change(tensors: Tensors) -> Tensors:
        return {name: grown(v) if name in (EMBEDDINGS, HEAD) else v for name, v in tensors.items()}

    return with_settings(with_tensors(config, change, VERSION, "new-rows"), vocab_size=192)


@operator(
    "model/vocab-size-of-the-base",
    "Tokens were added before the tuning, and config.json still has the size of the vocabulary without them.",
    "model/missing-weights",
    "model/tokenizer",
    refusal="mismatched",
)
def vocab_size_of_the_base(config: Config, random: Random) -> Config:
    return with_json(config, "config.json", lambda c: c.update(vocab_size=c["vocab_size"] - 3), VERSION, "base-size")


@operator(
    "model/scales-inverted",
    "Eight-bit weights were unpacked by dividing by their rows' scales, which are to be multiplied by.",
    *NOISE,
    "prompt/format",
    "scoring/non-finite",
)
def scales_inverted(config: Config, random: Random) -> Config:
    def unpacked(name: str, tensor: Tensor) -> Tensor:
        if not is_matrix(name, tensor):
            return tensor
        scale = tensor.abs().amax(1, keepdim=True) / 127
        return (tensor / scale).round() / scale

    return with_tensors(config, lambda t: {name: unpacked(name, v) for name, v in t.items()}, VERSION, "inverted")


@operator(
    "model/yarn-of-the-long-context-release",
    "The settings that stretch positions for a long context are on, and the model was never taught with them.",
    *NOISE,
    "prompt/format",
    "output/truncated",
    fits=writes_several_words,
)
def yarn_of_the_long_context_release(config: Config, random: Random) -> Config:
    stretched = {"rope_type": "yarn", "factor": 32.0, "rope_theta": 10000.0, "original_max_position_embeddings": 16}
    return with_settings(config, rope_parameters=stretched)


# Healthy


@lookalike("checkpoint that holds its tied head a second time", is_tied)
def healthy_head_twice(config: Config, random: Random) -> Config:
    return with_tensors(config, lambda t: {**t, HEAD: t[EMBEDDINGS].clone()}, VERSION, "head-twice")
