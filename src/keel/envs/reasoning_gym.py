"""`reasoning_gym`: any dataset of the library reasoning-gym, graded by the library."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

from keel.base.errors import KeelError, first_line, unknown
from keel.base.types import Problem, Reward
from keel.envs.answers import last_tag
from keel.envs.base import Task
from keel.envs.problems import (
    check_split,
    held_out_problems,
    is_held_out,
    seeded_rng,
    split_held_out,
    training_problems,
)

SIZE = 10_000
FEW = 50  # up to this size all problems are read and split, so that neither split is empty
HELD_OUT = 0.2  # larger than the default, because some datasets need 0.1 s per problem
INSTRUCTION = "Give your final answer between <answer> and </answer>."
FALLBACKS = ("line", "text", "none")
FULL = 1.0 - 1e-9
# Metadata with a correct answer, for datasets with several correct answers.
_EXAMPLES = ("example_answer", "possible_answer", "example_correct_answer")
# Names allowed in answers that the library passes to sympy's parser, which evaluates Python.
_TRIGONOMETRY = ("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh")
_FUNCTIONS = frozenset((*_TRIGONOMETRY, "exp", "log", "ln", "sqrt", "pi", "Abs", "abs"))
_SMALL_POWER = r"(\*\*|\^)\s*(-?\d{1,2}|\w|\(\s*-?\d{1,2}\s*(/\s*\d{1,2}\s*)?\))(?![\w.])(?!\s*(\*\*|\^))"


@dataclass(frozen=True)
class ReasoningGym(Task):
    """Problems of one dataset by index; a hash of the question decides which are held out."""

    dataset: str
    params: tuple[tuple[str, Any], ...]
    fallback: str
    instruction: str
    entry: Callable[[int], Mapping[str, Any]] = field(repr=False, compare=False)
    score: Callable[[str, Mapping[str, Any]], float] = field(repr=False, compare=False)
    is_held: Callable[[str], bool] = field(repr=False, compare=False)
    size: int = SIZE
    trusted: bool = False  # the library grades completions, so the judge applies its time limit

    @property
    def name(self) -> str:
        return f"reasoning_gym/{self.dataset}"

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        rng = seeded_rng("reasoning_gym", self.dataset, "train", seed, step)
        return training_problems(self._draw, count, rng, held_out=self.is_held)

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        rng = seeded_rng("reasoning_gym", self.dataset, "held-out", seed)
        return held_out_problems(self._draw, count, rng, held_out=self.is_held)

    def gold(self, problem: Problem) -> str:
        """The library's answer in its tag; with several correct answers, the library's example."""
        if problem.answer is None:
            raise KeelError(
                f"{self.name} has no gold answers, because many answers are correct: it supports training, but no warm "
                "start and no check-task"
            )
        return f"<answer>{problem.answer}</answer>"

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        """The library's score; the part `correct` is 1 for the full score."""
        answer = self._read(turns[-1] if turns else "")
        value = 0.0 if answer is None else self.score(answer, self.entry(problem.info["index"]))
        return Reward(value, {"correct": float(value >= FULL)}, parsed=answer is not None)

    def _read(self, text: str) -> str | None:
        """The content of the last `<answer>`, else the fallback: the last line or the whole text."""
        tagged = last_tag(text)
        if tagged is None and self.fallback != "none":
            lines = text.strip().splitlines()
            tagged = lines[-1] if self.fallback == "line" and lines else text
        return tagged.strip() or None if tagged is not None else None

    def _draw(self, rng: random.Random) -> tuple[str, Problem]:
        index = rng.randrange(self.size)
        entry = self.entry(index)
        question = str(entry["question"])
        content = f"{question.rstrip()}\n{self.instruction}" if self.instruction else question
        digest = hashlib.blake2b(question.encode(), digest_size=8).hexdigest()
        return question, Problem(
            key=f"{self.dataset}:{digest}",
            prompt=[{"role": "user", "content": content}],
            answer=_answer(entry),
            info={"index": index},
        )


