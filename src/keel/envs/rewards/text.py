"""Rewards computed in this process or in the sandbox: answers, tags, patterns, ladders, lengths, programs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Annotated, Any

from pydantic import Field

from keel.base.errors import KeelError
from keel.base.parts import Range
from keel.base.types import Problem, Reward
from keel.envs.answers import last_number, last_tag, math_equal, plain_number
from keel.envs.programs import NO_SYNTAX, check_tests, program_of, run_tests
from keel.envs.rewards.part import as_reward
from keel.envs.sandbox import SandboxLimits

Judged = Callable[[Problem, Sequence[str]], Any]  # an inner reward of `ladder` or `cosine`
FULL = 1.0 - 1e-9  # an inner reward of at least this counts as correct
LONGEST_DETAILS = 20_000  # characters of a program and its tests in a reward's details
PATTERN = "a valid regular expression"
_TAG = re.compile(r"</?[A-Za-z_]\w*>")
_RUNGS = ("pattern", "tag", "reward")


def is_pattern(value: Any) -> bool:
    """Whether a value is a regular expression; also None, the default of optional patterns."""
    try:
        return value is None or re.compile(value) is not None
    except (re.error, TypeError):
        return False


def _are_tags(value: Any) -> bool:
    some = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    return some and all(isinstance(tag, str) and re.fullmatch(r"[^<>/\s]+", tag) for tag in value)


Pattern = Annotated[str, Range(PATTERN, is_pattern)]
Tags = Annotated[Sequence[str], Range("a list of names such as [think, answer]", _are_tags)]


def none(problem: Problem, text: str) -> float:
    """0 for every completion, for training on the KL alone (distillation)."""
    return 0.0


def exact(problem: Problem, text: str) -> float:
    """1 if the text equals the answer, ignoring surrounding whitespace."""
    return float(text.strip() == str(problem.answer).strip())


def numeric(problem: Problem, text: str, tag: str | None = None) -> Reward:
    """1 if the last number of the text (or of its last `<tag>`) equals the last number of the answer."""
    within = last_tag(text, tag) if tag else text
    number = None if within is None else last_number(within)
    correct = float(number is not None and number == last_number(str(problem.answer)))
    return Reward(correct, {}, parsed=number is not None)


def format(
    problem: Problem,
    text: str,
    pattern: Annotated[str | None, Range(PATTERN, is_pattern)] = None,
    tags: Tags = ("answer",),
) -> float:
    """1 if the whole text matches `pattern`. Without one, the fraction of `tags` that occur once and are closed."""
    if pattern is not None:
        return float(re.fullmatch(pattern, text, re.DOTALL) is not None)
    once = [text.count(f"<{tag}>") == 1 == text.count(f"</{tag}>") and last_tag(text, tag) is not None for tag in tags]
    return fmean(once) if once else 0.0


def tag_count(problem: Problem, text: str, tags: Tags = ("think", "answer")) -> float:
    """The fraction of opening and closing tags that occur exactly once (open-r1): 4 × 0.25 for think and answer."""
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    return fmean(text.count(mark) == 1 for mark in marks)


def regex(
    problem: Problem, text: str, pattern: Pattern, full: bool = False, group: int | str | None = None
) -> float | Reward:
    """1 if the pattern occurs (with `full`: matches the whole text); with `group`, if that group equals the answer.

    The last match counts. Group and answer are compared as text without surrounding whitespace, or as numbers.
    """
    matches = [re.fullmatch(pattern, text, re.DOTALL)] if full else list(re.finditer(pattern, text, re.DOTALL))
    match = matches[-1] if matches else None
    if group is None:
        return float(match is not None)
    value = match.group(group) if match else None
    return Reward(float(value is not None and _agree(value, str(problem.answer))), {}, parsed=value is not None)


def ladder(
    problem: Problem,
    text: str,
    turns: Sequence[str],
    rungs: Annotated[Sequence[Mapping[str, Any]], Field(min_length=1)],
) -> Reward:
    """The sum of the values of the rungs in order, up to the first rung that is not reached.

    A rung is `{pattern}` (occurs in the text), `{tag}` (occurs once and is closed) or `{reward}` (an inner reward of at
    least `at_least`, default 1), each with its `value`.
    """
    total, reached = 0.0, 0
    for rung in rungs:
        if not _reached(rung, problem, text, turns):
            break
        total, reached = total + float(rung["value"]), reached + 1
    return Reward(total, {"rungs": float(reached)})


def length(problem: Problem, text: str, target: int = 0, scale: Annotated[float, Field(gt=0)] = 100.0) -> float:
    """A length penalty: 0 up to `target` characters, then −1 per `scale` further characters, but at least −1."""
    return -min(1.0, max(0, len(text) - target) / scale)


def cosine(
    problem: Problem,
    text: str,
    turns: Sequence[str],
    of: Judged,
    max_length: Annotated[int, Field(gt=0)] = 1000,
    correct_short: float = 1.0,
    correct_long: float = 0.5,
    wrong_short: float = -1.0,
    wrong_long: float = -0.5,
    exceeded: float | None = None,
) -> Reward:
    """The cosine length reward, arXiv 2502.03373.

    `long + ½(short − long)(1 + cos(π·n / max_length))`, where n is the number of characters of the last turn, at most
    `max_length`, and short and long are the values for a correct or a wrong text. A text of `max_length` or more earns
    `exceeded` if that is set. A text is correct if the inner reward `of` is 1.
    """
    correct = as_reward(of(problem, turns)).total >= FULL
    if exceeded is not None and len(text) >= max_length:
        return Reward(exceeded, {"correct": float(correct)})
    short, long = (correct_short, correct_long) if correct else (wrong_short, wrong_long)
    share = min(len(text), max_length) / max_length
    return Reward(long + 0.5 * (short - long) * (1.0 + math.cos(math.pi * share)), {"correct": float(correct)})


def _agree(text: str, answer: str) -> bool:
    number = plain_number(text)
    return text.strip() == answer.strip() or (number is not None and number == plain_number(answer))


def _reached(rung: Mapping[str, Any], problem: Problem, text: str, turns: Sequence[str]) -> bool:
    if "pattern" in rung:
        return re.search(rung["pattern"], text, re.DOTALL) is not None
    if "tag" in rung:
        return format(problem, text, tags=(rung["tag"],)) == 1.0
    return as_reward(rung["reward"](problem, turns)).total >= float(rung.get("at_least", FULL))


def math_reward(problem: Problem, text: str, tag: str | None = None) -> Reward:
    """1 if the last expression of the text (or its last `<tag>`) equals the answer: ½, 0.5 and \\frac{1}{2} match."""
    within = last_tag(text, tag) if tag else _TAG.sub("\n", text)
    equal = None if within is None else math_equal(str(problem.answer), within)
    return Reward(float(bool(equal)), {}, parsed=equal is not None)


def code(
    problem: Problem,
    text: str,
    partial: Annotated[float, Field(ge=0, lt=1)] = 0.0,
    sandbox: str = "auto",
    timeout_s: float = 4.0,
    memory_mb: int = 256,
    disk_mb: int = 16,
    output_kb: int = 256,
    workers: int = 0,
) -> Reward:
    """1 if the program passes every test of the column `tests`; else `partial` × the fraction that it passes.

    The parts are `correct`, `passed` (the fraction), and one for each name of a test.
    """
    return program_reward(
        problem, text, SandboxLimits(sandbox, timeout_s, memory_mb, disk_mb, output_kb, workers), partial
    )


def program_reward(problem: Problem, text: str, limits: SandboxLimits, partial: float) -> Reward:
    """The reward of a completion's program."""
    try:
        tests = check_tests(problem.info.get("tests"))
    except (ValueError, TypeError) as error:
        raise KeelError(f"{problem.key}: {error}") from None
    program = program_of(text)
    if not program.strip():
        return Reward(0.0, {"correct": 0.0, "passed": 0.0}, parsed=False, details="no program")
    outcomes = run_tests(program, tests, limits)
    passed = fmean(outcome.passed for outcome in outcomes)
    correct = float(passed == 1.0)
    named = {outcome.name: [o.passed for o in outcomes if o.name == outcome.name] for outcome in outcomes}
    parts = {"correct": correct, "passed": passed, **{name: fmean(rows) for name, rows in named.items() if name}}
    parsed = any(outcome.kind not in NO_SYNTAX for outcome in outcomes)
    lines = list(map(str, outcomes))
    if not parsed and len(lines) > 1:
        lines[1:] = [f"✗ {len(lines) - 1} more with this result"]
    written = [] if program == text else ["```python", program.strip("\n"), "```"]
    shown = "\n".join([*written, *lines])
    shown = shown if len(shown) <= LONGEST_DETAILS else f"{shown[:LONGEST_DETAILS]}…"
    # A program's text must not contain control codes for the terminal, and must be valid in every encoding.
    readable = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in shown)
    return Reward(max(correct, partial * passed), parts, parsed, details=readable)


