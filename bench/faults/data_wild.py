"""Rows as exports, joins and samplers leave them: shards apart, labels in prompts, broken characters, few problems."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from faults.base import edited, lookalike, operator
from faults.data import Loader, is_made, reads_chat, reads_plain
from faults.models import reads_file, rows_of, with_answers, with_rows
from faults.school import rows_file
from keel.base.types import Problem
from keel.envs.registry import build_task

Config = dict[str, Any]
Row = dict[str, Any]


def asked_otherwise(config: Config, change: Callable[[str, Row], str]) -> Config:
    """The configuration with other questions, of which the last message is changed where they are chats."""

    def changed(row: Row) -> Row:
        question = row["question"]
        if isinstance(question, str):
            return {**row, "question": change(question, row)}
        last = {**question[-1], "content": change(question[-1]["content"], row)}
        return {**row, "question": [*question[:-1], last]}

    return with_rows(config, lambda rows: [changed(row) for row in rows])


# Answers


@operator(
    "data/one-shard-shuffled",
    "In one of two shards, the answers were shuffled among themselves.",
    "data/misaligned",
    fits=reads_file,
)
def one_shard_shuffled(config: Config, random: Random) -> Config:
    def change(answers: list[Any]) -> list[Any]:
        half = len(answers) // 3
        return [*answers[:half], *Random(11).sample(answers[half:], len(answers) - half)]

    return with_answers(config, change)


@operator(
    "data/halves-swapped",
    "Questions and answers were joined from files whose two halves are in different order.",
    "data/misaligned",
    fits=reads_file,
)
def halves_swapped(config: Config, random: Random) -> Config:
    return with_answers(config, lambda answers: [*answers[len(answers) // 2 :], *answers[: len(answers) // 2]])


@operator(
    "data/answers-contradict",
    "Every question is there three times, each time with another row's answer but once.",
    "data/misaligned",
    fits=reads_file,
)
def answers_contradict(config: Config, random: Random) -> Config:
    def change(rows: list[Row]) -> list[Row]:
        places = range(len(rows))
        return [{**rows[at], "answer": rows[(at + far) % len(rows)]["answer"]} for far in (0, 31, 57) for at in places]

    return with_rows(config, change)


@operator(
    "data/answers-in-another-form",
    "Answers are written with a point, a unit or in words around them, and are compared as texts.",
    "reward/constant",
    "reward/gold",
    fits=reads_file,
)
def answers_in_another_form(config: Config, random: Random) -> Config:
    form = random.choice(("{}.0", "{} units", "the number {}"))
    changed = with_answers(config, lambda answers: [form.format(answer) for answer in answers])
    return edited(changed, {"task.answer": "exact", "rewards": [{"name": "task"}]})


@operator(
    "data/eval-file-is-the-training-file",
    "The evaluation reads a shuffled copy of the file that is trained on.",
    "eval/leak",
    fits=reads_file,
)
def eval_file_is_the_training_file(config: Config, random: Random) -> Config:
    rows = rows_of(config)
    shuffled = rows_file(Random(17).sample(rows, len(rows)))
    return edited(config, {"task.eval_path": shuffled, "eval.every": 20, "eval.samples": 32})


# Questions


@operator(
    "data/instruction-for-question",
    "The column that is asked is the instruction, of which there are four.",
    "task/repeats",
    "prompt/no-question",
    fits=reads_plain,
)
def instruction_for_question(config: Config, random: Random) -> Config:
    said = ("Which is it?=", "Say which.=", "Answer this.=", "What is it?=")
    changed = with_rows(config, lambda rows: [{**row, "instruction": said[at % 4]} for at, row in enumerate(rows)])
    return edited(changed, {"data.columns": {"prompt": "instruction", "answer": "answer"}})


@operator(
    "data/label-in-the-message",
    "The user's message ends with the row's label.",
    "prompt/answer-leak",
    "prompt/format",
    fits=reads_chat,
)
def label_in_the_message(config: Config, random: Random) -> Config:
    label = random.choice(("{} (ground truth: {})", "{}\nsolution: {}", "{} [answer={}]"))
    return asked_otherwise(config, lambda text, row: label.format(text, row["answer"]))


@operator(
    "data/mojibake",
    "The file is UTF-16 and was read as bytes: a character that the tokenizer does not know follows each one.",
    "prompt/format",
    "model/tokenizer",
    "prompt/no-question",
    fits=reads_file,
)
def mojibake(config: Config, random: Random) -> Config:
    return asked_otherwise(config, lambda text, row: "".join(f"{character}\x00" for character in text))


@operator(
    "data/markup-left-in",
    "Questions still have the markup of the page that they were taken from.",
    "prompt/format",
    fits=reads_file,
)
def markup_left_in(config: Config, random: Random) -> Config:
    form = random.choice(
        ('<p class="q">{}</p>', "**Problem.** {}\n\n**Solution.**", "\\begin{{problem}}{}\\end{{problem}}")
    )
    return asked_otherwise(config, lambda text, row: form.format(text))


# Which problems


@operator(
    "data/resampled-badly",
    "Weights of a sampler were mixed up: nearly all rows are copies of four.",
    "task/repeats",
    fits=reads_file,
)
def resampled_badly(config: Config, random: Random) -> Config:
    return with_rows(config, lambda rows: [*rows[:4] * 60, *rows[4:10]])


class Window(Loader):
    """A shuffle buffer of four problems that is never filled again."""

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        buffer = self.inner.sample(max(4, count), seed=seed, step=0)[:4]
        return [buffer[place] for place in Random(f"{seed} {step}").sample(range(4), min(4, count))]


def window(task: Mapping[str, Any], data: Mapping[str, Any] | None = None) -> Window:
    parameters = {key: value for key, value in task.items() if key != "name"}
    return Window(build_task(str(task["name"]), **parameters), "window")


@operator(
    "data/buffer-never-refilled",
    "Problems are drawn from a buffer of four that is never filled again.",
    "task/repeats",
    fits=lambda config: is_made(config) and config["rollout"]["prompts_per_step"] <= 4,
)
def buffer_never_refilled(config: Config, random: Random) -> Config:
    return edited(config, {"task": {"name": "faults.data_wild:window", "task": dict(config["task"])}})


# Healthy


@lookalike("rows sorted by their answers, which training shuffles", reads_file)
def healthy_sorted_rows(config: Config, random: Random) -> Config:
    return with_rows(config, lambda rows: sorted(rows, key=lambda row: str(row["answer"])))


@lookalike("rows with columns that nobody reads", reads_file)
def healthy_more_columns(config: Config, random: Random) -> Config:
    count = len(rows_of(config))
    more = [{"solution": "not given", "id": place, "level": place % 5} for place in range(count)]
    return with_rows(config, lambda rows: [{**row, **beside} for row, beside in zip(rows, more, strict=True)])