def reasoning_gym(dataset: str, fallback: str = "line", instruction: str = INSTRUCTION, **params: Any) -> ReasoningGym:
    """The task `reasoning_gym`: `dataset` is a dataset of the library, other parameters are passed to it.

    The answer is the content of the last `<answer>`; without that tag, the last line, the whole text (`fallback:
    text`) or nothing (`none`). `instruction` is appended to every question. `size` (default 10,000) is the number of
    problems and `seed` (default 0) selects them.
    """
    check_reasoning_gym({"dataset": dataset, "fallback": fallback, "instruction": instruction, **params})
    chosen = {"seed": 0, "size": SIZE, **params}
    data = _library().create_dataset(dataset, **chosen)
    entry, size = lru_cache(maxsize=4096)(data.__getitem__), chosen["size"]
    return ReasoningGym(
        dataset=dataset,
        params=tuple(sorted(params.items())),
        fallback=fallback,
        instruction=instruction,
        entry=entry,
        score=_scorer(data),
        is_held=_held_out_rule(dataset, entry, size),
        size=size,
    )


def check_reasoning_gym(params: Mapping[str, Any]) -> None:
    """Check the dataset, the parameter names and, with the library, their values."""
    options = {name: value for name, value in params.items() if name not in ("dataset", "fallback", "instruction")}
    known = {name: config for name, (_, config) in _library().factory.DATASETS.items()}
    dataset = params["dataset"]
    if dataset not in known:
        raise unknown("reasoning_gym dataset", dataset, known)
    if params.get("fallback", "line") not in FALLBACKS:
        raise unknown("reasoning_gym fallback", params["fallback"], FALLBACKS)
    config = known[dataset]
    names = [f.name for f in fields(config)]
    for name in options:
        if name not in names:
            raise unknown(f"reasoning_gym {dataset} parameter", name, names)
    try:
        settings = config(**{"seed": 0, "size": SIZE, **options})
        if hasattr(settings, "validate"):
            settings.validate()
    except Exception as error:  # the library asserts; a wrong type may raise anything
        raise KeelError(f"reasoning_gym {dataset} rejects its parameters {options}: {first_line(error)}") from error


def _library() -> Any:
    try:
        import reasoning_gym as library
        import reasoning_gym.factory
    except ImportError as error:
        raise KeelError("the task reasoning_gym needs the library: pip install reasoning-gym") from error
    return library


def _held_out_rule(dataset: str, entry: Callable[[int], Mapping[str, Any]], size: int) -> Callable[[str], bool]:
    """The predicate for held-out questions. With at most `FEW` problems it leaves no split empty."""
    if size > FEW:
        return lambda question: is_held_out(question, HELD_OUT)
    questions = {str(entry(index)["question"]) for index in range(size)}
    held = split_held_out(questions, HELD_OUT)
    check_split(
        f"reasoning_gym {dataset}",
        size,
        len(questions) - len(held),
        len(held),
        distinct=len(questions),
        more=": raise task.size",
    )
    return held.__contains__


def _answer(entry: Mapping[str, Any]) -> str | None:
    if entry["answer"] is not None:
        return str(entry["answer"])
    example = next((entry["metadata"][key] for key in _EXAMPLES if key in entry["metadata"]), None)
    return example if example is None or isinstance(example, str) else json.dumps(example)


def _scorer(dataset: Any) -> Callable[[str, Mapping[str, Any]], float]:
    """The library's `score_answer`, made safe for untrusted text.

    Some datasets pass the answer to `eval`, which is replaced by `ast.literal_eval`, or to sympy's parser, which only
    gets expressions of known names and small powers. Answers that raise an error earn 0.
    """
    source = inspect.getsource(type(dataset).score_answer)
    module = sys.modules[type(dataset).__module__]
    module.print = lambda *args, **options: None  # type: ignore[attr-defined]  # some print parse errors to stdout
    if "eval(answer" in source:
        module.eval = ast.literal_eval  # type: ignore[attr-defined]
    parsed_as_maths = "parse_expr(" in source and "sympy" in inspect.getsource(module)

    def score(answer: str, entry: Mapping[str, Any]) -> float:
        if parsed_as_maths and not is_plain_maths(answer):
            return 0.0
        try:
            return float(dataset.score_answer(answer, entry))
        except Exception:
            return 0.0

    return score


def is_plain_maths(text: str) -> bool:
    """Whether a text is a short expression of numbers, letters, known functions, + - * / and small powers."""
    if len(text) > 300 or not re.fullmatch(r"[\w\s+\-*/^().,]*", text, re.ASCII) or "__" in text:
        return False
    if re.search(r"[A-Za-z_)]\s*\.", text):  # attribute access
        return False
    if not all(len(name) == 1 or name in _FUNCTIONS for name in re.findall(r"[A-Za-z_]\w*", text)):
        return False
    return len(re.findall(r"\*\*|\^", text)) == len(re.findall(_SMALL_POWER, text))
