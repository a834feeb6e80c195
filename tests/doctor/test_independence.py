"""What a tool result may depend on, tested on environments without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from doctor.test_episodes import playing
from keel.base.types import Problem
from keel.doctor.calls import PROPERTIES, _unrelated
from keel.doctor.replies import Replayed, Wrong, contents
from keel.envs import Episode
from keel.envs.episode import step_sync

LETTERS = "abcdefgh"
WIDE = {ord(str(digit)): chr(0xFF10 + digit) for digit in range(10)}  # digits that the tokenizer does not know


class Shelf(Episode):
    """A tool that counts requests for a letter, with results from `answer(problem, texts of the episode)`."""

    def __init__(self, problem: Problem, answer: Callable[[Problem, Sequence[str]], str]) -> None:
        self.problem, self.answer, self.texts = problem, answer, list[str]()

    def step(self, text: str) -> str:
        self.texts.append(text)
        return self.answer(self.problem, self.texts)


def replay(answer: Callable[[Problem, Sequence[str]], str]) -> tuple[Any, list[Replayed]]:
    """Eight calls of four problems in turn, each made twice, as in `replayed`."""
    setup = playing(lambda problem: Shelf(problem, answer))
    rows = []
    for number, letter in enumerate(LETTERS):
        problem = Problem(f"{number % 4}", f"Where is {LETTERS[number % 4]}?")
        heard = [contents(step_sync(setup.run.task.start(problem), letter)) for _ in range(2)]
        rows.append(Replayed(problem, letter, heard[0], heard[0], heard[1], (), asked=letter, of_tool=False))
    return setup, rows


def found(letter: str) -> str:
    return f"Result: {letter} stands at {3 * LETTERS.index(letter[-1]) + 1}."


def in_their_order(problem: Problem, texts: Sequence[str]) -> str:
    return "\n".join(found(letter) for letter in texts[-1].split())


def with_a_list_of_its_own() -> Callable[[Problem, Sequence[str]], str]:
    """Results by problem and call from a fixed table, which is valid."""
    kept: dict[tuple[str, str], str] = {}
    return lambda problem, texts: kept.setdefault((problem.key, texts[-1]), in_their_order(problem, texts))


def after(calls: int, then: Callable[[Problem, Sequence[str]], str]) -> Callable[[Problem, Sequence[str]], str]:
    """The result of each call, with a different one after some number of calls."""
    made = iter(range(1000))
    return lambda problem, texts: (in_their_order if next(made) < calls else then)(problem, texts)


def judged(answer: Callable[[Problem, Sequence[str]], str]) -> list[Wrong]:
    setup, rows = replay(answer)
    sure = [row for row in PROPERTIES if row.breaks is not _unrelated]
    return [wrong for row in sure if (wrong := row.judge(setup, rows)) is not None]


FAULTS = {
    "the turn itself": (lambda problem, texts: f"<result>{texts[-1]}</result>\n", "its arguments"),
    "letters without a token": (
        lambda problem, texts: str(LETTERS.index(texts[-1][-1])).translate(WIDE),
        "no tokens",
    ),
}
SOUND = {
    "each its own": in_their_order,
    "kept by problem and call": with_a_list_of_its_own(),
    "the same to all": lambda problem, texts: "Are you sure?",
    "the problem again": lambda problem, texts: str(problem.prompt),
    "how many were asked for so far": lambda problem, texts: f"Result: {len(texts)} asked for.",
    "a limit of calls": after(16, lambda problem, texts: "429 Too Many Requests"),
    "a limit that is said in other words": after(16, lambda problem, texts: "Slow down, please."),
    "an index that is made anew": after(16, lambda problem, texts: f"Result: {texts[-1]} stands at 99."),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_result_that_depends_on_something_else_is_named(fault: str) -> None:
    answer, cause = FAULTS[fault]
    (wrong,) = judged(answer)
    assert cause in wrong.cause


@pytest.mark.parametrize("sound", SOUND)
def test_sound_tools_are_not_accused(sound: str) -> None:
    assert judged(SOUND[sound]) == []


def test_dice_and_counters_are_not_shared_state() -> None:
    thrown = iter(range(1000))
    assert judged(lambda problem, texts: f"Result: {next(thrown)}") == []
