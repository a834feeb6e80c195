"""`dataset`: a user's own problems from a file, a folder or a hub, without code."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, Self

from keel.base.errors import KeelError, unknown
from keel.base.types import Problem, Reward
from keel.base.validation import read_options
from keel.envs.answers import last_number, last_tag, plain_number
from keel.envs.base import Task
from keel.envs.layouts import LoadedProblems, load_problems, source_of
from keel.envs.maths import math_equal, need_math_verify
from keel.envs.options import SourceOptions
from keel.envs.problems import HELD_OUT_FRACTION, check_sides, split_held_out, stream

COMPARISONS = ("exact", "numeric", "math")


class Grader(Protocol):
    """Grades completions: the gold one, and the reward of a text."""

    def gold(self, problem: Problem) -> str: ...

    def reward(self, problem: Problem, text: str) -> Reward: ...


class NoGrader:
    """For problems whose own task grades them: only their order and their split are taken from the data set."""

    def gold(self, problem: Problem) -> str:
        raise TypeError("these problems are graded by their own task")

    def reward(self, problem: Problem, text: str) -> Reward:
        raise TypeError("these problems are graded by their own task")


class PromptsTooLong(KeelError):
    """No prompt is left within data.max_prompt_length."""


@dataclass(frozen=True)
class Dataset(Task):
    """Problems that were read once, split into training and held-out ones.

    Training walks them in an order of its own each epoch, without replacement. `notes` says how they were read.
    """

    name: str
    train: tuple[Problem, ...]
    held: tuple[Problem, ...]
    grader: Grader
    notes: tuple[str, ...] = ()

    @property
    def unanswered(self) -> bool:
        """Whether there are prompts alone, so that nothing is right or wrong and rewards have to say what is good."""
        return isinstance(self.grader, NoAnswers)

    def fingerprint(self) -> str:
        """A digest of all problems and of which of them are held out: a run must not go on with others."""
        rows = [[p.key, p.prompt, p.answer] for side in (self.train, self.held) for p in side]
        text = json.dumps([len(self.train), rows], ensure_ascii=False, sort_keys=True, default=str)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        """Training problems of one step: the next `count` of the epoch's order.

        One that comes twice in a batch, where the next epoch begins, gets another key, because noise is keyed by it.
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
        """`count` problems that are never trained on, or all there are."""
        return [self.held[i] for i in _order(len(self.held), self.name, "held-out", seed)[:count]]

    def gold(self, problem: Problem) -> str:
        """The answer in the form that is read."""
        return self.grader.gold(problem)

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        """1 for the right answer, else 0."""
        return self.grader.reward(problem, turns[-1] if turns else "")

    def keep(self, fits: Callable[[Problem], bool]) -> tuple[Self, int]:
        """The task with only the problems that `fits` accepts, and how many were left out."""
        train, held = tuple(filter(fits, self.train)), tuple(filter(fits, self.held))
        left_out = len(self.train) + len(self.held) - len(train) - len(held)
        for part, before, rest in (("training", self.train, train), ("held-out", self.held, held)):
            if before and not rest:
                raise PromptsTooLong(f"task {self.name!r}: all {len(before)} {part} prompts are too long")
        return replace(self, train=train, held=held), left_out


