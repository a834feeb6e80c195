"""Rows as filters, conversions and collators leave them: labels of another kind, cues, copies, held-out files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import Any

from faults.base import edited, lookalike, operator
from faults.data import Loader, is_made, reads_chat, reads_plain
from faults.data_reports import operands_of
from faults.data_wild import asked_otherwise
from faults.models import reads_file, rows_of, with_answers, with_rows
from faults.school import rows_file
from keel.base.types import Problem
from keel.envs.registry import build_task

Config = dict[str, Any]
Row = dict[str, Any]


def answered_otherwise(config: Config, change: Callable[[Row], Any]) -> Config:
    """The configuration with other answers, each made of its row."""
    return with_rows(config, lambda rows: [{**row, "answer": change(row)} for row in rows])


# Joins


@operator(
    "data/rows-dropped-on-one-side",
    "A filter took every ninth question away and no answer: the answers lag further behind with each.",
    "data/misaligned",
    fits=reads_file,
)
def rows_dropped_on_one_side(config: Config, random: Random) -> Config:
    def change(rows: list[Row]) -> list[Row]:
        kept = [row for at, row in enumerate(rows) if at % 9]
        return [{**row, "answer": other["answer"]} for row, other in zip(kept, rows, strict=False)]

    return with_rows(config, change)


@operator(
    "data/answers-interleaved",
    "Two files were put together one after the other for the questions, and row by row for the answers.",
    "data/misaligned",
    fits=reads_file,
)
def answers_interleaved(config: Config, random: Random) -> Config:
    def change(answers: list[Any]) -> list[Any]:
        half = len(answers) // 2
        pairs = zip(answers[:half], answers[half:], strict=False)
        return [answer for pair in pairs for answer in pair] + answers[2 * half :]

    return with_answers(config, change)


# Labels of another kind


@operator(
    "data/answers-as-lists",
    "The export wrote each answer as a list with one text in it, brackets and quotes included.",
    "reward/gold",
    "reward/constant",
    "data/misaligned",
    "prompt/format",
    "reward/failed",
    fits=reads_file,
)
def answers_as_lists(config: Config, random: Random) -> Config:
    return with_answers(config, lambda answers: [str([str(answer)]) for answer in answers])


@operator(
    "data/answers-are-booleans",
    "The labels are those of a pairwise set: whether the first number is the right one.",
    "reward/constant",
    "reward/gold",
    "data/misaligned",
    "prompt/format",
    "reward/failed",
    fits=reads_file,
)
def answers_are_booleans(config: Config, random: Random) -> Config:
    return answered_otherwise(config, lambda row: str(operands_of(row)[0] == str(row["answer"])))


# Questions that hold too much


@operator(
    "data/row-as-question",
    "The question is the whole row as JSON, with its answer.",
    "prompt/answer-leak",
    "prompt/format",
    fits=reads_file,
)
def row_as_question(config: Config, random: Random) -> Config:
    return asked_otherwise(config, lambda text, row: json.dumps({"question": text, "answer": row["answer"]}))


@operator(
    "data/right-choice-marked",
    "The questions list their choices and the annotators' star is still at the right one.",
    "prompt/answer-leak",
    "prompt/format",
    fits=reads_file,
)
def right_choice_marked(config: Config, random: Random) -> Config:
    def change(text: str, row: Row) -> str:
        marks = [f"{number}{'*' * (number == str(row['answer']))}" for number in operands_of(row)]
        return f"{text.removesuffix('=')} [{marks[0]} | {marks[1]}]="

    return asked_otherwise(config, change)


# Questions in another form


@operator(
    "data/punctuation-stripped",
    "Cleaning took the punctuation away, and with it the sign that asks for the answer.",
    "prompt/format",
    "output/unparseable",
    fits=reads_plain,
)
def punctuation_stripped(config: Config, random: Random) -> Config:
    return asked_otherwise(config, lambda text, row: text.removesuffix("="))


@operator(
    "data/asks-for-another-form",
    "Every question ends with a line that asks for a boxed answer, which is neither taught nor read.",
    "prompt/format",
    "output/unparseable",
    "output/truncated",
    fits=reads_chat,
)
def asks_for_another_form(config: Config, random: Random) -> Config:
    return asked_otherwise(config, lambda text, row: f"{text}\nThink step by step and answer in \\boxed{{}}.")


@operator(
    "data/packed-with-the-rows-before",
    "Rows were packed for pretraining: each question comes after two other rows' questions and answers.",
    "prompt/format",
    fits=reads_plain,
)
def packed_with_the_rows_before(config: Config, random: Random) -> Config:
    def change(rows: list[Row]) -> list[Row]:
        told = [f"{row['question']}{row['answer']}" for row in rows]
        return [{**row, "question": f"{told[at - 2]}{told[at - 1]}{row['question']}"} for at, row in enumerate(rows)]

    return with_rows(config, change)


# Messages


@operator(
    "data/messages-pile-up",
    "One list was filled for all rows of a shard: each holds the questions of up to six rows before it.",
    "prompt/format",
    fits=reads_chat,
)
def messages_pile_up(config: Config, random: Random) -> Config:
    def change(rows: list[Row]) -> list[Row]:
        piled = [
            [message for row in rows[at - at % 7 : at + 1] for message in row["question"]] for at in range(len(rows))
        ]
        return [{**row, "question": messages} for row, messages in zip(rows, piled, strict=True)]

    return with_rows(config, change)


# Held-out files


def held_out(config: Config, change: Callable[[Row], Row], trained: int = 70) -> Config:
    """The configuration with `trained` rows for training, and all after them, changed, in a file for evaluation."""
    held = rows_file([change(row) for row in rows_of(config)[70:]])
    kept = with_rows(config, lambda rows: rows[:trained])
    return edited(kept, {"task.eval_path": held, "eval.every": 20, "eval.samples": 30})


@operator(
    "data/held-out-reworded-from-training",
    "The held-out questions are training ones that were written anew, in capitals and with more blanks.",
    "eval/leak",
    "eval/train-gap",
    fits=reads_file,
)
def held_out_reworded_from_training(config: Config, random: Random) -> Config:
    def reworded(text: str) -> str:
        return text.upper().replace(" ", "  ")

    def change(row: Row) -> Row:
        question = row["question"]
        if isinstance(question, str):
            return {**row, "question": reworded(question)}
        return {**row, "question": [{**m, "content": reworded(m["content"])} for m in question]}

    return held_out(config, change, trained=100)


@operator(
    "data/eval-with-a-system-message",
    "The file for evaluation was made by another script, which puts a system message in front.",
    "eval/train-gap",
    fits=reads_chat,
)
def eval_with_a_system_message(config: Config, random: Random) -> Config:
    told = {"role": "system", "content": "You are a helpful assistant. Think step by step."}
    return held_out(config, lambda row: {**row, "question": [told, *row["question"]]})


# Collators


class Collated(Loader):
    """Batches whose problems share what is each one's own, or that are filled up with copies."""

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        problems = self.inner.sample(count, seed=seed, step=step)
        if self.fault == "last answer":
            return [replace(problem, answer=problems[-1].answer) for problem in problems]
        own = max(1, count // 3)
        copies = [replace(problems[0], key=f"{problems[0].key}#{copy}") for copy in range(count - own)]
        return [*problems[:own], *copies]


def collated(task: Mapping[str, Any], fault: str, data: Mapping[str, Any] | None = None) -> Collated:
    parameters = {key: value for key, value in task.items() if key != "name"}
    return Collated(build_task(str(task["name"]), **parameters), fault)


def with_collator(config: Config, fault: str) -> Config:
    return edited(config, {"task": {"name": "faults.data_more:collated", "task": dict(config["task"]), "fault": fault}})


def has_batches(config: Config) -> bool:
    return is_made(config) and config["rollout"]["prompts_per_step"] >= 4


@operator(
    "data/batch-shares-the-last-answer",
    "All problems of a batch hold one record, which has the last one's answer when they are judged.",
    "data/misaligned",
    fits=has_batches,
)
def batch_shares_the_last_answer(config: Config, random: Random) -> Config:
    return with_collator(config, "last answer")


@operator(
    "data/batch-filled-with-copies",
    "A loader that finds too few problems fills two thirds of every batch with copies of its first.",
    "task/repeats",
    fits=has_batches,
)
def batch_filled_with_copies(config: Config, random: Random) -> Config:
    return with_collator(config, "copies")


# Healthy


@lookalike("hard problems among the usual ones", reads_file)
def healthy_hard_problems(config: Config, random: Random) -> Config:
    """A third of the rows have numbers of two digits, which nobody taught the model."""

    def change(text: str, row: Row) -> str:
        word, first, second = text.removesuffix("=").split()
        return f"{word} {first}1 {second}1=" if row["hard"] else text

    rows = [{**row, "hard": at % 3 == 0} for at, row in enumerate(rows_of(config))]
    rows = [{**row, "answer": f"{row['answer']}1" if row["hard"] else row["answer"]} for row in rows]
    return asked_otherwise(edited(config, {"data.path": rows_file(rows)}), change)
