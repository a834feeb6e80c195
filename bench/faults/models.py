"""Models, templates and data that are not what they should be: broken checkpoints, prompts and rows.

A broken checkpoint or tokenizer is a folder of the cache, made of the healthy one; what a folder cannot hold (frozen
parameters, noise in the forward) is a loader `faults.models:NAME__FOLDER`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from faults.base import edited, operator
from faults.healthy import school_of
from faults.school import CACHE, cached, digest, rows_file, version_of
from keel.base.types import Problem
from keel.envs.arithmetic import Arithmetic, arithmetic

Config = dict[str, Any]
Tensors = dict[str, Tensor]
HEADER = "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
CONTENT = "message['content']"
VERSION = version_of(__file__)


def folder_of(config: Config) -> Path:
    return Path(config["model"]["name"])


def rows_of(config: Config) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(config["data"]["path"]).read_text().splitlines()]


def with_folder(config: Config, change: Callable[[Path], None], *key: object) -> Config:
    """The configuration with a changed copy of its model's folder; `key` tells changes apart."""
    source = folder_of(config)

    def write(folder: Path) -> None:
        shutil.copytree(source, folder)
        change(folder)

    return edited(config, {"model.name": str(cached(f"broken-{digest(VERSION, source.name, *key)}", write))})


def with_tensors(config: Config, change: Callable[[Tensors], Tensors], *key: object) -> Config:
    """The configuration with another content of its checkpoint."""
    from safetensors.torch import load_file, save_file

    def rewrite(folder: Path) -> None:
        file = folder / "model.safetensors"
        save_file({name: t.contiguous() for name, t in change(load_file(file)).items()}, file, {"format": "pt"})

    return with_folder(config, rewrite, *key)


