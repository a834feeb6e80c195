"""Rows as users' pipelines leave them: columns mixed up, exports cut, roles of other layouts, loaders out of step."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import Any

from faults.base import edited, lookalike, operator
from faults.data import Loader, is_made, reads_chat, reads_plain
from faults.data_wild import asked_otherwise
from faults.healthy import school_of
from faults.models import reads_file, rows_of, with_answers, with_rows
from faults.school import rows_file
from keel.base.types import Problem
from keel.envs.registry import build_task

Config = dict[str, Any]
Row = dict[str, Any]
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def text_of(row: Row) -> str:
    """The question, of messages the last one's text."""
    question = row["question"]
    return str(question if isinstance(question, str) else question[-1]["content"])


# Answers


@operator(
    "data/answers-of-another-task",
    "The file was joined with the answers of another task over the same questions: the smaller for the larger.",
    "data/misaligned",
    fits=reads_file,
)
def answers_of_another_task(config: Config, random: Random) -> Config:
    choose = min if school_of(config).skill == "max" else max

    def answered(row: Row) -> Row:
        _, first, second = text_of(row).removesuffix("=").split()
        return {**row, "answer": str(choose(int(first), int(second)))}

    return with_rows(config, lambda rows: [answered(row) for row in rows])


@operator(
    "data/answers-are-indices",
    "Answers are the place of the right number in the question, counted from zero, not the number.",
    "data/misaligned",
    fits=reads_file,
)
def answers_are_indices(config: Config, random: Random) -> Config:
    def placed(row: Row) -> Row:
        _, first, second = text_of(row).removesuffix("=").split()
        return {**row, "answer": str([first, second].index(row["answer"]))}

    return with_rows(config, lambda rows: [placed(row) for row in rows])


@operator(
    "data/invisible-characters-in-answers",
    "Answers hold a character that nobody sees and no tokenizer writes, and are compared as texts.",
    "reward/constant",
    "reward/gold",
    fits=reads_file,
)
def invisible_characters_in_answers(config: Config, random: Random) -> Config:
    character = random.choice(("\u200b", "\ufeff", "\u2060"))
    changed = with_answers(config, lambda answers: [f"{character}{answer}" for answer in answers])
    return edited(changed, {"task.answer": "exact", "rewards": [{"name": "task"}]})


@operator(
    "data/filtered-to-one-answer",
    "A filter has left only rows of one and the same answer, which is what will be said to everything.",
    "reward/exploit",
    "task/repeats",
    fits=reads_file,
)
def filtered_to_one_answer(config: Config, random: Random) -> Config:
    answer = "9" if school_of(config).skill == "max" else "0"
    return with_rows(config, lambda rows: [row for row in rows if row["answer"] == answer])


@operator(
    "data/eval-answers-with-units",
    "The evaluation's file has its answers with a unit, compared as texts, and the training's has them without.",
    "eval/train-gap",
    fits=reads_file,
)
def eval_answers_with_units(config: Config, random: Random) -> Config:
    held = [{**row, "answer": f"{row['answer']} apples"} for row in rows_of(config)[60:]]
    changed = with_rows(config, lambda rows: rows[:60])
    evaluation = {"task.eval_path": rows_file(held), "task.answer": "exact", "eval.every": 20, "eval.samples": 40}
    return edited(changed, {**evaluation, "rewards": [{"name": "task"}]})


# Columns


@operator(
    "data/question-and-answer-swapped",
    "The columns are named the wrong way round: answers are asked and questions are the answers.",
    "prompt/format",
    "task/repeats",
    "reward/constant",
    "data/misaligned",
    fits=reads_plain,
)
def question_and_answer_swapped(config: Config, random: Random) -> Config:
    return edited(config, {"data.columns": {"prompt": "answer", "answer": "question"}, "rewards": [{"name": "task"}]})


@operator(
    "data/ids-asked",
    "The column that is asked is the row's id.",
    "prompt/format",
    "data/misaligned",
    "prompt/no-question",
    fits=reads_plain,
)
def ids_asked(config: Config, random: Random) -> Config:
    form = random.choice(("train-{:05d}", "gsm8k/{}", "{:08x}"))
    changed = with_rows(config, lambda rows: [{**row, "id": form.format(7 * at)} for at, row in enumerate(rows)])
    return edited(changed, {"data.columns": {"prompt": "id", "answer": "answer"}})


@operator(
    "data/system-column-is-the-answer",
    "The column of system messages is the one of the answers.",
    "prompt/answer-leak",
    "prompt/format",
    fits=reads_chat,
)
def system_column_is_the_answer(config: Config, random: Random) -> Config:
    return edited(config, {"data.columns": {"prompt": "question", "answer": "answer", "system": "answer"}})


# Questions


@operator(
    "data/questions-cut-on-export",
    "The export cut every question after a few characters: many are the same and have other answers.",
    "task/repeats",
    "data/misaligned",
    "prompt/format",
    fits=reads_file,
)
def questions_cut_on_export(config: Config, random: Random) -> Config:
    return asked_otherwise(config, lambda text, row: text[:5])


