"""`countdown`: reach a target from a few integers with + − × ÷ and parentheses, each number used exactly once."""

from __future__ import annotations

import ast
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from keel.base.errors import KeelError, unknown
from keel.base.types import Problem, Reward
from keel.envs.answers import last_tag
from keel.envs.base import Task
from keel.envs.problems import held_out_problems, stream, training_problems

FORMATS = ("tags", "plain")
FORM_REWARD = 0.1
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
    """The exact value of an expression and the numbers it uses, or None for anything but + − × ÷ and parentheses.

    The text is parsed and walked over a whitelist, never evaluated: `**` and `//` are no operations of the game, and
    a division by zero, a deep nest or a giant of digits is just not an answer.
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
    raise ValueError("not an expression of the game")


@dataclass(frozen=True)
class Countdown(Task):
    """Solvable problems with `numbers` integers between `low` and `high`, made backwards from a solution.

    `format: tags` asks in words and reads the last `<answer>`; `format: plain` asks `3 5 7>22=` and reads the whole
    completion, for a character model.
    """

    numbers: tuple[int, ...]
    low: int
    high: int
    target_low: int
    target_high: int
    operations: str
    format: str
    name: str = "countdown"

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        """Training problems of one step."""
        return training_problems(self._draw, count, stream("countdown", "train", seed, step))

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        """A fixed set that no training stream ever draws from."""
        return held_out_problems(self._draw, count, stream("countdown", "held-out", seed))

    def gold(self, problem: Problem) -> str:
        """The solution that the problem was made from, in the form that was asked for."""
        if self.format == "plain":
            return str(problem.answer)
        return f"<think>{problem.answer} = {problem.info['target']}</think><answer>{problem.answer}</answer>"

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        """1 if the expression uses each number once and hits the target, 0.1 for its form alone, else 0.

        The form is the answer tag, or with `format: plain` an expression that can be read.
        """
        text = turns[-1] if turns else ""
        expression = last_tag(text) if self.format == "tags" else text
        evaluated = None if expression is None else value_of(expression)
        form = float(expression is not None if self.format == "tags" else evaluated is not None)
        hit = evaluated is not None and evaluated[0] == problem.info["target"]
        correct = float(hit and evaluated is not None and Counter(evaluated[1]) == Counter(problem.info["numbers"]))
        return Reward(
            max(correct, FORM_REWARD * form), {"correct": correct, "format": form}, parsed=evaluated is not None
        )

    def _draw(self, rng: random.Random) -> tuple[str, Problem]:
        numbers, target, solution = self._solved(rng)
        identity = f"{','.join(map(str, sorted(numbers)))}>{target}"
        listed = " ".join(map(str, numbers))
        question = _QUESTION.format(numbers=list(numbers), target=target)
        return f"countdown:{identity}", Problem(
            key=f"countdown:{','.join(map(str, numbers))}>{target}",
            prompt=f"{listed}>{target}=" if self.format == "plain" else [{"role": "user", "content": question}],
            answer=solution,
            info={"numbers": tuple(numbers), "target": target},
        )

    def _solved(self, rng: random.Random) -> tuple[list[int], int, str]:
        """Numbers, and a target in range that a random expression over them takes."""
        for _ in range(_ATTEMPTS):
            numbers = [rng.randint(self.low, self.high) for _ in range(rng.choice(self.numbers))]
            # sums below a product are bracketed; so is every right operand of - and /
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
            f"countdown found no solvable problem with targets from {self.target_low} to {self.target_high} in "
            f"{_ATTEMPTS} tries: widen target_low/target_high"
        )


_Part = tuple[str, Fraction, int]  # text, value, how tightly it binds: 0 a sum, 1 a product, 2 a number


def _join(left: _Part, right: _Part, operation: str) -> _Part:
    """Two parts joined; − is turned round so that nothing is negative, and ÷ that leaves a rest becomes ×."""
    if operation == "-" and left[1] < right[1]:
        left, right = right, left
    if operation == "/" and (right[1] == 0 or (left[1] / right[1]).denominator != 1):
        operation = "*"
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


def countdown(
    numbers: int | Sequence[int] = (3, 4),
    low: int = 1,
    high: int = 99,
    target_low: int = 1,
    target_high: int = 999,
    operations: str = "+-*/",
    format: str = "tags",
) -> Countdown:
    """The task `countdown`; fewer `numbers`, a smaller `high` and fewer `operations` make it easier."""
    counts = (numbers,) if isinstance(numbers, int) else tuple(numbers)
    if not counts or not all(isinstance(n, int) and 2 <= n <= 8 for n in counts):
        raise KeelError(f"countdown numbers is {numbers!r}: it must be a count, or a list of counts, from 2 to 8")
    if not 0 <= low <= high:
        raise KeelError(f"countdown low is {low} and high is {high}: 0 <= low <= high must hold")
    if target_high < target_low:
        raise KeelError(f"countdown target_low is {target_low} and target_high {target_high}: turn them round")
    if not operations or set(operations) - set("+-*/"):
        raise KeelError(f"countdown operations is {operations!r}: it must be some of '+-*/'")
    if format not in FORMATS:
        raise unknown("countdown format", format, FORMATS)
    return Countdown(counts, low, high, target_low, target_high, operations, format)
