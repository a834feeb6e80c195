"""What a result may depend on, played on environments without a model; and questions that are no texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from doctor.test_episodes import playing
from keel.base.types import Problem
from keel.doctor.calls import PROPERTIES, _unrelated
from keel.doctor.probes.written_out import written_out_findings
from keel.doctor.replayed import Replayed, Wrong
from keel.doctor.replies import contents
from keel.envs import Episode
from keel.envs.episode import step_sync

LETTERS = "abcdefgh"
WIDE = {ord(str(digit)): chr(0xFF10 + digit) for digit in range(10)}  # digits that the tokenizer does not know


class Shelf(Episode):
    """A tool that says how often a letter was asked for, by `answer(problem, texts of the episode)`."""

    def __init__(self, problem: Problem, answer: Callable[[Problem, Sequence[str]], str]) -> None:
        self.problem, self.answer, self.texts = problem, answer, list[str]()

    def step(self, text: str) -> str:
        self.texts.append(text)
        return self.answer(self.problem, self.texts)


def replay(answer: Callable[[Problem, Sequence[str]], str]) -> tuple[Any, list[Replayed]]:
    """Eight calls of four problems in turn, each made twice, as `replayed` makes them."""
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


def of_the_problem_before() -> Callable[[Problem, Sequence[str]], str]:
    """What another problem asked last, whatever this one asks."""
    met: list[Problem] = []

    def answer(problem: Problem, texts: Sequence[str]) -> str:
        met.append(problem)
        return str(next((p for p in reversed(met) if p.key != problem.key), problem).prompt)

    return answer


def with_a_list_of_its_own() -> Callable[[Problem, Sequence[str]], str]:
    """Results by problem and call that are kept, which nobody can tell."""
    kept: dict[tuple[str, str], str] = {}
    return lambda problem, texts: kept.setdefault((problem.key, texts[-1]), in_their_order(problem, texts))


def after(calls: int, then: Callable[[Problem, Sequence[str]], str]) -> Callable[[Problem, Sequence[str]], str]:
    """What each call returns, and something else after so many of them."""
    made = iter(range(1000))
    return lambda problem, texts: (in_their_order if next(made) < calls else then)(problem, texts)


def judged(answer: Callable[[Problem, Sequence[str]], str]) -> list[Wrong]:
    setup, rows = replay(answer)
    sure = [row for row in PROPERTIES if row.breaks is not _unrelated]
    return [wrong for row in sure if (wrong := row.judge(setup, rows)) is not None]


FAULTS = {
    "the turn itself": (lambda problem, texts: f"<result>{texts[-1]}</result>\n", "its own arguments"),
    "what another problem asked": (of_the_problem_before(), "what another one asked decides"),
    "letters without a token": (
        lambda problem, texts: str(LETTERS.index(texts[-1][-1])).translate(WIDE),
        "no tokens",
    ),
    "bytes": (lambda problem, texts: str(found(texts[-1]).encode()), "bytes and not a text"),
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


@pytest.mark.parametrize(
    ("form", "named"),
    [
        ("What is {0} + {0}?", None),
        ("[{{'role': 'user', 'content': 'What is {0}?'}}]", "messages"),
        ("b'What is {0}?'", "bytes"),
        ("W\x00h\x00a\x00t\x00 \x00i\x00s\x00 \x00{0}", "another encoding"),
        ("Combien coÃ»te {0}?", "another encoding"),
        ("Combien coûte l'été {0}? São Paulo, naïve, Zürich – 北京", None),
        ("What is it if {0} &lt; {0}1?", "HTML"),
        ("One line.\\nWhat is {0}?", "inside a string"),
        ("print('{0}\\n')\nWhat is printed?", None),
        ("[{0}, {0}] is sorted to?", None),
        ("What is $\\theta$ if $\\tan\\theta \\neq {0}$?", None),
        ("{{'role': {0}}} has which keys?", None),
    ],
)
def test_questions_that_are_no_texts_are_named(form: str, named: str | None) -> None:
    findings = [*written_out_findings([Problem(f"{n}", form.format(n)) for n in range(10)])]
    assert [finding.code for finding in findings] == ([] if named is None else ["prompt/format"])
    assert all(named in finding.evidence for finding in findings if named is not None)


def test_a_few_questions_about_markup_are_none() -> None:
    forms = ["What does &lt; stand for, number {}?", "What is {} + 1?"]
    assert [*written_out_findings([Problem(f"{n}", forms[n % 2].format(n)) for n in range(10)])] == []
