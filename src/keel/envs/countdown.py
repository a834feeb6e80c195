"""`countdown`: combine integers with + − × ÷ and parentheses to reach a target, using each number exactly once."""

from __future__ import annotations

import ast
import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations
from typing import Annotated, Any, Literal

from pydantic import Field

from keel.base.errors import KeelError
from keel.base.types import Message, Problem, Reward
from keel.envs.answers import last_tag
from keel.envs.base import Task
from keel.envs.dataset import Dataset, split
from keel.envs.layouts import LoadedProblems, source_of
from keel.envs.options import SourceOptions
from keel.envs.problems import HELD_OUT_FRACTION, held_out_problems, seeded_rng, training_problems
from keel.envs.rows import DataRow, convert_rows, read_rows

Format = Literal["tags", "plain"]
COLUMNS = ("nums", "target")
MAX_NUMBERS = 5  # maximum of a data row, because its solution is searched exhaustively
FORMAT_REWARD = 0.1
LONGEST_EXPRESSION = 256
_SIGNS = str.maketrans({"×": "*", "÷": "/", "−": "-"})
_ALLOWED = re.compile(r"[0-9+\-*/()\s]+", re.ASCII)
_ATTEMPTS = 1000

_QUESTION = (
    "Using the numbers {numbers}, create an equation that equals {target}. You can use basic arithmetic operations "
    "(+, -, *, /) and parentheses, and each number must be used exactly once. Show your work in <think> </think> "
    "tags. And return the final answer in <answer> </answer> tags, for example <answer>(1 + 2) / 3</answer>."
)


def value_of(expression: str) -> tuple[Fraction, list[int]] | None:
    """The exact value of an expression and its numbers, or None for anything but + − × ÷ and parentheses.

    The text is parsed and evaluated over a whitelist, without eval. Division by zero, deep nesting and very long input
    give None.
    """
    text = expression.translate(_SIGNS).strip()
    if len(text) > LONGEST_EXPRESSION or not _ALLOWED.fullmatch(text):
        return None
    numbers: list[int] = []
    try:
        return _walk(ast.parse(" ".join(text.split()), mode="eval").body, numbers), numbers
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _walk(node: ast.expr, numbers: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        numbers.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_walk(node.operand, numbers)
    if isinstance(node, ast.BinOp):
        left, right = _walk(node.left, numbers), _walk(node.right, numbers)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.Div):
            return left / right
    raise ValueError("operation not allowed")


def steps_of(expression: str) -> list[str]:
    """The operations of an expression in order, as `3 * 5 = 15`; fractions are in parentheses, as `8 / (1/3) = 24`."""
    steps: list[str] = []

    def walk(node: ast.expr) -> str:
        value = _walk(node, [])
        if isinstance(node, ast.BinOp):
            steps.append(f"{walk(node.left)} {_SYMBOLS[type(node.op)]} {walk(node.right)} = {value}")
        return str(value) if value.denominator == 1 else f"({value})"

    walk(ast.parse(expression, mode="eval").body)
    return steps


@dataclass(frozen=True)
class CountdownGrader:
    """Grade expressions over a problem's `numbers` and `target`; `format` is the requested answer format."""

    format: str

    def prompt(self, numbers: Sequence[int], target: int) -> str | list[Message]:
        if self.format == "plain":
            return f"{' '.join(map(str, numbers))}>{target}="
        return [{"role": "user", "content": _QUESTION.format(numbers=list(numbers), target=target)}]

    def gold(self, problem: Problem) -> str:
        """A solution in the requested format, with its steps as reasoning."""
        solution = problem.answer or solve(problem.info["numbers"], problem.info["target"])
        if solution is None:
            raise KeelError(f"{problem.key}: its numbers cannot reach its target: fix the row")
        if self.format == "plain":
            return solution
        answer = re.sub(r"([-+*/])", r" \1 ", solution)
        return f"<think>{', '.join(steps_of(solution))}</think><answer>{answer}</answer>"

    def reward(self, problem: Problem, text: str) -> Reward:
        """1 if the expression uses each number once and reaches the target, 0.1 for the format alone, else 0.

        The format is the answer tag, or with `format: plain` an expression that can be parsed.
        """
        expression = last_tag(text) if self.format == "tags" else text
        evaluated = None if expression is None else value_of(expression)
        form = float(expression is not None if self.format == "tags" else evaluated is not None)
        hit = evaluated is not None and evaluated[0] == problem.info["target"]
        correct = float(hit and evaluated is not None and Counter(evaluated[1]) == Counter(problem.info["numbers"]))
        return Reward(
            max(correct, FORMAT_REWARD * form), {"correct": correct, "format": form}, parsed=evaluated is not None
        )


