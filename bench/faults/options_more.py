"""Options that were copied with an example or point at the neighbouring column, and a healthy set of another school."""

from __future__ import annotations

from random import Random
from typing import Any

from faults.base import edited, lookalike, operator, option
from faults.healthy import school_of

Config = dict[str, Any]


def asks_arithmetic(config: Config) -> bool:
    """Whether numbers are drawn, and nothing but the answer is paid."""
    return option(config, "task.name") == "arithmetic" and config["rewards"] == [{"name": "task"}]


def reads_texts(config: Config) -> bool:
    """Whether rows of plain questions and answers are read, and nothing but the answer is paid."""
    return reads_rows(config) and school_of(config).world == "file" and config["rewards"] == [{"name": "task"}]


def reads_rows(config: Config) -> bool:
    return option(config, "task.name") == "dataset"


@operator(
    "option/numbers-out-of-reach",
    "Numbers of many digits are asked of a model that was taught single ones: nobody in a group is ever right.",
    "reward/constant",
    "prompt/format",
    fits=asks_arithmetic,
)
def numbers_out_of_reach(config: Config, random: Random) -> Config:
    digits = random.choice((3, 4))
    return edited(config, {"task.low": 10 ** (digits - 1), "task.high": 10**digits - 1})


@operator(
    "option/answer-column-is-the-prompts",
    "The column of answers is given as that of the questions: only who repeats the question is right.",
    "data/misaligned",
    "prompt/answer-leak",
    "reward/constant",
    "reward/gold",
    fits=reads_texts,
)
def answer_column_is_the_prompts(config: Config, random: Random) -> Config:
    return edited(config, {"data.columns": {"prompt": "question", "answer": "question"}})


@operator(
    "option/prompt-column-is-the-answers",
    "The column of questions is given as that of the answers: a prompt is the answer and nothing else.",
    "prompt/answer-leak",
    "prompt/format",
    "task/repeats",
    "data/misaligned",
    fits=reads_rows,
)
def prompt_column_is_the_answers(config: Config, random: Random) -> Config:
    return edited(config, {"data.columns": {"prompt": "answer", "answer": "answer"}})


@operator(
    "option/placeholder-model-left-in",
    "The model is the one that examples begin with, whose weights are random.",
    "output/random-weights",
)
def placeholder_model_left_in(config: Config, random: Random) -> Config:
    return edited(config, {"model.name": "tiny"})


@lookalike("AdamW as encoders are trained, without a limit on gradients")
def healthy_adam_of_encoders(config: Config, random: Random) -> Config:
    return edited(config, {"optim.betas": [0.9, 0.98], "optim.eps": 1e-6, "optim.max_grad_norm": None})