def check_regex(params: Mapping[str, Any]) -> None:
    """Refuse a group that the pattern does not have."""
    compiled, group = re.compile(params["pattern"]), params.get("group")
    known = compiled.groupindex if isinstance(group, str) else range(compiled.groups + 1)
    if group is not None and group not in known:
        raise KeelError(f"reward regex: the pattern {params['pattern']!r} has no group {group!r}")


def check_ladder(params: Mapping[str, Any]) -> None:
    """Refuse a rung without a value, or with none or several of pattern, tag and reward."""
    for number, rung in enumerate(params["rungs"]):
        where = f"reward ladder: rungs[{number}]"
        if sum(kind in rung for kind in _RUNGS) != 1 or "value" not in rung:
            raise KeelError(f"{where} is {rung!r}, it must have a value and one of {', '.join(_RUNGS)}")
        for key in rung:
            if key not in (*_RUNGS, "value", *(("at_least",) if "reward" in rung else ())):
                raise KeelError(f"{where} has {key!r}: it takes value, one of {', '.join(_RUNGS)}, at_least")
        for key in ("value", "at_least"):
            if key in rung and not _is_number(rung[key]):
                raise KeelError(f"{where}.{key} is {rung[key]!r}, it must be a number")
        if "pattern" in rung and not is_pattern(rung["pattern"]):
            raise KeelError(f"{where}.pattern is {rung['pattern']!r}: expected {PATTERN}")
        if "tag" in rung and not _are_tags([rung["tag"]]):
            raise KeelError(f"{where}.tag is {rung['tag']!r}: expected a name such as answer")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
