"""Checkpoints that converters, mergers and unpackers laid out wrongly, adapters that never arrived, odd tokenizers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from faults.base import edited, operator
from faults.engines import has_lora
from faults.healthy import school_of
from faults.models import Tensors, folder_of, loaded, with_folder, with_json, with_tensors
from faults.models_field import writes_several_words
from faults.models_more import RANK, before_tuning, low_rank, tuned_adapter, with_matrices
from faults.models_wild import NOISE, reads_its_tokenizer
from faults.school import cached, digest, fresh, lesson, version_of
from keel.config import load_config
from keel.run.build import build_named_task, build_renderer

Config = dict[str, Any]
VERSION = version_of(__file__)


# Adapters


def with_adapter(config: Config, change: Callable[[Tensors], Tensors], key: str) -> Config:
    """The configuration that continues a changed copy of `tuned_adapter`."""
    from safetensors.torch import load_file, save_file

    source = tuned_adapter(config, float(RANK))

    def write(folder: Path) -> None:
        shutil.copytree(source, folder)
        file = folder / "adapter_model.safetensors"
        save_file(change(load_file(file)), file, {"format": "pt"})

    adapter = cached(f"adapter-{digest(VERSION, source.name, key)}", write)
    return edited(config, {"model.lora": {"adapter": str(adapter)}})


@operator(
    "model/adapter-never-applied",
    "The path is that of the base: the adapter that taught it to answer lies beside it and is not read.",
    *NOISE,
    "prompt/format",
)
def adapter_never_applied(config: Config, random: Random) -> Config:
    return before_tuning(config)


@operator(
    "model/adapter-merged-twice",
    "The adapter was merged into weights that held it already.",
    *NOISE,
    "prompt/format",
    fits=writes_several_words,
)
def adapter_merged_twice(config: Config, random: Random) -> Config:
    def change(name: str, tensor: Tensor) -> Tensor:
        b, a = low_rank(tensor)
        return tensor + (b @ a).to(tensor.dtype)

    return with_matrices(config, change, VERSION, "merged-twice")


@operator(
    "model/adapter-saved-under-other-names",
    "The adapter was saved from inside a wrapper: no weight has the name that is looked for, and a fresh one is taken.",
    *NOISE,
    "prompt/format",
    fits=has_lora,
    refusal="does not fit the model",
)
def adapter_saved_under_other_names(config: Config, random: Random) -> Config:
    def change(tensors: Tensors) -> Tensors:
        return {name.replace("base_model.model.", "base_model.model._orig_mod."): v for name, v in tensors.items()}

    return with_adapter(before_tuning(config), change, "names")


@operator(
    "model/adapter-drawn-at-random",
    "The adapter was made for a test of speed: both of its factors are random, and it was never trained.",
    *NOISE,
    "prompt/format",
    "kl/at-start",
    fits=has_lora,
)
def adapter_drawn_at_random(config: Config, random: Random) -> Config:
    def change(tensors: Tensors) -> Tensors:
        noise = torch.Generator().manual_seed(6)
        return {name: torch.randn(v.shape, generator=noise) / v.shape[1] ** 0.5 for name, v in tensors.items()}

    return with_adapter(config, change, "random")


# Layouts


@operator(
    "model/bits-read-as-another-type",
    "Weights of bfloat16 were handed on as sixteen bits without a type, and read as float16.",
    *NOISE,
)
def bits_read_as_another_type(config: Config, random: Random) -> Config:
    def change(tensors: Tensors) -> Tensors:
        return {name: v.bfloat16().view(torch.float16).float() for name, v in tensors.items()}

    return with_tensors(config, change, VERSION, "bits")


@operator(
    "model/packed-columns-in-another-order",
    "Four-bit weights, of which eight lie in one integer, were unpacked in the order of another quantiser.",
    *NOISE,
    "prompt/format",
)
def packed_columns_in_another_order(config: Config, random: Random) -> Config:
    def change(name: str, tensor: Tensor) -> Tensor:
        return tensor.unflatten(1, (-1, 8))[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1)

    return with_matrices(config, change, VERSION, "packed")


@operator(
    "model/fused-qkv-split-wrongly",
    "Queries, keys and values lay group by group in one matrix, and were split as if all queries came first.",
    *NOISE,
    "prompt/format",
)
def fused_qkv_split_wrongly(config: Config, random: Random) -> Config:
    def change(tensors: Tensors) -> Tensors:
        split = dict(tensors)
        for name in tensors:
            if "q_proj" not in name:
                continue
            names = [name, name.replace("q_proj", "k_proj"), name.replace("q_proj", "v_proj")]
            grouped = [tensors[part].unflatten(0, (2, -1)) for part in names]  # two heads of keys and of values
            fused = torch.cat(grouped, 1).flatten(0, 1)
            split |= zip(names, fused.split([len(tensors[part]) for part in names]), strict=True)
        return split

    return with_tensors(config, change, VERSION, "fused")


@operator(
    "model/flat-buffer-misaligned",
    "The checkpoint was cut out of one flat buffer without counting the two numbers of padding after each tensor.",
    *NOISE,
)
def flat_buffer_misaligned(config: Config, random: Random) -> Config:
    def change(tensors: Tensors) -> Tensors:
        buffer = torch.cat([functional.pad(v.flatten(), (0, 2)) for v in tensors.values()])
        pieces = buffer[: -2 * len(tensors)].split([v.numel() for v in tensors.values()])
        return {name: piece.view_as(v).clone() for (name, v), piece in zip(tensors.items(), pieces, strict=True)}

    return with_tensors(config, change, VERSION, "flat")


# Other checkpoints


@operator(
    "model/checkpoint-of-the-first-steps",
    "The newest checkpoint was looked for by the order of names: it is that of step 10, not of step 900.",
    *NOISE,
    "prompt/format",
    "output/truncated",
)
def checkpoint_of_the_first_steps(config: Config, random: Random) -> Config:
    school = school_of(config)

    def change(folder: Path) -> None:
        model, tokenizer = fresh(school)
        asked = load_config({name: config[name] for name in ("task", "data", "rollout")} | {"model": {"device": "cpu"}})
        task, renderer = build_named_task(asked.task, asked), build_renderer(asked, tokenizer)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for step in range(10):
            optimizer.zero_grad()
            for problem in task.sample(8, seed=101, step=step):
                tokens, spoken = lesson(school, task, renderer, problem, str(problem.answer))
                labels = [token if said else -100 for token, said in zip(tokens, spoken, strict=True)]
                model(input_ids=torch.tensor([tokens]), labels=torch.tensor([labels])).loss.backward()
            optimizer.step()
        model.eval().save_pretrained(folder)

    return with_folder(config, change, VERSION, "first-steps")


# Settings and vocabularies


@operator(
    "model/attention-window-tiny",
    "The configuration has a window of three tokens, from a test of the window, and the model was taught without one.",
    *NOISE,
    "prompt/format",
    fits=lambda config: school_of(config).architecture != "llama",
)
def attention_window_tiny(config: Config, random: Random) -> Config:
    def change(content: dict[str, Any]) -> None:
        content.update(sliding_window=3, use_sliding_window=True, max_window_layers=0)
        if "layer_types" in content:
            content["layer_types"] = ["sliding_attention"] * content["num_hidden_layers"]

    return with_json(config, "config.json", change, VERSION, "window")


@operator(
    "model/padding-rows-copied",
    "The vocabulary was filled up to 256 by beginning again at its first row: half of what is written is no token.",
    "model/tokenizer",
    "output/unparseable",
    "output/text",
    "output/truncated",
    "output/random-weights",
)
def padding_rows_copied(config: Config, random: Random) -> Config:
    def change(tensors: Tensors) -> Tensors:
        wide = ("model.embed_tokens.weight", "lm_head.weight")
        return {name: torch.cat([v, v, v])[:256] if name in wide else v for name, v in tensors.items()}

    wider = with_tensors(config, change, VERSION, "padding")
    return with_json(wider, "config.json", lambda content: content.update(vocab_size=256), VERSION, "padding")


@operator(
    "model/added-words-untrained",
    "Words of the task were added to the tokenizer as tokens of their own, and their rows were never trained.",
    "model/tokenizer",
    "prompt/format",
    "prompt/no-question",
    "output/random-weights",
    fits=lambda config: writes_several_words(config) and reads_its_tokenizer(config),
)
def added_words_untrained(config: Config, random: Random) -> Config:
    words = ["max", "min", "Which", "larger", "smaller", "Answer", "number", "answer"]

    def change(folder: Path) -> None:
        model, tokenizer = loaded(folder_of(config).name)
        tokenizer.add_tokens(words)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(8)
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)  # type: ignore[operator]
        model.save_pretrained(folder)  # type: ignore[operator]
        tokenizer.save_pretrained(folder)

    return edited(with_folder(config, change, VERSION, "words"), {"data.allow_control_tokens": True})
