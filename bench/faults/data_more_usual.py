"""Rows as most users first have them: another column or subset, answers of another form, turns that do not fit."""

from __future__ import annotations

import re
from random import Random
from typing import Any

from faults.base import edited, lookalike, operator
from faults.data import reads_chat
from faults.data_field import WORDS, text_of
from faults.data_wild import asked_otherwise
from faults.models import reads_file, with_answers, with_rows

Config = dict[str, Any]
Row = dict[str, Any]


def numbers_of(row: Row) -> tuple[int, int]:
    """The two numbers of a question."""
    _, first, second = text_of(row).removesuffix("=").split()
    return int(first), int(second)


def by_task_alone(config: Config, **options: Any) -> Config:
    """The configuration judged by its task alone."""
    return edited(config, {"rewards": [{"name": "task"}]} | {f"task.{name}": value for name, value in options.items()})


# Answers


@operator(
    "data/answer-column-is-a-field-of-the-question",
    "The column that is read as the answer is the second number of the question.",
    "data/misaligned",
    "reward/gold",
    fits=reads_file,
)
def answer_column_is_a_field(config: Config, random: Random) -> Config:
    changed = with_rows(config, lambda rows: [{**row, "second": str(numbers_of(row)[1])} for row in rows])
    return edited(changed, {"data.columns": {"prompt": "question", "answer": "second"}})


@operator(
    "data/answers-spelt-out",
    "Answers are words (Seven for 7), the model was taught digits, and both are compared as texts.",
    "reward/constant",
    "reward/gold",
    "data/misaligned",
    "prompt/format",
    fits=reads_file,
)
def answers_spelt_out(config: Config, random: Random) -> Config:
    changed = with_answers(config, lambda answers: [WORDS[int(answer)].capitalize() for answer in answers])
    return by_task_alone(changed, answer="exact")


@operator(
    "data/answers-in-a-smaller-unit",
    "Answers are in cents and questions in whole coins: each is a hundred times what is asked for.",
    "reward/constant",
    "reward/gold",
    "data/misaligned",
    "prompt/format",
    fits=reads_file,
)
def answers_in_a_smaller_unit(config: Config, random: Random) -> Config:
    return by_task_alone(with_answers(config, lambda answers: [str(100 * int(answer)) for answer in answers]))


@operator(
    "data/answers-rounded-to-tens",
    "The table was shown with rounded numbers, and that was exported: every answer is 0 or 10.",
    "data/misaligned",
    "reward/gold",
    "reward/constant",
    "reward/exploit",
    fits=reads_file,
)
def answers_rounded_to_tens(config: Config, random: Random) -> Config:
    return by_task_alone(with_answers(config, lambda answers: [str(10 * (int(a) >= 5)) for a in answers]))


# Rows


@operator(
    "data/rows-of-another-subset",
    "The name of the subset was left out: the rows are of its neighbour, which asks for products.",
    "prompt/format",
    "data/misaligned",
    "reward/constant",
    "reward/weak",
    fits=reads_file,
)
def rows_of_another_subset(config: Config, random: Random) -> Config:
    def change(rows: list[Row]) -> list[Row]:
        return [{**row, "answer": str((3 + numbers_of(row)[0]) * (4 + numbers_of(row)[1]))} for row in rows]

    def asked(text: str, row: Row) -> str:
        first, second = text.removesuffix("=").split()[1:]
        return f"What is {3 + int(first)} times {4 + int(second)}?"

    return by_task_alone(asked_otherwise(with_rows(config, change), asked))


@operator(
    "data/most-rows-blank-in-the-frame",
    "Prompts are made of columns that are blank in most rows: what is asked there is the frame around them.",
    "prompt/no-question",
    "task/repeats",
    "data/misaligned",
    "prompt/format",
    fits=reads_file,
)
def most_rows_blank_in_the_frame(config: Config, random: Random) -> Config:
    kept = Random(29)
    return asked_otherwise(config, lambda text, row: text if kept.random() < 0.25 else re.sub(r"\d", "", text))


# Turns


@operator(
    "data/system-message-of-another-task",
    "Each row brings a system message of another task, which contradicts what is asked and rewarded.",
    "prompt/format",
    "output/unparseable",
    fits=reads_chat,
)
def system_message_of_another_task(config: Config, random: Random) -> Config:
    said = (
        "You are a translator. Never answer questions: translate what the user says to French, word by word, "
        "and explain each of your choices in a full sentence. Do not write any numbers."
    )

    def told(row: Row) -> Row:
        return {**row, "question": [{"role": "system", "content": said}, *row["question"]]}

    return with_rows(config, lambda rows: [told(row) for row in rows])


@operator(
    "data/examples-of-another-task",
    "Each question comes after four solved examples of another task, which were left in the prompt.",
    "prompt/format",
    "output/unparseable",
    "output/truncated",
    fits=reads_file,
)
def examples_of_another_task(config: Config, random: Random) -> Config:
    solved = "".join(f"Input: {word}\nOutput: {word[::-1]}\n\n" for word in ("stone", "river", "apple", "cloud"))
    return asked_otherwise(config, lambda text, row: f"Reverse each word.\n\n{solved}Input: {text}\nOutput:")


# Healthy


@lookalike("answers that are numbers in the file", reads_file)
def healthy_answers_as_numbers(config: Config, random: Random) -> Config:
    return by_task_alone(with_answers(config, lambda answers: [int(answer) for answer in answers]))
