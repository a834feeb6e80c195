"""Rows as sheets, dumps and joins leave them: types that changed on the way, ids sorted as text, gaps filled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from statistics import mean
from typing import Any

from faults.base import edited, lookalike, operator
from faults.data import Loader
from faults.data_more import answered_otherwise, has_batches
from faults.data_reports import operands_of
from faults.data_wild import asked_otherwise
from faults.healthy import school_of
from faults.models import reads_file, with_answers, with_rows
from faults.models_wild import reads_its_tokenizer
from keel.base.types import Problem
from keel.envs.registry import build_task
from keel.models.tiny import tiny_tokenizer

Config = dict[str, Any]
Row = dict[str, Any]
# What an expert may say of answers that are of no kind a model would write.
UNREADABLE = ("reward/gold", "reward/constant", "data/misaligned", "prompt/format")


# Joins


@operator(
    "data/ids-sorted-as-text",
    "The answers were sorted by ids that are texts (1, 10, 100, 11, …), and the questions by ids that are numbers.",
    "data/misaligned",
    fits=reads_file,
)
def ids_sorted_as_text(config: Config, random: Random) -> Config:
    return with_answers(config, lambda answers: [answers[at] for at in sorted(range(len(answers)), key=str)])


@operator(
    "data/gaps-filled-forward",
    "Two answers in three were not found by the join, and were filled with the last one above them.",
    "data/misaligned",
    fits=reads_file,
)
def gaps_filled_forward(config: Config, random: Random) -> Config:
    return with_answers(config, lambda answers: [answers[at - at % 3] for at in range(len(answers))])


@operator(
    "data/answers-averaged-in-groups",
    "The table was grouped by the first number, and every answer became its group's mean.",
    *UNREADABLE,
    fits=reads_file,
)
def answers_averaged_in_groups(config: Config, random: Random) -> Config:
    def change(rows: list[Row]) -> list[Row]:
        groups: dict[str, list[float]] = {}
        for row in rows:
            groups.setdefault(operands_of(row)[0], []).append(float(row["answer"]))
        return [{**row, "answer": f"{mean(groups[operands_of(row)[0]]):.2f}"} for row in rows]

    return edited(with_rows(config, change), {"rewards": [{"name": "task"}]})  # others may read digits alone


class LookedUp(Loader):
    """Answers from a cache whose key is too short: problems that share it have the answer of the first of them."""

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        problems = self.inner.sample(count, seed=seed, step=step)
        answers: dict[Any, Any] = {}
        for problem in problems:
            answers.setdefault(self.key(problem), problem.answer)
        return [replace(problem, answer=answers[self.key(problem)]) for problem in problems]

    def key(self, problem: Problem) -> Any:
        return len(str(problem.prompt))


def looked_up(task: Mapping[str, Any], data: Mapping[str, Any] | None = None) -> LookedUp:
    parameters = {key: value for key, value in task.items() if key != "name"}
    return LookedUp(build_task(str(task["name"]), **parameters), "key")


@operator(
    "data/answers-looked-up-by-length",
    "The cache of answers is keyed by the question's length, and all of a length get the first one's answer.",
    "data/misaligned",
    fits=has_batches,
)
def answers_looked_up_by_length(config: Config, random: Random) -> Config:
    return edited(config, {"task": {"name": "faults.data_more_rows:looked_up", "task": dict(config["task"])}})


# Answers of another kind


@operator(
    "data/answers-are-token-ids",
    "The file was written after the answers had been tokenised: each is the number of its token.",
    *UNREADABLE,
    fits=reads_file,
)
def answers_are_token_ids(config: Config, random: Random) -> Config:
    tokenizer = tiny_tokenizer()
    return answered_otherwise(config, lambda row: str(tokenizer.convert_tokens_to_ids(str(row["answer"]))))


@operator(
    "data/answers-turned-into-dates",
    "A spreadsheet read the answers as days and wrote them as dates.",
    *UNREADABLE,
    "reward/failed",
    fits=reads_file,
)
def answers_turned_into_dates(config: Config, random: Random) -> Config:
    return answered_otherwise(config, lambda row: f"January {int(row['answer']) + 1}, 1900")


@operator(
    "data/bullet-read-as-minus",
    "The answers stood in a list, and its bullets were read as signs: every answer is below zero.",
    *UNREADABLE,
    fits=reads_file,
)
def bullet_read_as_minus(config: Config, random: Random) -> Config:
    return answered_otherwise(config, lambda row: f"-{row['answer']}")


# Questions


def told(text: str, row: Row) -> str:
    """A question with its answer."""
    return f"{text}{row['answer']}"


@operator(
    "data/finds-itself-as-the-example",
    "Each prompt begins with the solved example nearest to its question, which is the question itself.",
    "prompt/answer-leak",
    "prompt/format",
    fits=reads_file,
)
def finds_itself_as_the_example(config: Config, random: Random) -> Config:
    return asked_otherwise(config, lambda text, row: f"{told(text, row)}\n{text}")


@operator(
    "data/columns-of-fixed-width",
    "The database keeps texts at a fixed width: every question is filled up with blanks to sixty-four characters.",
    "prompt/format",
    "output/unparseable",
    fits=lambda config: reads_file(config) and reads_its_tokenizer(config),
)
def columns_of_fixed_width(config: Config, random: Random) -> Config:
    return asked_otherwise(config, lambda text, row: text.ljust(64))


@operator(
    "data/row-numbers-left-in",
    "The index of the table was written with the questions: each begins with the number of its row.",
    "prompt/format",
    fits=reads_file,
)
def row_numbers_left_in(config: Config, random: Random) -> Config:
    numbered = with_rows(config, lambda rows: [{**row, "at": 1000 + at} for at, row in enumerate(rows)])
    return asked_otherwise(numbered, lambda text, row: f"{row['at']} {text}")


@operator(
    "data/letters-for-digits",
    "The questions were read from scans: digits are the letters that look like them.",
    "prompt/format",
    "prompt/no-question",
    "data/misaligned",
    fits=reads_file,
)
def letters_for_digits(config: Config, random: Random) -> Config:
    seen = str.maketrans("0123456789", "OlZEASGTBg")
    return asked_otherwise(config, lambda text, row: text.translate(seen))


@operator(
    "data/numbers-become-floats",
    "A column of whole numbers had a gap, became one of floats, and the questions were made of that.",
    "prompt/format",
    fits=lambda config: reads_file(config) and school_of(config).skill == "min",
)
def numbers_become_floats(config: Config, random: Random) -> Config:
    def change(text: str, row: Row) -> str:
        first, second = map(float, operands_of(row))
        return f"{text.split()[0]} {first:f} {second:f}="

    return asked_otherwise(config, change)


@operator(
    "data/numbers-in-ranges",
    "The numbers were made anonymous: each question has the ranges that they lie in, from which no answer follows.",
    "prompt/format",
    "prompt/no-question",
    "task/repeats",
    "data/misaligned",
    fits=reads_file,
)
def numbers_in_ranges(config: Config, random: Random) -> Config:
    def change(text: str, row: Row) -> str:
        first, second = ("0-4" if int(number) < 5 else "5-9" for number in operands_of(row))
        return f"{text.split()[0]} {first} {second}="

    return asked_otherwise(config, change)


# Healthy


@lookalike("answers with blanks and a full stop around them, compared as numbers", reads_file)
def healthy_untidy_answers(config: Config, random: Random) -> Config:
    changes = {"task.answer": "numeric", "rewards": [{"name": "task"}]}  # others may read digits alone
    return edited(answered_otherwise(config, lambda row: f" {row['answer']}. "), changes)
