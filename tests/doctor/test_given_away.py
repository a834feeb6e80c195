"""Answers that prompts give away without calling them so."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from doctor.asked import asked
from keel.base.types import Problem
from keel.doctor.probes.given_away import between_askings, given_away_findings, pointing_marks
from keel.doctor.thresholds import load_thresholds

LIMITS = load_thresholds()
Form = Callable[[int, int], str]


def found_in(form: Form) -> list[tuple[str, str]]:
    """What is found where the smaller one of two numbers is asked for in this form."""
    numbers = [((7 * n + 3) % 31, (11 * n + 5) % 29) for n in range(32)]
    prompts = [(Problem(f"{n}", form(*pair), str(min(pair))), form(*pair)) for n, pair in enumerate(numbers)]
    return [(f.code, f.severity) for f in given_away_findings(asked(), prompts, LIMITS)]


def choices(mark: str, a: int, b: int) -> list[str]:
    return [mark.format(number) if number == min(a, b) else str(number) for number in (a, b)]


@pytest.mark.parametrize(
    ("form", "severity"),
    [
        (lambda a, b: f"min {a} {b}={min(a, b)}\nmin {a} {b}=", "error"),
        (lambda a, b: f"Q: min {a} {b}?\nA: {min(a, b)}\nQ: min 1 2?\nA: 1\nQ: min {a} {b}?", "error"),
        (lambda a, b: f"min{a},{b}={min(a, b)}min{a},{b}=", "error"),
        (lambda a, b: f"min 4 6=4\nmin 9 2=2\nmin {a} {b}=", None),
        (lambda a, b: f"min {a} {b}={max(a, b)}\nmin {a} {b}=", None),
        (lambda a, b: f"{a} {b} min=\n{a} {b} min=", None),
        (lambda a, b: f"{a} or {b}, the smaller? Read again: {a} or {b}, the smaller?", None),
    ],
    ids=["itself", "among others", "joined", "other examples", "another answer", "said again", "read again"],
)
def test_a_question_with_its_answer_before_itself_gives_that_away(form: Form, severity: str | None) -> None:
    assert found_in(form) == [("prompt/answer-leak", severity)] * bool(severity)


@pytest.mark.parametrize(
    ("form", "severity"),
    [
        (lambda a, b: f"min {a} {b} [{' | '.join(choices('{}*', a, b))}]=", "warning"),
        (lambda a, b: f"Smaller: {', '.join(choices('<b>{}</b>', a, b))}?", "warning"),
        (lambda a, b: f"Smaller: {' / '.join(choices('✓ {}', a, b))}?", "warning"),
        (lambda a, b: f"Smaller: {' / '.join(choices('{} (correct)', a, b))}?", "error"),
        (lambda a, b: f"min {a} {b} [{a}* | {b}]=", None),
        (lambda a, b: f"min {a} {b} [{a}* | {b}*]=", None),
        (lambda a, b: f"Smaller: {' or '.join(choices('${}', a, b))}?", None),
        (lambda a, b: f"{'so ' * (a % 4)}{min(a, b)} < {max(a, b)}, the smaller? {'ok ' * (b % 3)}", None),
        (lambda a, b: f"{min(a, b)}* and {max(a, b)}: the one with a star?", None),
    ],
    ids=["star", "tag", "tick", "called so", "the first", "both", "amount", "between", "at one place"],
)
def test_a_mark_at_the_right_choice_gives_it_away(form: Form, severity: str | None) -> None:
    assert found_in(form) == [("prompt/answer-leak", severity)] * bool(severity)


def test_what_stands_between_two_askings_is_read() -> None:
    assert between_askings("1 + 2=3; 1 + 2=", ["4 + 2="]) == ["3; "]
    assert between_askings("1 + 2=", ["4 + 2="]) == []
    assert between_askings("2=", ["4 + 2="]) == []


def test_marks_belong_to_what_they_are_written_at() -> None:
    assert set(pointing_marks("3", "3* 5")) == {"*"}
    assert set(pointing_marks("5", "3 *5")) == {"*"}
    assert not pointing_marks("3", "3 * 5")
    assert not pointing_marks("4", "3* 5")
    assert pointing_marks("3", "3* 5")["*"].chance == 0.5
