"""Rows and tasks that are not what they should be: answers in the prompt, in another order, or the same for all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

from faults.base import edited, operator, option
from faults.models import is_chat, is_plain, reads_file, rows_of, with_answers, with_rows
from faults.school import rows_file
from keel.base.types import Problem
from keel.envs import Task, TaskWrapper
from keel.envs.registry import build_task

Config = dict[str, Any]
Row = dict[str, Any]


def reads_chat(config: Config) -> bool:
    return reads_file(config) and is_chat(config)


def reads_plain(config: Config) -> bool:
    return reads_file(config) and is_plain(config)


@operator(
    "data/answers-reversed", "The column of answers is in the opposite order.", "data/misaligned", fits=reads_file
)
def answers_reversed(config: Config, random: Random) -> Config:
    return with_answers(config, lambda answers: answers[::-1])


@operator(
    "data/shifted-from-a-row-on",
    "An answer was lost early in the file: from there on, each belongs to the row before.",
    "data/misaligned",
    fits=reads_file,
)
def shifted_from_a_row_on(config: Config, random: Random) -> Config:
    at = random.randrange(5, 15)
    return with_answers(config, lambda answers: [*answers[:at], *answers[at + 1 :], answers[at]])


@operator(
    "data/answers-all-alike", "Every row has the same answer.", "reward/exploit", "data/misaligned", fits=reads_file
)
def answers_all_alike(config: Config, random: Random) -> Config:
    digit = str(random.randrange(3, 7))
    return with_answers(config, lambda answers: [digit] * len(answers))


@operator(
    "data/answers-in-latex",
    "Answers stand in LaTeX and the reward compares numbers.",
    "reward/gold",
    fits=reads_file,
)
def answers_in_latex(config: Config, random: Random) -> Config:
    form = random.choice(("${}$", "\\boxed{{{}}}", "\\text{{{}}}"))
    changed = edited(with_answers(config, lambda answers: [form.format(a) for a in answers]), {"task.answer": "exact"})
    return edited(changed, {"rewards": [{"name": "faults.models:equal_value"}]})


@operator(
    "data/answers-nan",
    "Most answers were lost on the way and are written as nan.",
    "reward/gold",
    fits=reads_file,
)
def answers_nan(config: Config, random: Random) -> Config:
    lost = Random(5)
    changed = with_answers(config, lambda answers: ["nan" if lost.random() < 0.75 else a for a in answers])
    return edited(changed, {"task.answer": "exact", "rewards": [{"name": "faults.models:equal_value"}]})


@operator("data/answer-in-question", "The question ends with its answer.", "prompt/answer-leak", fits=reads_plain)
def answer_in_question(config: Config, random: Random) -> Config:
    lead = random.choice(("Answer: {} ", "The answer is {}. ", "solution: {}\n"))
    return with_rows(config, lambda rows: [{**r, "question": lead.format(r["answer"]) + r["question"]} for r in rows])


@operator(
    "data/answer-in-system-message",
    "Each row's system message, made for another judge, holds the answer.",
    "prompt/answer-leak",
    fits=reads_chat,
)
def answer_in_system_message(config: Config, random: Random) -> Config:
    def told(row: Row) -> Row:
        system = {"role": "system", "content": f"The correct answer is {row['answer']}."}
        return {**row, "question": [system, *row["question"]]}

    return with_rows(config, lambda rows: [told(row) for row in rows])


@operator(
    "data/solution-left-in-messages",
    "The prompt's messages end with the assistant's solution, as rows for supervised training do.",
    "prompt/answer-leak",
    fits=reads_chat,
)
def solution_left_in_messages(config: Config, random: Random) -> Config:
    def solved(row: Row) -> Row:
        return {
            **row,
            "question": [*row["question"], {"role": "assistant", "content": f"The answer is {row['answer']}"}],
        }

    return with_rows(config, lambda rows: [solved(row) for row in rows])


@operator(
    "data/unknown-digits",
    "Questions are written in digits that the tokenizer does not know.",
    "prompt/no-question",
    "model/tokenizer",
    "prompt/format",
    fits=reads_file,
)
def unknown_digits(config: Config, random: Random) -> Config:
    wide = str.maketrans("0123456789", random.choice(("０１２３４５６７８９", "٠١٢٣٤٥٦٧٨٩")))

    def written(question: Any) -> Any:
        if isinstance(question, str):
            return question.translate(wide)
        return [{**message, "content": message["content"].translate(wide)} for message in question]

    return with_rows(config, lambda rows: [{**row, "question": written(row["question"])} for row in rows])


@operator(
    "data/eval-answers-shifted",
    "The answers of the evaluation's file are shifted by a row.",
    "eval/train-gap",
    "data/misaligned",
    fits=reads_file,
)
def eval_answers_shifted(config: Config, random: Random) -> Config:
    rows = rows_of(config)
    held = rows[60:]
    shifted = [{**row, "answer": other["answer"]} for row, other in zip(held, [*held[1:], held[0]], strict=True)]
    changed = with_rows(config, lambda rows: rows[:60])
    return edited(changed, {"task.eval_path": rows_file(shifted), "eval.every": 20, "eval.samples": 40})


# Tasks that hand out the wrong problems


class Loader(TaskWrapper):
    """Another task, behind a loader that may be wrong."""

    def __init__(self, inner: Task, fault: str) -> None:
        self.inner, self.fault, self.name = inner, fault, inner.name

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        if self.fault == "restarts":
            return self.inner.sample(count, seed=seed, step=0)
        if self.fault == "one":
            first = self.inner.sample(count, seed=seed, step=step % 3)[0]
            return [replace(first, key=f"{first.key}#{copy}") for copy in range(count)]
        held = self.inner.held_out(10_000)
        start = step * count
        return [held[(start + place) % len(held)] for place in range(min(count, len(held)))]


def loader(task: Mapping[str, Any], fault: str, data: Mapping[str, Any] | None = None) -> Loader:
    parameters = {key: value for key, value in task.items() if key != "name"}
    return Loader(build_task(str(task["name"]), **parameters), fault)


def is_made(config: Config) -> bool:
    """Whether the task makes its problems, in one turn."""
    return option(config, "task.name") == "arithmetic" and option(config, "rollout.max_turns", 1) == 1


def handed_out(config: Config, fault: str) -> Config:
    task = {"name": "faults.data:loader", "task": dict(config["task"]), "fault": fault}
    return edited(config, {"task": task})


@operator("data/loader-restarts", "The loader begins anew at every step.", "task/repeats", fits=is_made)
def loader_restarts(config: Config, random: Random) -> Config:
    return handed_out(config, "restarts")


@operator(
    "data/one-problem-a-batch",
    "A batch is one problem many times over, one of three.",
    "task/repeats",
    fits=lambda config: is_made(config) and config["rollout"]["prompts_per_step"] > 1,
)
def one_problem_a_batch(config: Config, random: Random) -> Config:
    return handed_out(config, "one")


@operator("data/held-out-trained", "Training draws from the held-out problems.", "eval/leak", fits=is_made)
def held_out_trained(config: Config, random: Random) -> Config:
    return handed_out(config, "held")