@dataclass(frozen=True)
class Countdown(Task):
    """Solvable problems with `numbers` integers between `low` and `high`, generated from a solution.

    `format: tags` asks in words and grades the last `<answer>`. `format: plain` asks `3 5 7>22=` and grades the whole
    completion, for character-level models.
    """

    numbers: tuple[int, ...]
    low: int
    high: int
    target_low: int
    target_high: int
    operations: str
    grader: CountdownGrader
    name: str = "countdown"

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        return training_problems(self._draw, count, seeded_rng("countdown", "train", seed, step))

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        return held_out_problems(self._draw, count, seeded_rng("countdown", "held-out", seed))

    def stratum(self, problem: Problem) -> str:
        return str(len(problem.info["numbers"]))

    def gold(self, problem: Problem) -> str:
        return self.grader.gold(problem)

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        return self.grader.reward(problem, turns[-1] if turns else "")

    def _draw(self, rng: random.Random) -> tuple[str, Problem]:
        numbers, target, solution = self._solved(rng)
        return _identity(numbers, target), Problem(
            key=f"countdown:{','.join(map(str, numbers))}>{target}",
            prompt=self.grader.prompt(numbers, target),
            answer=solution,
            info={"numbers": tuple(numbers), "target": target},
        )

    def _solved(self, rng: random.Random) -> tuple[list[int], int, str]:
        """Random numbers, an in-range target, and an expression that reaches it."""
        for _ in range(_ATTEMPTS):
            numbers = [rng.randint(self.low, self.high) for _ in range(rng.choice(self.numbers))]
            # text, value and precedence of each number
            parts = [(str(n), Fraction(n), 2) for n in numbers]
            rng.shuffle(parts)
            while len(parts) > 1:
                first, second = parts.pop(), parts.pop()
                parts.append(_join(first, second, rng.choice(self.operations)))
                rng.shuffle(parts)
            text, value, _ = parts[0]
            if value.denominator == 1 and self.target_low <= value <= self.target_high:
                return numbers, int(value), text
        raise KeelError(
            f"countdown found no problem with a target from {self.target_low} to {self.target_high} in {_ATTEMPTS} "
            "attempts: widen target_low/target_high"
        )


def _identity(numbers: Sequence[int], target: int) -> str:
    """The identity of a problem, which is the same for every order of the numbers."""
    return f"countdown:{','.join(map(str, sorted(numbers)))}>{target}"


_SYMBOLS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_Part = tuple[str, Fraction, int]  # text, value, precedence: 0 sum, 1 product, 2 number


def _join(left: _Part, right: _Part, operation: str) -> _Part:
    """Combine two parts. Operands of − are swapped to avoid negative values; inexact ÷ becomes ×."""
    if operation == "-" and left[1] < right[1]:
        left, right = right, left
    if operation == "/" and (right[1] == 0 or (left[1] / right[1]).denominator != 1):
        operation = "*"
    return _combine(left, right, operation)


def _combine(left: _Part, right: _Part, operation: str) -> _Part:
    value = {
        "+": lambda: left[1] + right[1],
        "-": lambda: left[1] - right[1],
        "*": lambda: left[1] * right[1],
        "/": lambda: left[1] / right[1],
    }[operation]()
    binds = 0 if operation in "+-" else 1
    bracket_right = right[2] < binds or (operation in "-/" and right[2] == binds)
    left_text = f"({left[0]})" if left[2] < binds else left[0]
    right_text = f"({right[0]})" if bracket_right else right[0]
    return f"{left_text}{operation}{right_text}", value, binds


def solve(numbers: Sequence[int], target: int) -> str | None:
    """Search all expressions for one that uses each number once and reaches the target; None if there is none."""
    return _search([(str(n), Fraction(n), 2) for n in numbers], target)