def with_json(config: Config, file: str, change: Callable[[dict[str, Any]], None], *key: object) -> Config:
    """The configuration with a changed JSON file of its model's folder."""

    def rewrite(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        change(content)
        (folder / file).write_text(json.dumps(content))

    return with_folder(config, rewrite, *key)


def with_template(config: Config, old: str, new: str, *key: object) -> Config:
    """The configuration with a changed chat template."""

    def rewrite(folder: Path) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        if old not in tokenizer.chat_template:
            raise ValueError(f"the template has no {old!r}")
        tokenizer.chat_template = tokenizer.chat_template.replace(old, new)
        tokenizer.save_pretrained(folder)

    return with_folder(config, rewrite, *key)


def with_rows(config: Config, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> Config:
    """The configuration with other rows in its file."""
    return edited(config, {"data.path": rows_file(change(rows_of(config)))})


def reads_file(config: Config) -> bool:
    return config["task"]["name"] == "dataset"


def is_chat(config: Config) -> bool:
    """Whether prompts go through the chat template."""
    return folder_of(config).name.startswith(("chat", "words", "tagged"))


def is_plain(config: Config) -> bool:
    return folder_of(config).name.startswith(("signs", "file"))


def is_tied(config: Config) -> bool:
    return "mistral" not in folder_of(config).name


def has_layers(config: Config) -> bool:
    return school_of(config).layers > 1


# ------------------------------------------------------------------------ checkpoints


MISSING = ("model/missing-weights", "output/random-weights")


@operator("model/layer-missing", "The checkpoint has no weights for one layer.", "model/missing-weights")
def layer_missing(config: Config, random: Random) -> Config:
    return with_tensors(config, lambda t: {k: v for k, v in t.items() if ".layers.0." not in k}, "layer-missing")


@operator("model/attention-missing", "The checkpoint has no attention weights.", "model/missing-weights")
def attention_missing(config: Config, random: Random) -> Config:
    return with_tensors(config, lambda t: {k: v for k, v in t.items() if "self_attn" not in k}, "attention-missing")


@operator("model/half-checkpoint", "Half of the checkpoint's tensors were lost, as one shard of two.", *MISSING)
def half_checkpoint(config: Config, random: Random) -> Config:
    return with_tensors(config, lambda t: dict(sorted(t.items())[: len(t) // 2]), "half")


@operator("model/keys-renamed", "The checkpoint's names have a prefix that nobody knows: nothing is loaded.", *MISSING)
def keys_renamed(config: Config, random: Random) -> Config:
    return with_tensors(config, lambda t: {f"_orig_mod.module.{k}": v for k, v in t.items()}, "renamed")


@operator("model/layer-added", "The configuration has a layer that the checkpoint does not.", "model/missing-weights")
def layer_added(config: Config, random: Random) -> Config:
    return _with_layers(config, +1)


@operator(
    "model/layer-dropped",
    "The configuration has a layer less than the checkpoint.",
    "model/missing-weights",
    fits=has_layers,
)
def layer_dropped(config: Config, random: Random) -> Config:
    return _with_layers(config, -1)


def _with_layers(config: Config, more: int) -> Config:
    def change(content: dict[str, Any]) -> None:
        content["num_hidden_layers"] += more
        content.pop("layer_types", None)

    return with_json(config, "config.json", change, "layers", more)


@operator("model/head-not-tied", "The head is not tied and the checkpoint has none.", *MISSING, fits=is_tied)
def head_not_tied(config: Config, random: Random) -> Config:
    return with_json(config, "config.json", lambda c: c.update(tie_word_embeddings=False), "untied")


@operator(
    "model/head-reinitialised",
    "The head was re-initialised before it was saved.",
    *MISSING,
    fits=lambda c: not is_tied(c),
)
def head_reinitialised(config: Config, random: Random) -> Config:
    def change(tensors: Tensors) -> Tensors:
        head = torch.randn(tensors["lm_head.weight"].shape, generator=torch.Generator().manual_seed(0)) * 0.02
        return {**tensors, "lm_head.weight": head}

    return with_tensors(config, change, "head")


@operator(
    "model/random-weights",
    "The weights are random: the folder is of a model that was never trained.",
    "output/random-weights",
)
def random_weights(config: Config, random: Random) -> Config:
    def change(tensors: Tensors) -> Tensors:
        generator = torch.Generator().manual_seed(1)
        norms = {name for name, tensor in tensors.items() if tensor.ndim < 2}
        return {n: t if n in norms else torch.randn(t.shape, generator=generator) * 0.02 for n, t in tensors.items()}

    return with_tensors(config, change, "random")


@operator(
    "model/scales-lost",
    "Quantized weights were saved without their scales.",
    "output/random-weights",
    "model/missing-weights",
)
def scales_lost(config: Config, random: Random) -> Config:
    return with_tensors(config, lambda t: {n: v / 50 if v.ndim > 1 else v for n, v in t.items()}, "scales")


@operator("model/nan-weight", "One weight is NaN.", "scoring/non-finite")
def nan_weight(config: Config, random: Random) -> Config:
    return with_tensors(config, partial(_one_weight, value=float("nan")), "nan")


@operator("model/infinite-norm", "A norm's weight is infinite.", "scoring/non-finite")
def infinite_norm(config: Config, random: Random) -> Config:
    def change(tensors: Tensors) -> Tensors:
        return {**tensors, "model.norm.weight": torch.full_like(tensors["model.norm.weight"], float("inf"))}

    return with_tensors(config, change, "inf")


def _one_weight(tensors: Tensors, value: float) -> Tensors:
    name = next(name for name in tensors if name.endswith("mlp.down_proj.weight"))
    weight = tensors[name].clone()
    weight[0, 0] = value
    return {**tensors, name: weight}


# ------------------------------------------------------------------------ tokenizers and end tokens


def _renumbered(config: Config, order: Callable[[list[str]], Sequence[str]], *key: object) -> Config:
    """Ordinary tokens under other ids; the special ones stay."""

    def change(content: dict[str, Any]) -> None:
        vocabulary = content["model"]["vocab"]
        special = {token["content"] for token in content["added_tokens"]}
        ordinary = [token for token in vocabulary if token not in special]
        ids = [vocabulary[token] for token in ordinary]
        vocabulary.update(zip(order(ordinary), ids, strict=True))

    return with_json(config, "tokenizer.json", change, *key)


@operator(
    "model/tokenizer-permuted",
    "The tokenizer numbers its tokens otherwise than the model's.",
    "model/tokenizer",
    "prompt/format",
)
def tokenizer_permuted(config: Config, random: Random) -> Config:
    return _renumbered(config, lambda tokens: Random(0).sample(tokens, len(tokens)), "permuted")


@operator("model/tokenizer-shifted", "The tokenizer's ids are off by one.", "model/tokenizer", "prompt/format")
def tokenizer_shifted(config: Config, random: Random) -> Config:
    return _renumbered(config, lambda tokens: [*tokens[1:], tokens[0]], "shifted")


@operator(
    "model/tokenizer-larger",
    "The tokenizer has more tokens than the model.",
    "model/tokenizer",
    refusal="the tokenizer of",
)
def tokenizer_larger(config: Config, random: Random) -> Config:
    def change(content: dict[str, Any]) -> None:
        vocabulary = content["model"]["vocab"]
        vocabulary |= {f"extra{i}": len(vocabulary) + i for i in range(50)}

    return with_json(config, "tokenizer.json", change, "larger")


@operator(
    "model/end-token-other", "The end token is one that the model never writes.", "model/end-token", fits=is_plain
)
def end_token_other(config: Config, random: Random) -> Config:
    return _with_end(config, "<unk>", "end-other")


@operator("model/end-token-is-pad", "The end token was set to the pad token.", "model/end-token", fits=is_plain)
def end_token_is_pad(config: Config, random: Random) -> Config:
    return _with_end(config, "<pad>", "end-pad")


def _with_end(config: Config, token: str, *key: object) -> Config:
    def change(folder: Path) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.eos_token = token
        tokenizer.save_pretrained(folder)
        for file in ("config.json", "generation_config.json"):
            content = json.loads((folder / file).read_text())
            content["eos_token_id"] = tokenizer.eos_token_id
            (folder / file).write_text(json.dumps(content))

    return with_folder(config, change, *key)


@operator(
    "model/end-token-is-a-letter", "Ordinary tokens are listed among those that end a completion.", "model/end-token"
)
def end_token_is_a_letter(config: Config, random: Random) -> Config:
    def change(content: dict[str, Any]) -> None:
        vocabulary = json.loads((folder_of(config) / "tokenizer.json").read_text())["model"]["vocab"]
        content["eos_token_id"] = [content["eos_token_id"], *(vocabulary[sign] for sign in "0123456789<")]

    return with_json(config, "generation_config.json", change, "end-letter")


# ------------------------------------------------------------------------ loaders


def loaded(key: str) -> tuple[nn.Module, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = CACHE / key
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


def _frozen(key: str) -> tuple[nn.Module, Any]:
    model, tokenizer = loaded(key)
    return model.requires_grad_(False), tokenizer


def _almost_frozen(key: str) -> tuple[nn.Module, Any]:
    """All but one norm of the first layer, whose update is lost among the others."""
    model, tokenizer = loaded(key)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0.post_attention_layernorm" in name)
    return model, tokenizer


def _noisy(key: str) -> tuple[nn.Module, Any]:
    """Dropout that nobody can switch off, since it is called and not a module."""
    model, tokenizer = loaded(key)
    embedding: Any = model.get_input_embeddings()
    embedding.register_forward_hook(lambda module, given, out: nn.functional.dropout(out, 0.1, training=True))
    return model, tokenizer


LOADERS = {"frozen": _frozen, "almost_frozen": _almost_frozen, "noisy": _noisy}


def __getattr__(name: str) -> Any:
    """The loader `NAME__FOLDER`, with underscores for the hyphens of the folder."""
    loader, _, key = name.partition("__")
    if loader not in LOADERS or not key:
        raise AttributeError(name)
    return lambda: LOADERS[loader](key.replace("_", "-"))


def with_loader(config: Config, loader: str) -> Config:
    return edited(config, {"model.name": f"faults.models:{loader}__{folder_of(config).name.replace('-', '_')}"})


def all_float(config: Config) -> bool:
    return "lora" not in config["model"] and "dtype" not in config["model"]


@operator(
    "model/frozen", "No parameter is trainable.", "optim/no-update", fits=all_float, refusal="no trainable parameters"
)
def frozen(config: Config, random: Random) -> Config:
    return with_loader(config, "frozen")


@operator("model/almost-frozen", "Everything but one norm is frozen.", "optim/no-update", fits=all_float)
def almost_frozen(config: Config, random: Random) -> Config:
    return with_loader(config, "almost_frozen")


@operator(
    "model/noisy-forward",
    "The forward draws dropout also in evaluation mode.",
    "scoring/dropout",
    "scoring/nondeterministic",
)
def noisy_forward(config: Config, random: Random) -> Config:
    return with_loader(config, "noisy")


@operator("model/own-dropout", "The model's own dropout is left on.", "scoring/dropout")
def own_dropout(config: Config, random: Random) -> Config:
    changed = with_json(config, "config.json", lambda c: c.update(attention_dropout=0.3), "dropout")
    return edited(changed, {"model.dropout": True})


# ------------------------------------------------------------------------ templates


@operator(
    "template/question-lost",
    "The template writes a fixed text in place of the question.",
    "prompt/no-question",
    fits=is_chat,
)
def question_lost(config: Config, random: Random) -> Config:
    return with_template(config, CONTENT, "'Answer the question.'", "question-lost")


@operator(
    "template/question-cut", "The template keeps the first characters of a message.", "prompt/no-question", fits=is_chat
)
def question_cut(config: Config, random: Random) -> Config:
    return with_template(config, CONTENT, "message['content'][:3]", "question-cut")


@operator(
    "template/header-missing", "The template does not open the assistant's turn.", "prompt/no-header", fits=is_chat
)
def header_missing(config: Config, random: Random) -> Config:
    return with_template(config, HEADER, "", "header-missing")


@operator(
    "template/header-closed",
    "The template opens the assistant's turn and ends it at once.",
    "prompt/no-header",
    fits=is_chat,
)
def header_closed(config: Config, random: Random) -> Config:
    return with_template(
        config, HEADER, HEADER.replace("'<|assistant|>'", "'<|assistant|>' + eos_token"), "header-closed"
    )


@operator(
    "template/header-of-user",
    "The template opens the user's turn for the model.",
    "prompt/no-header",
    "prompt/format",
    fits=is_chat,
)
def header_of_user(config: Config, random: Random) -> Config:
    return with_template(config, HEADER, HEADER.replace("assistant", "user"), "header-user")


@operator(
    "template/none", "A chat model is prompted without its template.", "prompt/no-header", "prompt/format", fits=is_chat
)
def template_none(config: Config, random: Random) -> Config:
    return edited(config, {"data.chat_template": "none"})


@operator(
    "template/foreign",
    "A chat model is prompted with another family's template.",
    "prompt/format",
    "prompt/no-header",
    fits=is_chat,
)
def template_foreign(config: Config, random: Random) -> Config:
    return edited(config, {"data.chat_template": "chatml"})


@operator("template/double-bos", "The template writes BOS twice.", "prompt/double-bos", fits=is_chat)
def double_bos(config: Config, random: Random) -> Config:
    return with_template(config, "{{ bos_token }}", "{{ bos_token }}{{ bos_token }}", "double-bos")


@operator(
    "template/system-lost",
    "The template leaves the system message out.",
    "prompt/no-question",
    "prompt/format",
    fits=lambda config: bool(config["data"].get("system_prompt")),
)
def system_lost(config: Config, random: Random) -> Config:
    loop = "{% for message in messages %}"
    return with_template(config, loop, loop[:-2] + "if message['role'] != 'system' %}", "system-lost")


@operator("template/trailing-space", "Blanks follow the assistant's header.", "prompt/format", fits=is_chat)
def trailing_space(config: Config, random: Random) -> Config:
    return with_template(config, HEADER, HEADER.replace("|>'", "|>   \\n  '"), "trailing-space")


@operator("template/prompt-cut", "Prompts are cut to their last few tokens.", "prompt/truncated", "prompt/no-question")
def prompt_cut(config: Config, random: Random) -> Config:
    return edited(config, {"data.max_prompt_length": 3, "data.truncation": "left"})


# ------------------------------------------------------------------------ data


def with_answers(config: Config, change: Callable[[list[Any]], Sequence[Any]]) -> Config:
    def rewrite(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        answers = change([row["answer"] for row in rows])
        return [{**row, "answer": answer} for row, answer in zip(rows, answers, strict=True)]

    return with_rows(config, rewrite)


@operator("data/answers-shifted", "Answers are shifted by a row.", "data/misaligned", fits=reads_file)
def answers_shifted(config: Config, random: Random) -> Config:
    return with_answers(config, lambda answers: [*answers[1:], answers[0]])


@operator("data/answers-shuffled", "Prompts and answers were shuffled apart.", "data/misaligned", fits=reads_file)
def answers_shuffled(config: Config, random: Random) -> Config:
    return with_answers(config, lambda answers: Random(3).sample(answers, len(answers)))


@operator("data/answers-sorted", "The column of answers was sorted by itself.", "data/misaligned", fits=reads_file)
def answers_sorted(config: Config, random: Random) -> Config:
    return with_answers(config, sorted)


@operator("data/wrong-column", "The column of answers is the rows' number.", "data/misaligned", fits=reads_file)
def wrong_column(config: Config, random: Random) -> Config:
    changed = with_rows(config, lambda rows: [{**row, "id": str(1000 + i)} for i, row in enumerate(rows)])
    return edited(changed, {"data.columns": {"prompt": "question", "answer": "id"}})


@operator("data/missing-column", "The column of answers has another name.", "data/misaligned", fits=reads_file)
def missing_column(config: Config, random: Random) -> Config:
    return edited(config, {"data.columns": {"prompt": "question", "answer": "solution"}})


@operator(
    "data/worked-solution",
    "Answers are worked solutions and the reward compares values.",
    "reward/gold",
    fits=reads_file,
)
def worked_solution(config: Config, random: Random) -> Config:
    def solved(answers: list[Any]) -> list[Any]:
        return [f"We compare both. {answer} is it.\n#### {answer} (done)" for answer in answers]

    changed = edited(with_answers(config, solved), {"task.answer": "exact"})
    return edited(changed, {"rewards": [{"name": "faults.models:equal_value"}]})


def equal_value(problem: Problem, text: str) -> float:
    """1 where both are numbers and equal."""
    try:
        return float(float(text) == float(str(problem.answer)))
    except ValueError:
        return 0.0


@operator(
    "data/tags-not-asked",
    "Answers are read from tags that no prompt asks for.",
    "reward/gold",
    fits=reads_file,
)
def tags_not_asked(config: Config, random: Random) -> Config:
    return edited(config, {"rewards": [{"name": "numeric", "tag": "answer"}]})


@operator("data/answers-empty", "Answers are empty.", "reward/gold", fits=reads_file, refusal="is empty")
def answers_empty(config: Config, random: Random) -> Config:
    return with_answers(config, lambda answers: [""] * len(answers))


@operator("data/answers-all-right", "Every answer is accepted.", "reward/exploit", fits=reads_file)
def answers_all_right(config: Config, random: Random) -> Config:
    changed = with_answers(config, lambda answers: [[str(digit) for digit in range(10)]] * len(answers))
    return edited(changed, {"rewards": [{"name": "task"}]})


@operator("data/one-problem", "One problem fills the whole file.", "task/repeats", fits=reads_file)
def one_problem(config: Config, random: Random) -> Config:
    return with_rows(config, lambda rows: [rows[0]] * 60 + [rows[1]])


@operator("data/few-problems", "A handful of problems is repeated through the file.", "task/repeats", fits=reads_file)
def few_problems(config: Config, random: Random) -> Config:
    return with_rows(config, lambda rows: rows[:6] * 40)


@operator(
    "data/rendered-alike",
    "Problems differ in a field that the template does not write.",
    "task/repeats",
    "prompt/no-question",
    fits=lambda config: reads_file(config) and is_chat(config),
)
def rendered_alike(config: Config, random: Random) -> Config:
    def rewrite(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        texts = [row["question"][0]["content"] for row in rows]
        return [
            {**row, "question": [{"role": "context", "content": text}, {"role": "user", "content": "Answer it."}]}
            for row, text in zip(rows, texts, strict=True)
        ]

    loop = "{% for message in messages %}"
    return with_template(with_rows(config, rewrite), loop, loop[:-2] + "if message['role'] != 'context' %}", "alike")


@operator(
    "data/too-hard",
    "No answer is within the model's reach.",
    "reward/constant",
    fits=lambda c: is_plain(c) and not reads_file(c),
)
def too_hard(config: Config, random: Random) -> Config:
    changed = edited(config, {"task": {"name": "arithmetic", "skill": "multiply", "low": 1000, "high": 9999}})
    changed["rewards"] = [{"name": "task"}]
    return edited(changed, {"rollout.max_completion_length": 16})


@dataclass(frozen=True)
class Leaky(Arithmetic):
    """Evaluates on what is trained."""

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        return self.sample(count, seed=0, step=0)


def leaky(skill: str, low: int, high: int) -> Leaky:
    return Leaky(**vars(arithmetic(skill, low, high)))


@operator(
    "data/held-out-leak",
    "Evaluation asks problems of the training set.",
    "eval/leak",
    fits=lambda c: is_plain(c) and not reads_file(c),
)
def held_out_leak(config: Config, random: Random) -> Config:
    return edited(config, {"task.name": "faults.models:leaky"})


@operator(
    "data/eval-asks-otherwise",
    "Held-out problems are asked in another form.",
    "eval/train-gap",
    fits=lambda c: reads_file(c) and is_plain(c),
)
def eval_asks_otherwise(config: Config, random: Random) -> Config:
    held = [{**row, "question": f"Question: {row['question'][:-1]}\nAnswer: "} for row in rows_of(config)]
    changed = with_rows(config, lambda rows: rows[:80])
    return edited(changed, {"task.eval_path": rows_file(held[80:])})
