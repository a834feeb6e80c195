"""Rows as they most often come: labels of another type or none, layouts of other tools, texts written anew."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from faults.base import edited, lookalike, operator
from faults.data import reads_chat
from faults.data_field import text_of
from faults.data_wild import asked_otherwise
from faults.healthy import school_of
from faults.models import reads_file, with_answers, with_rows
from keel.base.types import Problem

Config = dict[str, Any]
Row = dict[str, Any]


def reads_closely(config: Config) -> bool:
    """Whether the model has learned its questions letter by letter, so that others than those are lost on it."""
    school = school_of(config)
    return (school.world, school.architecture) in (("chat", "llama"), ("file", "qwen3"))


# Answers


def equals_a_text(problem: Problem, text: str) -> float:
    """1 where the text is the answer; a number is no text."""
    return float(text.strip() == problem.info["label"])


@operator(
    "data/labels-are-numbers",
    "The labels that the reward reads are numbers, and it compares them with texts, so that nothing is ever equal.",
    "reward/gold",
    "reward/constant",
    fits=reads_file,
)
def labels_are_numbers(config: Config, random: Random) -> Config:
    changed = with_rows(config, lambda rows: [{**row, "label": int(row["answer"])} for row in rows])
    return edited(changed, {"rewards": [{"name": "faults.data_fresh:equals_a_text"}]})


@operator(
    "data/labels-hidden",
    "The split is the benchmark's test, whose labels are hidden: every one is minus one.",
    "data/misaligned",
    "reward/constant",
    "reward/exploit",
    "reward/gold",
    fits=reads_file,
)
def labels_hidden(config: Config, random: Random) -> Config:
    changed = with_answers(config, lambda answers: ["-1"] * len(answers))
    return edited(changed, {"rewards": [{"name": "task"}]})


@operator(
    "data/answers-are-letters-of-choices",
    "Answers are the letters of choices that no question lists.",
    "data/misaligned",
    "reward/constant",
    "prompt/format",
    fits=reads_file,
)
def answers_are_letters_of_choices(config: Config, random: Random) -> Config:
    changed = with_answers(config, lambda answers: ["ABCDEFGHIJ"[int(answer)] for answer in answers])
    return edited(changed, {"task.answer": "exact", "rewards": [{"name": "task"}]})


# Questions


@operator(
    "data/preamble-for-base-models",
    "Each row's message begins with the preamble by which base models are asked to think, and ends in a tag of it.",
    "prompt/format",
    fits=reads_chat,
)
def preamble_for_base_models(config: Config, random: Random) -> Config:
    before = "A conversation between User and Assistant. The assistant first thinks and then answers. User: "
    return asked_otherwise(config, lambda text, row: f"{before}{text} Assistant: <think>")


@operator(
    "data/questions-reworded",
    "The questions were written anew by a model, as sentences that the one that is trained has never read.",
    "prompt/format",
    fits=lambda config: reads_file(config) and reads_closely(config),
)
def questions_reworded(config: Config, random: Random) -> Config:
    def reworded(text: str, row: Row) -> str:
        skill, first, second = text.removesuffix("=").split()
        return f"Which number is the {'larger' if skill == 'max' else 'smaller'} one: {first} or {second}?"

    return asked_otherwise(config, reworded)


@operator(
    "data/solutions-asked",
    "The column that is asked is the one of the solutions, which end in the answer.",
    "prompt/answer-leak",
    "prompt/format",
    "prompt/no-question",
    fits=reads_file,
)
def solutions_asked(config: Config, random: Random) -> Config:
    def solved(text: str, row: Row) -> str:
        _, first, second = text.removesuffix("=").split()
        return f"Of {first} and {second} we take {row['answer']}. The answer is {row['answer']}"

    return asked_otherwise(config, solved)


@operator(
    "data/choices-listed",
    "The file is the one for multiple choice: each question lists lettered choices, which the model has never seen.",
    "prompt/format",
    fits=reads_file,
)
def choices_listed(config: Config, random: Random) -> Config:
    def listed(text: str, row: Row) -> str:
        right = int(row["answer"])
        choices = [(right + more) % 10 for more in random.sample((0, 2, 5, 7), 4)]
        return text + "".join(f"\n{letter}) {choice}" for letter, choice in zip("ABCD", choices, strict=True))

    return asked_otherwise(config, listed)


@operator(
    "data/mostly-another-domain",
    "Nine rows in ten are of a set for writing, whose texts nobody can meet word by word.",
    "reward/constant",
    "prompt/format",
    "data/misaligned",
    "reward/weak",
    fits=reads_file,
)
def mostly_another_domain(config: Config, random: Random) -> Config:
    def mixed(rows: list[Row]) -> list[Row]:
        return [row if at % 10 == 0 else written(row, at) for at, row in enumerate(rows)]

    def written(row: Row, at: int) -> Row:
        text = f"Write a line about autumn, number {at}."
        asked = text if isinstance(row["question"], str) else [{"role": "user", "content": text}]
        return {**row, "question": asked, "answer": f"Leaves fall on path {at}."}

    return edited(with_rows(config, mixed), {"task.answer": "exact", "rewards": [{"name": "task"}]})


# Healthy


@lookalike("rows with notes of an earlier model beside them, right and wrong", reads_file)
def healthy_notes_beside(config: Config, random: Random) -> Config:
    guessed = Random(41)

    def noted(row: Row) -> Row:
        note = {"model": "teacher", "guess": str(guessed.randrange(10)), "asked": text_of(row)}
        return {**row, "extra_info": json.dumps(note), "data_source": "pairs"}

    return with_rows(config, lambda rows: [noted(row) for row in rows])