@dataclass(frozen=True)
class AnswerGrader:
    """Compares answers with the data's: `exact` as text, `numeric` by the last number, `math` by math-verify.

    Where the data give a list, each of its entries is right. With `tag` the last `<tag>…</tag>` is read.
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
        """Right or wrong; None where no answer can be read."""
        if self.compare == "exact":
            return text.strip() == answer.strip() if text.strip() else None
        if self.compare == "math":
            return math_equal(answer, text)
        number = last_number(text)
        return None if number is None else number == last_number(answer)


@dataclass(frozen=True)
class NoAnswers:
    """Prompts without answers: there is nothing to compare a completion with."""

    source: str

    def gold(self, problem: Problem) -> str:
        raise KeelError(f"{self.source} has prompts and no answers: this needs answers, named by data.columns.answer")

    def reward(self, problem: Problem, text: str) -> Reward:
        raise KeelError(
            f"{self.source} has prompts and no answers, so the task has no reward of its own: name rewards that need "
            "no answer, such as rewards='[{name: length}]'"
        )


def accepted(problem: Problem) -> list[str]:
    """The texts that count as the answer: one, or each entry of a list."""
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
    answer: str | None = None,
    tag: str | None = None,
    held_out: int | float = HELD_OUT_FRACTION,
    eval_path: str | Sequence[str] | None = None,
    eval_split: str | None = None,
) -> Dataset:
    """The task `dataset`: problems of `data` (`data.path`, `split`, `columns`, `on_broken`).

    `answer` is exact, numeric or math (default: numeric where every answer is a number, else exact). `held_out` keeps
    that share (below 1) or that many problems for evaluation, chosen by a hash of the prompt; `eval_path` or
    `eval_split` evaluates on other data instead.
    """
    source = source_of(data)
    if answer is not None and answer not in COMPARISONS:
        raise unknown("task.answer", answer, COMPARISONS)
    train, held, notes = split(source, held_out, eval_path, eval_split)
    if all(p.answer is None for p in (*train, *held)):
        for option, value in (("answer", answer), ("tag", tag)):
            if value is not None:
                raise KeelError(
                    f"task.{option}={value} is about answers, and {data_name(source)} has none: leave it out"
                )
        return Dataset(f"dataset/{data_name(source)}", train, held, NoAnswers(data_name(source)), notes)
    bare = next((p for p in (*train, *held) if p.answer is None), None)
    if bare is not None:
        raise KeelError(f"{bare.key}: no answer here, while other problems have one: give all of them answers, or none")
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
    """Training problems, held-out problems and notes; what is evaluated on is never trained on.

    `has_eval_path` says whether the task has such an option, for the line that refuses too few problems.
    """
    is_number = isinstance(held_out, int | float) and not isinstance(held_out, bool)
    if not is_number or held_out < 0 or (held_out > 1 and held_out != int(held_out)):
        raise KeelError(f"task.held_out is {held_out!r}: give a share below 1, or a whole number of problems")
    loaded = read(source)
    if eval_path is not None or eval_split is not None:
        changes = {"path": eval_path or source.path, "split": eval_split or source.split}
        other = read_options(SourceOptions, {**source.model_dump(), **changes}, "data")
        if other == source:
            raise KeelError("task.eval_path and task.eval_split name the training data: leave them out, or name others")
        evaluated = read(other)
        held = tuple(replace(p, key=f"eval/{p.key}") for p in evaluated.problems)
        prompts = {_identity(p) for p in held}
        train = tuple(p for p in loaded.problems if _identity(p) not in prompts)
        notes = [*loaded.notes, *(note for note in evaluated.notes if note not in loaded.notes)]
        if len(train) < len(loaded.problems):
            notes.append(f"{len(loaded.problems) - len(train)} training problems are in the evaluation set: left out")
    else:
        # By a hash of the prompt alone, so that a problem stays on its side when the file grows.
        chosen = split_held_out(map(_identity, loaded.problems), held_out)
        train = tuple(p for p in loaded.problems if _identity(p) not in chosen)
        held = tuple(p for p in loaded.problems if _identity(p) in chosen)
        notes = [*loaded.notes]
    distinct, more = len(set(map(_identity, loaded.problems))), ", or task.eval_path" if has_eval_path else ""
    check_sides(loaded.source, len(loaded.problems), len(train), len(held), distinct=distinct, more=more)
    return train, held, (*notes, f"{loaded.source}: {len(train)} problems to train on, {len(held)} held out")


def _identity(problem: Problem) -> str:
    """What makes two rows the same problem: the words of the question, whatever the system message."""
    if isinstance(problem.prompt, str):
        return " ".join(problem.prompt.split())
    contents = [m["content"] for m in problem.prompt if m["role"] != "system"] or [m["content"] for m in problem.prompt]
    return " ".join(" ".join(contents).split())


def _comparison(name: str, answer: str | None, problems: Sequence[Problem]) -> tuple[str, list[str]]:
    """How answers are compared, checked against what the data hold, and a note where that was chosen here."""
    not_a_number = next((p for p in problems if not all(map(last_number, accepted(p)))), None)
    if answer == "numeric" and not_a_number is not None:
        raise KeelError(
            f"{not_a_number.key}: task.answer is numeric, but the answer {accepted(not_a_number)[0][:40]!r} has no "
            "number: use task.answer=exact or math"
        )
    if answer == "math":
        need_math_verify("task.answer=math")
    if answer is not None:
        return answer, []
    bare = all(plain_number(text) is not None for p in problems for text in accepted(p))
    compare = "numeric" if bare else "exact"
    why = (
        "they are all numbers: the last number of a completion counts" if bare else "the whole completion has to be it"
    )
    return compare, [f"{name}: answers are compared as task.answer={compare}, {why}"]


def data_name(source: SourceOptions) -> str:
    """A short name of the data, for results and messages."""
    first = source.path if isinstance(source.path, str) else (source.path or ("data",))[0]
    return Path(first.partition(",")[0]).expanduser().stem or "data"


@lru_cache(maxsize=16)
def _order(count: int, *parts: object) -> tuple[int, ...]:
    """A permutation that depends on `parts` and nothing else."""
    order = list(range(count))
    stream("dataset", *parts).shuffle(order)
    return tuple(order)
