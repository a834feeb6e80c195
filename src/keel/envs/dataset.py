"""`dataset`: problems from a file, a folder or a hub, without code; `gsm8k`: the same with GSM8K's answer format."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from keel.base.errors import KeelError
from keel.base.options import read_options
from keel.base.types import Problem, Reward
from keel.envs.answers import has_math_verify, last_number, last_tag, math_equal, plain_number, require_math_verify
from keel.envs.base import Task
from keel.envs.layouts import LoadedProblems, load_problems, source_of
from keel.envs.options import SourceOptions
from keel.envs.problems import HELD_OUT_FRACTION, check_held_out, check_split, seeded_rng, split_held_out
from keel.envs.rows import BrokenRow, handle_broken_rows


class Grader(Protocol):
    """Grade completions of a problem."""

    def gold(self, problem: Problem) -> str: ...

    def reward(self, problem: Problem, text: str) -> Reward: ...


class NoGrader:
    """A placeholder for tasks that use `Dataset` only for order and split, and grade problems themselves."""

    def gold(self, problem: Problem) -> str:
        raise TypeError("these problems are graded by their own task")

    def reward(self, problem: Problem, text: str) -> Reward:
        raise TypeError("these problems are graded by their own task")


class PromptsTooLong(KeelError):
    """All prompts exceed data.max_prompt_length."""


@dataclass(frozen=True)
class Dataset(Task):
    """Training and held-out problems from data.

    Each epoch visits the training problems once, in a new order. `notes` describe how the data were read.
    """

    name: str
    train: tuple[Problem, ...]
    held: tuple[Problem, ...]
    grader: Grader
    notes: tuple[str, ...] = ()

    @property
    def prompts_only(self) -> bool:
        """Whether the data have prompts but no answers, so that rewards must be configured."""
        return isinstance(self.grader, NoAnswers)

    def fingerprint(self) -> str:
        """A digest of all problems and their split."""
        rows = [[p.key, p.prompt, p.answer] for side in (self.train, self.held) for p in side]
        text = json.dumps([len(self.train), rows], ensure_ascii=False, sort_keys=True, default=str)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        """The next `count` training problems of the epoch.

        A problem that occurs twice in a batch, in two epochs, gets another key: the key seeds the noise.
        """
        batch: dict[str, Problem] = {}
        for position in range(step * count, (step + 1) * count):
            epoch, index = divmod(position, len(self.train))
            problem = self.train[_order(len(self.train), self.name, seed, epoch)[index]]
            copies = 0
            while problem.key in batch:
                copies += 1
                problem = replace(problem, key=f"{problem.key.partition('#')[0]}#{copies}")
            batch[problem.key] = problem
        return list(batch.values())

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        """`count` held-out problems, or all if there are fewer."""
        return [self.held[i] for i in _order(len(self.held), self.name, "held-out", seed)[:count]]

    def gold(self, problem: Problem) -> str:
        return self.grader.gold(problem)

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        return self.grader.reward(problem, turns[-1] if turns else "")

    def filter_problems(self, fits: Callable[[Problem], bool]) -> tuple[Self, int]:
        train, held = tuple(filter(fits, self.train)), tuple(filter(fits, self.held))
        left_out = len(self.train) + len(self.held) - len(train) - len(held)
        for part, before, rest in (("training", self.train, train), ("held-out", self.held, held)):
            if before and not rest:
                raise PromptsTooLong(f"task {self.name!r}: all {len(before)} {part} prompts are too long")
        return replace(self, train=train, held=held), left_out


@dataclass(frozen=True)
class AnswerGrader:
    """Compare a completion with the answer: `exact` text, `numeric` by the last number, `math` with math-verify.

    If the answer is a list, every entry is accepted. With `tag`, only the last `<tag>…</tag>` is graded.
    """

    compare: str
    tag: str | None = None

    def gold(self, problem: Problem) -> str:
        answer = accepted(problem)[0]
        return f"<{self.tag}>{answer}</{self.tag}>" if self.tag else answer

    def reward(self, problem: Problem, text: str) -> Reward:
        within = last_tag(text, self.tag) if self.tag else text
        verdicts = [self._judge(answer, within) for answer in accepted(problem)] if within is not None else [None]
        correct = float(any(verdicts))
        return Reward(correct, {"correct": correct}, parsed=any(verdict is not None for verdict in verdicts))

    def _judge(self, answer: str, text: str) -> bool | None:
        """Whether the answer is correct, or None if no answer can be parsed."""
        if self.compare == "exact":
            return text.strip() == answer.strip() if text.strip() else None
        if self.compare == "math":
            return math_equal(answer, text)
        number = last_number(text)
        return None if number is None else number == last_number(answer)


@dataclass(frozen=True)
class NoAnswers:
    """The grader of prompts without answers. Its methods raise a KeelError."""

    source: str

    def gold(self, problem: Problem) -> str:
        raise KeelError(f"{self.source} has no answers: name their column with data.columns.answer")

    def reward(self, problem: Problem, text: str) -> Reward:
        raise KeelError(
            f"{self.source} has no answers, so the task has no reward: configure rewards that need no answer, such as "
            "rewards='[{name: length}]'"
        )


def accepted(problem: Problem) -> list[str]:
    """The accepted answers: one, or the entries of a list."""
    several = problem.answer if isinstance(problem.answer, list | tuple) else [problem.answer]
    return [_text(answer) for answer in several]


def _text(answer: Any) -> str:
    if isinstance(answer, bool):
        return "true" if answer else "false"
    if isinstance(answer, float) and math.isfinite(answer):
        return plain_number(f"{Decimal(repr(answer)):f}") or str(answer)
    return str(answer)


def dataset(
    data: Mapping[str, Any] | None = None,
    answer: Literal["exact", "numeric", "math"] | None = None,
    tag: str | None = None,
    held_out: int | float = HELD_OUT_FRACTION,
    eval_path: str | Sequence[str] | None = None,
    eval_split: str | None = None,
) -> Dataset:
    """The task `dataset`: problems of `data` (`data.path`, `split`, `columns`, `on_broken`).

    `answer` is exact, numeric or math (default: numeric if every answer is a number, else exact). `held_out` is the
    fraction (below 1) or number of problems for evaluation, chosen by a hash of the prompt; `eval_path` or
    `eval_split` evaluates on other data instead.
    """
    source = source_of(data)
    train, held, notes = split(source, held_out, eval_path, eval_split)
    if all(p.answer is None for p in (*train, *held)):
        for option, value in (("answer", answer), ("tag", tag)):
            if value is not None:
                raise KeelError(f"task.{option}={value} needs answers, and {data_name(source)} has none: leave it out")
        return Dataset(f"dataset/{data_name(source)}", train, held, NoAnswers(data_name(source)), notes)
    bare = next((p for p in (*train, *held) if p.answer is None), None)
    if bare is not None:
        raise KeelError(f"{bare.key}: no answer, but other problems have one: give answers to all problems or to none")
    compare, comparison_notes = _comparison(data_name(source), answer, (*train, *held))
    grader = AnswerGrader(compare, tag)
    return Dataset(f"dataset/{data_name(source)}", train, held, grader, (*notes, *comparison_notes))


def split(
    source: SourceOptions,
    held_out: int | float,
    eval_path: str | Sequence[str] | None,
    eval_split: str | None,
    read: Callable[[SourceOptions], LoadedProblems] = load_problems,
    has_eval_path: bool = True,
) -> tuple[tuple[Problem, ...], tuple[Problem, ...], tuple[str, ...]]:
    """Return training problems, held-out problems and notes. Held-out problems are removed from the training data.

    `has_eval_path` is whether the task has the option `eval_path`, which the error about an empty split then suggests.
    """
    held_out = check_held_out(held_out)
    loaded = read(source)
    if eval_path is not None or eval_split is not None:
        changes = {"path": eval_path or source.path, "split": eval_split or source.split}
        other = read_options(SourceOptions, {**source.model_dump(), **changes}, "data")
        if other == source:
            raise KeelError(
                "task.eval_path and task.eval_split name the training data: leave them out, or name other data"
            )
        evaluated = read(other)
        held = tuple(replace(p, key=f"eval/{p.key}") for p in evaluated.problems)
        prompts = {_identity(p) for p in held}
        train = tuple(p for p in loaded.problems if _identity(p) not in prompts)
        notes = [*loaded.notes, *(note for note in evaluated.notes if note not in loaded.notes)]
        if len(train) < len(loaded.problems):
            notes.append(
                f"{len(loaded.problems) - len(train)} training problems are in the evaluation set and are dropped"
            )
    else:
        # only a hash of the prompt decides, so that problems stay in their split when the file grows
        chosen = split_held_out(map(_identity, loaded.problems), held_out)
        train = tuple(p for p in loaded.problems if _identity(p) not in chosen)
        held = tuple(p for p in loaded.problems if _identity(p) in chosen)
        notes = [*loaded.notes]
    distinct, more = len(set(map(_identity, loaded.problems))), ", or task.eval_path" if has_eval_path else ""
    check_split(loaded.source, len(loaded.problems), len(train), len(held), distinct=distinct, more=more)
    return train, held, (*notes, f"{loaded.source}: {len(train)} training problems, {len(held)} held out")


def _identity(problem: Problem) -> str:
    """The normalised prompt without system messages; rows with the same identity are the same problem."""
    if isinstance(problem.prompt, str):
        return " ".join(problem.prompt.split())
    contents = [m["content"] for m in problem.prompt if m["role"] != "system"] or [m["content"] for m in problem.prompt]
    return " ".join(" ".join(contents).split())


def _comparison(name: str, answer: str | None, problems: Sequence[Problem]) -> tuple[str, list[str]]:
    """The comparison of answers, checked against the data, and a note if it was chosen automatically."""
    not_a_number = next((p for p in problems if not all(map(last_number, accepted(p)))), None)
    if answer == "numeric" and not_a_number is not None:
        raise KeelError(
            f"{not_a_number.key}: task.answer is numeric, but the answer {accepted(not_a_number)[0][:40]!r} has no "
            "number: use task.answer=exact or math"
        )
    if answer == "math":
        require_math_verify("task.answer=math")
    if answer is not None:
        return answer, []
    bare = all(plain_number(text) is not None for p in problems for text in accepted(p))
    compare = "numeric" if bare else "exact"
    why = "because all are numbers: the last number of a completion counts" if bare else "against the whole completion"
    return compare, [f"{name}: answers are compared with task.answer={compare}, {why}"]


def data_name(source: SourceOptions) -> str:
    """A short name of the data for results and messages."""
    first = source.path if isinstance(source.path, str) else (source.path or ("data",))[0]
    return Path(first.partition(",")[0]).expanduser().stem or "data"


@lru_cache(maxsize=16)
def _order(count: int, *parts: object) -> tuple[int, ...]:
    """A permutation that depends only on `parts`."""
    order = list(range(count))
    seeded_rng("dataset", *parts).shuffle(order)
    return tuple(order)


HUB = "openai/gsm8k,main"
MARK = "####"
INSTRUCTION = "Think step by step, and end with #### and the answer as a number."
# Graded by math-verify if installed: LaTeX and arithmetic expressions.
_MATHEMATICS = re.compile(r".*\\.*|\$?[\d\s.,+\-*/^(){}=]*[*/^=+][\d\s.,+\-*/^(){}=]*\$?", re.DOTALL)
_CALCULATOR = re.compile(r"<<[^<>]*>>")  # calculator annotations in the data


@dataclass(frozen=True)
class Gsm8kGrader:
    """Grade the text after the last `####`, or the whole text without one.

    LaTeX and expressions are compared by math-verify, other texts by their last number. Only one of the two parsers
    counts, so that a text cannot give each of them another answer (`\\boxed{7} 8`).
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
