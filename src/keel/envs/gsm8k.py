"""`gsm8k`: grade-school word problems (Cobbe et al. 2021, arXiv 2110.14168), from the hub or a local JSONL."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from keel.base.errors import KeelError
from keel.base.types import Problem, Reward
from keel.envs.answers import has_math_verify, last_number, math_equal, plain_number
from keel.envs.dataset import Dataset, split
from keel.envs.layouts import LoadedProblems, load_problems, source_of
from keel.envs.options import SourceOptions
from keel.envs.problems import HELD_OUT_FRACTION
from keel.envs.rows import BrokenRow, handle_broken_rows

HUB = "openai/gsm8k,main"
MARK = "####"
INSTRUCTION = "Think step by step, and end with #### and the answer as a number."
# Graded by math-verify if installed: LaTeX and arithmetic expressions.
_MATHEMATICS = re.compile(r".*\\.*|\$?[\d\s.,+\-*/^(){}=]*[*/^=+][\d\s.,+\-*/^(){}=]*\$?", re.DOTALL)
_CALCULATOR = re.compile(r"<<[^<>]*>>")  # calculator annotations in the data


@dataclass(frozen=True)
class Gsm8kGrader:
    """Grade the text after the last `####`, or the whole text without one.

    LaTeX and expressions are compared by math-verify, other texts by their last number. Only one parser is used, so
    that a text cannot contain one answer for each (`\\boxed{7} 8`).
    """

    math_verify: bool

    def gold(self, problem: Problem) -> str:
        return f"{problem.info['solution']}\n{MARK} {problem.answer}"

    def reward(self, problem: Problem, text: str) -> Reward:
        final = text.rpartition(MARK)[2].strip()
        right: bool | None = None
        if self.math_verify and _MATHEMATICS.fullmatch(final):
            right = math_equal(str(problem.answer), final)
        if right is None and (number := last_number(final)) is not None:
            right = number == problem.answer
        correct = float(bool(right))
        return Reward(correct, {"correct": correct}, parsed=right is not None)


def gsm8k(
    data: Mapping[str, Any] | None = None,
    instruction: str | None = INSTRUCTION,
    held_out: int | float = HELD_OUT_FRACTION,
    eval_path: str | Sequence[str] | None = None,
    eval_split: str | None = None,
) -> Dataset:
    """The task `gsm8k`: the hub's `openai/gsm8k` with its test split, or a local copy with `data.path`.

    `instruction` is appended to every question; null appends nothing. A local copy is split as in `dataset`.
    """
    source = source_of(data)
    if source.path is None:
        source = source.model_copy(update={"path": HUB})
        eval_split = eval_split or (None if eval_path else "test")
    sides = split(source, held_out, eval_path, eval_split, read=_solutions)
    train, held = (tuple(_with_instruction(p, instruction) for p in side) for side in sides[:2])
    how = "by math-verify" if has_math_verify() else "as numbers (math-verify is not installed)"
    return Dataset(
        "gsm8k", train, held, Gsm8kGrader(has_math_verify()), (*sides[2], f"gsm8k: answers are compared {how}")
    )


def _solutions(source: SourceOptions) -> LoadedProblems:
    """Split each answer at `####` into solution and number."""
    loaded = load_problems(source)
    problems, broken = [], []
    for problem in loaded.problems:
        solution, mark, final = str(problem.answer).rpartition(MARK)
        number = plain_number(final.strip().lstrip("$"))
        if not mark or number is None:
            broken.append(BrokenRow(problem.key, f"the answer does not end with {MARK} and a number"))
            continue
        info = {**problem.info, "solution": _CALCULATOR.sub("", solution).strip()}
        problems.append(replace(problem, answer=number, info=info))
    note = handle_broken_rows(loaded.source, broken, source.on_broken)
    if not problems:
        raise KeelError(f"{loaded.source} has no answer that ends with {MARK} and a number: use the task dataset")
    return LoadedProblems(loaded.source, tuple(problems), (*loaded.notes, *([note] if note else [])))


def _with_instruction(problem: Problem, instruction: str | None) -> Problem:
    """The question as a chat message."""
    if not isinstance(problem.prompt, str):
        raise KeelError(
            f"{problem.key}: the task gsm8k reads questions as text: use the task dataset for chat messages"
        )
    question = f"{problem.prompt}\n{instruction}" if instruction else problem.prompt
    return replace(problem, prompt=[{"role": "user", "content": question}])