def _search(parts: list[_Part], target: int) -> str | None:
    if len(parts) == 1:
        return parts[0][0] if parts[0][1] == target else None
    for i, j in combinations(range(len(parts)), 2):
        rest = [part for k, part in enumerate(parts) if k not in (i, j)]
        for joined in _joins(parts[i], parts[j]):
            if solution := _search([*rest, joined], target):
                return solution
    return None


def _joins(first: _Part, second: _Part) -> Iterator[_Part]:
    """All distinct combinations of two parts. Negative values are skipped, because no solution needs them."""
    large, small = (first, second) if first[1] >= second[1] else (second, first)
    yield from (_combine(large, small, operation) for operation in "+-*")
    yield from (_combine(a, b, "/") for a, b in ((large, small), (small, large)) if b[1] != 0)


def countdown(
    numbers: int | Sequence[int] = (3, 4),
    low: Annotated[int, Field(ge=0)] = 1,
    high: int = 99,
    target_low: int = 1,
    target_high: int = 999,
    operations: str = "+-*/",
    format: Format = "tags",
    data: Mapping[str, Any] | None = None,
    held_out: int | float = HELD_OUT_FRACTION,
    eval_path: str | Sequence[str] | None = None,
    eval_split: str | None = None,
) -> Task:
    """The task `countdown`. Fewer `numbers`, a smaller `high` and fewer `operations` make it easier.

    With `data.path`, problems are read from rows with the columns `nums` and `target`, and split as in `dataset`.
    """
    counts = (numbers,) if isinstance(numbers, int) else tuple(numbers)
    if not counts or not all(2 <= n <= 8 for n in counts):
        raise KeelError(f"countdown numbers is {numbers!r}: it must be a count, or a list of counts, from 2 to 8")
    if not operations or set(operations) - set("+-*/"):
        raise KeelError(f"countdown operations is {operations!r}: it must be some of '+-*/'")
    if low > high:
        raise KeelError(f"countdown low is {low} and high is {high}: swap them")
    if target_high < target_low:
        raise KeelError(f"countdown target_low is {target_low} and target_high {target_high}: swap them")
    source, grader = source_of(data), CountdownGrader(format)
    if source.path is not None:
        train, held, notes = split(source, held_out, eval_path, eval_split, read=_read)
        prompted = [tuple(replace(p, prompt=grader.prompt(**p.info)) for p in side) for side in (train, held)]
        return Dataset("countdown", prompted[0], prompted[1], grader, notes)
    if (held_out, eval_path, eval_split) != (HELD_OUT_FRACTION, None, None):
        raise KeelError("countdown generates problems and holds out a tenth: held_out and eval_* need data.path")
    return Countdown(counts, low, high, target_low, target_high, operations, grader)


def _read(source: SourceOptions) -> LoadedProblems:
    """Read rows as problems. The prompt is set to the identity that decides the split."""
    assert source.path is not None
    rows = read_rows(source.path, source.split)
    missing = [name for name in COLUMNS if name not in rows.columns]
    if rows.rows and missing:
        raise KeelError(
            f"{rows.source} has no column {' and '.join(missing)}, which countdown needs: it has "
            f"{', '.join(rows.columns)}"
        )
    problems, notes = convert_rows(rows, _problem, source.on_broken)
    if not problems:
        raise KeelError(f"{rows.source} has no problems: give rows with nums and target")
    return LoadedProblems(rows.source, tuple(problems), notes)


def _problem(row: DataRow) -> Problem:
    numbers, target = (_parsed(row.values.get(name)) for name in COLUMNS)
    if not isinstance(numbers, list) or not 2 <= len(numbers) <= MAX_NUMBERS:
        raise ValueError(f"nums is {numbers!r}: it must be a list of 2 to {MAX_NUMBERS} numbers")
    if not all(type(n) is int and n >= 0 for n in (*numbers, target)):
        raise ValueError(f"nums is {numbers!r} and target {target!r}: they must be integers of 0 or more")
    return Problem(row.location, _identity(numbers, target), info={"numbers": tuple(numbers), "target": target})


def _parsed(value: Any) -> Any:
    """Parse JSON: CSV columns contain lists and numbers as text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value