@operator(
    "data/questions-nan",
    "Most questions were lost in a join and are written as nan.",
    "task/repeats",
    "prompt/format",
    "data/misaligned",
    fits=reads_file,
)
def questions_nan(config: Config, random: Random) -> Config:
    lost = Random(23)
    return asked_otherwise(config, lambda text, row: "nan" if lost.random() < 0.8 else text)


@operator(
    "data/end-token-in-the-question",
    "Rows were made for supervised training: each question ends with the end token.",
    "prompt/format",
    fits=reads_plain,
)
def end_token_in_the_question(config: Config, random: Random) -> Config:
    return edited(asked_otherwise(config, lambda text, row: f"{text}<eos>"), {"data.allow_control_tokens": True})


@operator(
    "data/numbers-scrubbed",
    "A filter for private data has put a sign in place of every second number.",
    "task/repeats",
    "data/misaligned",
    "prompt/no-question",
    fits=reads_file,
)
def numbers_scrubbed(config: Config, random: Random) -> Config:
    return asked_otherwise(config, lambda text, row: re.sub(r"\d(?=\D*$)", "#", text))


@operator(
    "data/numbers-spelt-out",
    "Questions were normalised for speech: their numbers are words, which the model has never read.",
    "prompt/format",
    fits=reads_file,
)
def numbers_spelt_out(config: Config, random: Random) -> Config:
    return asked_otherwise(config, lambda text, row: re.sub(r"\d", lambda digit: WORDS[int(digit[0])], text))


@operator(
    "data/still-encoded",
    "Questions are still in the encoding in which they were sent.",
    "prompt/format",
    fits=reads_file,
)
def still_encoded(config: Config, random: Random) -> Config:
    return asked_otherwise(config, lambda text, row: base64.b64encode(text.encode()).decode())


@operator(
    "data/placeholder-not-filled",
    "The prompt's placeholders were never filled in: all rows ask the same.",
    "task/repeats",
    "prompt/no-question",
    "data/misaligned",
    fits=reads_file,
    refusal="of them different",
)
def placeholder_not_filled(config: Config, random: Random) -> Config:
    return asked_otherwise(config, lambda text, row: random.choice(("{question}=", "{instruction} {input}=")))


@operator(
    "data/two-questions-a-row",
    "Every row asks two questions, and its answer is that of the first.",
    "data/misaligned",
    "prompt/format",
    fits=reads_file,
)
def two_questions_a_row(config: Config, random: Random) -> Config:
    rows = rows_of(config)
    others = iter([text_of(row) for row in [*rows[37:], *rows[:37]]])
    return asked_otherwise(config, lambda text, row: f"{text} {next(others)}")


# Loaders


class OutOfStep(Loader):
    """Ranks that draw alike, or answers that come a batch too late."""

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        problems = self.inner.sample(count, seed=seed, step=step)
        if self.fault == "ranks alike":
            share = max(1, count // 4)
            kept = [(problems[at % share], at // share) for at in range(count)]
            return [replace(problem, key=f"{problem.key}#{copy}") if copy else problem for problem, copy in kept]
        late = self.inner.sample(count, seed=seed, step=step + 1)
        return [replace(problem, answer=other.answer) for problem, other in zip(problems, late, strict=True)]


def out_of_step(task: Mapping[str, Any], fault: str, data: Mapping[str, Any] | None = None) -> OutOfStep:
    parameters = {key: value for key, value in task.items() if key != "name"}
    return OutOfStep(build_task(str(task["name"]), **parameters), fault)


def loader_fault(name: str, breaks: str, *codes: str, fault: str, fits: Callable[[Config], bool] = is_made) -> None:
    def apply(config: Config, random: Random) -> Config:
        task = {"name": "faults.data_field:out_of_step", "task": dict(config["task"]), "fault": fault}
        return edited(config, {"task": task})

    operator(name, breaks, *codes, fits=fits)(apply)


loader_fault(
    "data/ranks-draw-alike",
    "Four ranks have loaders of one seed: a batch holds every problem four times.",
    "task/repeats",
    fault="ranks alike",
    fits=lambda config: is_made(config) and config["rollout"]["prompts_per_step"] >= 4,
)
loader_fault(
    "data/answers-prefetched",
    "A loader that reads ahead gives each problem the answer of the next batch's.",
    "data/misaligned",
    fault="prefetched",
)

# Healthy


@lookalike("answers that are accepted in digits and in words", reads_file)
def healthy_two_spellings(config: Config, random: Random) -> Config:
    changed = with_answers(config, lambda answers: [[answer, WORDS[int(answer)]] for answer in answers])
    return edited(changed, {"task.answer": "exact", "rewards": [{"name": "task"}]})


@lookalike("every row twice, as where a file was upsampled", reads_file)
def healthy_rows_twice(config: Config, random: Random) -> Config:
    return with_rows(config, lambda rows: [*rows, *rows])


@lookalike("evaluation on a file of its own", reads_file)
def healthy_eval_file(config: Config, random: Random) -> Config:
    held = rows_file(rows_of(config)[70:])
    changed = with_rows(config, lambda rows: rows[:70])
    return edited(changed, {"task.eval_path": held, "eval.every": 20, "eval.samples": 30})
