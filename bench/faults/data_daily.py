"""Rows as they are prepared on an ordinary day: units, quotes, labels, records, other languages and notations."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

from faults.base import edited, operator
from faults.data_fresh import reads_closely
from faults.data_wild import asked_otherwise
from faults.models import reads_file, with_answers

Config = dict[str, Any]
Row = dict[str, Any]


def reads_file_closely(config: Config) -> bool:
    return reads_file(config) and reads_closely(config)


# Answers


@operator(
    "data/answers-with-units",
    "Answers have their unit with them, which nobody is asked for, and are compared letter by letter.",
    "reward/constant",
    "reward/gold",
    "prompt/format",
    "data/misaligned",
    fits=reads_file,
)
def answers_with_units(config: Config, random: Random) -> Config:
    unit = random.choice((" apples", " km", " dollars"))
    changed = with_answers(config, lambda answers: [f"{answer}{unit}" for answer in answers])
    return edited(changed, {"task.answer": "exact", "rewards": [{"name": "task"}]})


@operator(
    "data/quotes-kept",
    "The file was split at its commas by hand: questions and answers still stand in quotation marks.",
    "reward/constant",
    "reward/gold",
    "prompt/format",
    "data/misaligned",
    fits=reads_file,
)
def quotes_kept(config: Config, random: Random) -> Config:
    quoted = with_answers(config, lambda answers: [f'"{answer}"' for answer in answers])
    quoted = asked_otherwise(quoted, lambda text, row: f'"{text}"')
    return edited(quoted, {"task.answer": "exact", "rewards": [{"name": "task"}]})


@operator(
    "data/ground-truth-still-in-its-record",
    "The column that is read for answers holds a record, of which the answer is one field, and is taken whole.",
    "reward/constant",
    "reward/gold",
    "prompt/format",
    "data/misaligned",
    fits=reads_file,
)
def ground_truth_still_in_its_record(config: Config, random: Random) -> Config:
    def recorded(answers: list[Any]) -> list[str]:
        return [json.dumps({"style": "rule", "ground_truth": answer}) for answer in answers]

    return edited(with_answers(config, recorded), {"task.answer": "exact", "rewards": [{"name": "task"}]})


# Questions


@operator(
    "data/questions-in-another-language",
    "The file is the translation: its questions are in a language that neither tokenizer nor model know.",
    "prompt/format",
    "model/tokenizer",
    "prompt/no-question",
    fits=reads_file,
)
def questions_in_another_language(config: Config, random: Random) -> Config:
    def translated(text: str, row: Row) -> str:
        skill, first, second = text.removesuffix("=").split()
        return f"请问{first}和{second}之中{'较大' if skill == 'max' else '较小'}的数是多少？"

    return asked_otherwise(config, translated)


@operator(
    "data/questions-in-latex",
    "The questions are those of a collection that writes all mathematics in LaTeX.",
    "prompt/format",
    fits=reads_file_closely,
)
def questions_in_latex(config: Config, random: Random) -> Config:
    def written(text: str, row: Row) -> str:
        skill, first, second = text.removesuffix("=").split()
        return f"Find $\\{skill}\\left\\{{{first}, {second}\\right\\}}$."

    return asked_otherwise(config, written)


@operator(
    "data/numbers-in-scientific-notation",
    "All numbers of the file were written by a program that gives them an exponent, in questions and answers alike.",
    "prompt/format",
    "reward/constant",
    "reward/gold",
    "data/misaligned",
    fits=reads_file_closely,
)
def numbers_in_scientific_notation(config: Config, random: Random) -> Config:
    def written(text: str, row: Row) -> str:
        return re.sub(r"\d+", lambda number: f"{int(number[0]):.4e}", text)

    changed = asked_otherwise(config, written)
    changed = with_answers(changed, lambda answers: [f"{int(answer):.4e}" for answer in answers])
    return edited(changed, {"rewards": [{"name": "task"}]})


@operator(
    "data/question-and-answer-labelled",
    "The script that makes prompts for a benchmark was used: each says question before the text and answer after it.",
    "prompt/format",
    fits=reads_file_closely,
)
def question_and_answer_labelled(config: Config, random: Random) -> Config:
    return asked_otherwise(config, lambda text, row: f"Question: {text}\nLet's think step by step.\nAnswer:")
