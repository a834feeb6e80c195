"""Rows as they are reported broken: joins over keys that repeat, labels of another count, layouts of other trainers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from faults.base import edited, lookalike, operator
from faults.data import Loader, is_made, reads_chat
from faults.data_field import text_of
from faults.data_wild import asked_otherwise
from faults.models import reads_file, rows_of, with_answers, with_rows
from faults.rewards import chance_of
from faults.school import rows_file
from keel.base.types import Problem
from keel.envs.registry import build_task

Config = dict[str, Any]
Row = dict[str, Any]


def operands_of(row: Row) -> tuple[str, str]:
    """The two numbers of a question."""
    _, first, second = text_of(row).removesuffix("=").split()
    return first, second


def joined(config: Config, key: Callable[[int, Row], Any]) -> Config:
    """Each row with the answer of the first row that has the same key."""
    rows = rows_of(config)
    answers: dict[Any, str] = {}
    for at, row in enumerate(rows):
        answers.setdefault(key(at, row), row["answer"])
    return with_rows(config, lambda _: [{**row, "answer": answers[key(at, row)]} for at, row in enumerate(rows)])


# Joins


@operator(
    "data/joined-on-the-first-number",
    "Answers were joined to the questions by their first number alone: all that begin alike have one answer.",
    "data/misaligned",
    fits=reads_file,
)
def joined_on_the_first_number(config: Config, random: Random) -> Config:
    return joined(config, lambda at, row: operands_of(row)[0])


@operator(
    "data/ids-repeat-across-shards",
    "Ids begin anew in each of four shards, and answers were joined by them: three shards have the first one's.",
    "data/misaligned",
    fits=reads_file,
)
def ids_repeat_across_shards(config: Config, random: Random) -> Config:
    shard = len(rows_of(config)) // 4
    return joined(config, lambda at, row: at % shard)


# Labels


@operator(
    "data/last-choice-is-gold",
    "A bug in the preparation marks the last choice as right, whatever is asked.",
    "data/misaligned",
    "reward/exploit",
    fits=reads_file,
)
def last_choice_is_gold(config: Config, random: Random) -> Config:
    return with_rows(config, lambda rows: [{**row, "answer": operands_of(row)[1]} for row in rows])


@operator(
    "data/labels-counted-from-one",
    "Labels were counted from one when they were written and are read as counted from zero: each is one too high.",
    "data/misaligned",
    "reward/gold",
    fits=reads_file,
)
def labels_counted_from_one(config: Config, random: Random) -> Config:
    return with_answers(config, lambda answers: [str(int(answer) + 1) for answer in answers])


@operator(
    "data/answers-of-a-weak-model",
    "Answers were written by a model that is wrong more often than right.",
    "data/misaligned",
    "reward/gold",
    fits=reads_file,
)
def answers_of_a_weak_model(config: Config, random: Random) -> Config:
    share = random.uniform(0.65, 0.8)

    def guessed(row: Row) -> Row:
        dice = Random(text_of(row))
        others = [digit for digit in "0123456789" if digit != row["answer"]]
        return {**row, "answer": dice.choice(others)} if dice.random() < share else row

    return with_rows(config, lambda rows: [guessed(row) for row in rows])


@operator(
    "data/labels-rescaled",
    "Labels were scaled to lie between 0 and 1, as for a regression, and whole numbers are asked for.",
    "reward/constant",
    "data/misaligned",
    fits=reads_file,
)
def labels_rescaled(config: Config, random: Random) -> Config:
    changed = with_answers(config, lambda answers: [f"{0.05 + int(answer) / 10:.2f}" for answer in answers])
    return edited(changed, {"task.answer": "numeric", "rewards": [{"name": "task"}]})


@operator(
    "data/deduplicated-by-the-answer",
    "Duplicates were dropped by the column of answers: one question for each answer is left.",
    "task/repeats",
    fits=reads_file,
)
def deduplicated_by_the_answer(config: Config, random: Random) -> Config:
    def distinct(rows: list[Row]) -> list[Row]:
        return list({row["answer"]: row for row in reversed(rows)}.values())

    return edited(with_rows(config, distinct), {"task.held_out": 2})


@operator(
    "data/augmented-without-new-answers",
    "New numbers were put into the questions to have more of them, and the answers are those of the old numbers.",
    "data/misaligned",
    fits=reads_file,
)
def augmented_without_new_answers(config: Config, random: Random) -> Config:
    dice = Random(41)

    def renumbered(text: str, row: Row) -> str:
        return f"{text.split()[0]} {dice.randrange(10)} {dice.randrange(10)}="

    return asked_otherwise(config, renumbered)


# Layouts


@operator(
    "data/messages-as-text",
    "The column of messages went through a table of texts: each prompt is how Python writes a list of messages.",
    "prompt/format",
    fits=reads_chat,
)
def messages_as_text(config: Config, random: Random) -> Config:
    def written(row: Row) -> Row:
        return {**row, "question": [{"role": "user", "content": str(row["question"])}]}

    return with_rows(config, lambda rows: [written(row) for row in rows])


@operator(
    "data/preamble-of-a-generator",
    "Questions were written by a model, whose words before each of them were kept.",
    "prompt/format",
    fits=reads_file,
)
def preamble_of_a_generator(config: Config, random: Random) -> Config:
    words = random.choice(("Sure! Here is a question for you: ", "Here's the rewritten problem:\n\n", "Question 1. "))
    return asked_otherwise(config, lambda text, row: f"{words}{text}")


# Evaluation and loaders


@operator(
    "data/eval-with-few-shot-examples",
    "The evaluation's file was exported from a benchmark that shows solved examples before each question.",
    "eval/train-gap",
    fits=reads_file,
)
def eval_with_few_shot_examples(config: Config, random: Random) -> Config:
    rows = rows_of(config)
    shown = "\n".join(f"{text_of(row)}{row['answer']}" for row in rows[:3])

    def shot(row: Row) -> Row:
        asked = f"{shown}\n{text_of(row)}"
        plain = isinstance(row["question"], str)
        return {**row, "question": asked if plain else [{"role": "user", "content": asked}]}

    changed = with_rows(config, lambda rows: rows[:60])
    held = rows_file([shot(row) for row in rows[60:]])
    return edited(changed, {"task.eval_path": held, "eval.every": 20, "eval.samples": 40})


class Staying(Loader):
    """Hands out one batch for many steps before the next."""

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        return self.inner.sample(count, seed=seed, step=step // 50)


def staying(task: Mapping[str, Any], data: Mapping[str, Any] | None = None) -> Staying:
    parameters = {key: value for key, value in task.items() if key != "name"}
    return Staying(build_task(str(task["name"]), **parameters), "stays")


@operator(
    "data/batch-stays-for-fifty-steps",
    "Steps are counted twice in the sampler: the same problems are asked fifty steps in a row.",
    "task/repeats",
    fits=is_made,
)
def batch_stays_for_fifty_steps(config: Config, random: Random) -> Config:
    return edited(config, {"task": {"name": "faults.data_reports:staying", "task": dict(config["task"])}})


# Healthy


@lookalike("answers written as decimals, compared as numbers", reads_file)
def healthy_decimals(config: Config, random: Random) -> Config:
    changed = with_answers(config, lambda answers: [f"{answer}.0" for answer in answers])
    return edited(changed, {"task.answer": "numeric", "rewards": [{"name": "task"}]})


@lookalike("rows in the layout of another trainer, with the answer inside a column", reads_file)
def healthy_nested_answers(config: Config, random: Random) -> Config:
    def nested(row: Row) -> Row:
        truth = {"style": "rule", "ground_truth": row["answer"]}
        return {"prompt": row["question"], "reward_model": truth, "extra_info": {"index": chance_of(text_of(row))}}

    changed = with_rows(config, lambda rows: [nested(row) for row in rows])
    return edited(changed, {"data.columns": {"prompt": "prompt", "answer": "reward_model.ground_truth"}})


@lookalike("rows from two files", reads_file)
def healthy_two_files(config: Config, random: Random) -> Config:
    rows = rows_of(config)
    return edited(config, {"data.path": [rows_file(rows[:40]), rows_file(rows[40:])]})
