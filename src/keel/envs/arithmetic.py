"""`arithmetic`: operations on numbers and digit strings. The size of the operands sets the difficulty."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, Literal

from pydantic import Field

from keel.base.errors import KeelError, unknown
from keel.base.types import Problem, Reward
from keel.envs.answers import last_number, last_tag
from keel.envs.base import Task
from keel.envs.problems import choose_held_out, held_out_problems, is_held_out, seeded_rng, training_problems

RANGE = (0, 99)
DIGITS = 4
MAX_ENUMERATED = 100_000  # largest number of problems that `held_out` enumerates
FORMAT_REWARD = 0.1  # reward of `format: answer_tag` for the tag alone


@dataclass(frozen=True)
class ArithmeticSkill:
    """One operation: its answer, its prompt in symbols and in words, and whether it is commutative."""

    answer: Callable[..., str]
    signs: str
    words: str
    operands: int = 2
    commutes: bool = False
    on_digits: bool = False  # the operand is a digit string, in which leading zeros matter


SKILLS: Mapping[str, ArithmeticSkill] = {
    "add": ArithmeticSkill(lambda a, b: str(int(a) + int(b)), "{}+{}=", "What is {} + {}?", commutes=True),
    "subtract": ArithmeticSkill(lambda a, b: str(int(a) - int(b)), "{}-{}=", "What is {} - {}?"),
    "multiply": ArithmeticSkill(lambda a, b: str(int(a) * int(b)), "{}*{}=", "What is {} × {}?", commutes=True),
    "largest": ArithmeticSkill(
        lambda *numbers: str(max(map(int, numbers))),
        "largest {} {} {}=",
        "Which is the largest of {}, {} and {}?",
        operands=3,
        commutes=True,
    ),
    "max": ArithmeticSkill(
        lambda a, b: str(max(int(a), int(b))), "max {} {}=", "Which is larger, {} or {}?", commutes=True
    ),
    "min": ArithmeticSkill(
        lambda a, b: str(min(int(a), int(b))), "min {} {}=", "Which is smaller, {} or {}?", commutes=True
    ),
    "copy": ArithmeticSkill(lambda s: s, "copy {}=", "Repeat these digits: {}.", operands=1, on_digits=True),
    "reverse": ArithmeticSkill(
        lambda s: s[::-1], "rev {}=", "Write these digits backwards: {}.", operands=1, on_digits=True
    ),
    "sort": ArithmeticSkill(
        lambda s: "".join(sorted(s)),
        "sort {}=",
        "Write these digits in ascending order: {}.",
        operands=1,
        on_digits=True,
    ),
}


@dataclass(frozen=True)
class Arithmetic(Task):
    """Problems of one skill with operands between `low` and `high` (for digit strings: of `digits` digits).

    With `style: signs` the prompt is `12+7=` and the completion must be the bare answer, for character-level models.
    With `style: words` the prompt is a chat message, and the last number of the completion counts.
    """

    skill: str
    low: int
    high: int
    digits: int
    format: Literal["plain", "answer_tag"]
    style: Literal["signs", "words"]
    held_out_identities: frozenset[str] | None = None  # set by `with_held_out`; None holds out the default share

    @property
    def name(self) -> str:
        """The skill, and its size if that is not the default."""
        if SKILLS[self.skill].on_digits:
            return f"arithmetic/{self.skill}" + (f"-{self.digits}" if self.digits != DIGITS else "")
        return f"arithmetic/{self.skill}" + (f"-{self.low}..{self.high}" if (self.low, self.high) != RANGE else "")

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        rng = seeded_rng("arithmetic", self.skill, "train", seed, step)
        return training_problems(self._draw, count, rng, self._is_held_out)

    def held_out(self, count: int, *, seed: int = 0) -> list[Problem]:
        rng = seeded_rng("arithmetic", self.skill, "held-out", seed)
        return held_out_problems(self._draw, count, rng, self._is_held_out)

    def stratum(self, problem: Problem) -> str:
        """The lengths of the operands, in ascending order."""
        return str(problem.info["lengths"])

    def gold(self, problem: Problem) -> str:
        """The answer in the requested format."""
        return f"<answer>{problem.answer}</answer>" if self.format == "answer_tag" else str(problem.answer)

    def reward(self, problem: Problem, turns: Sequence[str]) -> Reward:
        """1 for the correct answer; with `format: answer_tag`, 0.1 for a wrong answer in the tag."""
        text = turns[-1] if turns else ""
        tagged = last_tag(text) if self.format == "answer_tag" else text
        answer = None if tagged is None else self._read(tagged)
        correct = float(answer == problem.answer)
        if self.format == "plain":
            return Reward(correct, {"correct": correct}, parsed=answer is not None)
        form = float(tagged is not None)
        return Reward(
            max(correct, FORMAT_REWARD * form), {"correct": correct, "format": form}, parsed=answer is not None
        )

    def _read(self, text: str) -> str | None:
        """Parse the answer. With `style: signs` the text must be the bare answer."""
        if self.style == "signs":
            text = text.strip()
            digits = text.removeprefix("-")
            return text if digits.isascii() and digits.isdigit() else None
        if SKILLS[self.skill].on_digits:
            runs = "".join(c if c.isascii() and c.isdigit() else " " for c in text).split()
            return runs[-1] if runs else None
        return last_number(text)

    def _is_held_out(self, identity: str) -> bool:
        return is_held_out(identity) if self.held_out_identities is None else identity in self.held_out_identities

    def with_held_out(self, count: int) -> Arithmetic:
        """The same task with exactly `count` held-out problems."""
        skill, span = SKILLS[self.skill], self.high - self.low + 1
        if (10**self.digits if skill.on_digits else span**skill.operands) > MAX_ENUMERATED:
            raise KeelError(f"arithmetic held_out works for ranges of at most {MAX_ENUMERATED} problems: leave it out")
        values = map(str, range(self.low, self.high + 1))
        strings = (f"{number:0{self.digits}d}" for number in range(10**self.digits))
        every = ([s] for s in strings) if skill.on_digits else map(list, product(values, repeat=skill.operands))
        keys: dict[str, set[str]] = {}
        for operands in every:
            identity, problem = self._problem(operands)
            keys.setdefault(identity, set()).add(problem.key)
        sizes = {identity: len(problem_keys) for identity, problem_keys in keys.items()}
        return replace(self, held_out_identities=choose_held_out(sizes, count))

    def _draw(self, rng: random.Random) -> tuple[str, Problem]:
        skill = SKILLS[self.skill]
        if skill.on_digits:
            operands = ["".join(str(rng.randrange(10)) for _ in range(self.digits))]
        else:
            operands = [str(rng.randint(self.low, self.high)) for _ in range(skill.operands)]
        return self._problem(operands)

    def _problem(self, operands: list[str]) -> tuple[str, Problem]:
        """The problem of these operands and its identity, which is the same for every order of commuting operands."""
        skill = SKILLS[self.skill]
        if self.skill == "subtract" and self.low >= 0:  # without negative operands, avoid negative answers
            operands.sort(key=int, reverse=True)
        canonical = sorted(operands, key=int) if skill.commutes else operands
        identity = f"{self.skill}:{','.join(canonical)}"
        return identity, Problem(
            key=f"{self.skill}:{','.join(operands)}",
            prompt=self._ask(skill, operands),
            answer=skill.answer(*operands),
            info={"skill": self.skill, "lengths": "+".join(sorted(str(len(operand)) for operand in operands))},
        )

    def _ask(self, skill: ArithmeticSkill, operands: Sequence[str]) -> str | list[dict[str, str]]:
        if self.style == "signs":
            return skill.signs.format(*operands)
        how = "between <answer> and </answer>" if self.format == "answer_tag" else "with a number"
        return [{"role": "user", "content": f"{skill.words.format(*operands)} Answer {how}."}]


def arithmetic(
    skill: str = "add",
    low: int | None = None,
    high: int | None = None,
    digits: Annotated[int, Field(ge=1, le=18)] | None = None,
    format: Literal["plain", "answer_tag"] = "plain",
    style: Literal["signs", "words"] = "signs",
    held_out: int | None = None,
) -> Arithmetic:
    """The task `arithmetic`. `low` and `high` bound the operands (default 0 to 99), or `digits` gives their length.

    `held_out` is the number of held-out problems of a small range, such as 20 of the 81 sums of 1 to 9 (default: a
    tenth of all problems). `copy`, `reverse` and `sort` take strings of `digits` digits (default 4) and no `low` or
    `high`.
    """
    if skill not in SKILLS:
        raise unknown("arithmetic skill", skill, SKILLS)
    bounded = low is not None or high is not None
    if SKILLS[skill].on_digits and bounded:
        raise KeelError(f"arithmetic skill {skill!r} works on digit strings: give digits, not low or high")
    if digits is not None and bounded:
        raise KeelError("arithmetic takes digits or low/high, not both")
    if digits is not None:
        low, high = (10 ** (digits - 1) if digits > 1 else 0), 10**digits - 1
    lowest, highest = (RANGE[0] if low is None else low), (RANGE[1] if high is None else high)
    if highest < lowest:
        raise KeelError(f"arithmetic low is {lowest} and high is {highest}: high must not be below low")
    task = Arithmetic(skill, lowest, highest, DIGITS if digits is None else digits, format, style)
    return task if held_out is None else task.with_held_out(held_out)
