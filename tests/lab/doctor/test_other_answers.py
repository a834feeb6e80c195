"""Answers that a model is sure against, or that repeat those of other rows: found on a model of known choices."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from keel.base.thresholds import load_thresholds
from keel.base.types import Problem
from keel.lab.doctor.probes.evidence import level
from keel.lab.doctor.probes.other_answers import other_answer_findings, repeats_after
from keel.models.tiny import CHAT_TEMPLATE
from lab.doctor.test_frames import Triples, setup_of, triple

LIMITS = load_thresholds()
SHUFFLED = Random(0).sample(range(100), 100)


class Rows(Triples):
    """Row after row of a file: its questions, and the answers that stand beside them."""

    def __init__(self, answer: Callable[[int], str], asked: Callable[[int], int]) -> None:
        self.answer, self.asked = answer, asked

    def sample(self, count: int, *, seed: int, step: int) -> list[Problem]:
        return [
            Problem(f"file/{n}", [{"role": "user", "content": f"{n} of {self.asked(n)} ="}], self.answer(n))
            for n in range(min(count, 100))
        ]


class Softer(nn.Module):
    """A model with its logits divided: less sure of the same choice."""

    def __init__(self, inner: nn.Module, by: float) -> None:
        super().__init__()
        self.inner, self.by = inner, by

    def forward(self, **inputs: Any) -> Any:
        return SimpleNamespace(logits=self.inner(**inputs).logits / self.by)


def row(n: int) -> int:
    return SHUFFLED[n]


def right(n: int) -> str:
    return triple(row(n) % 10)


def findings_of(answer: Callable[[int], str], asked: Callable[[int], int] = row, softer: float = 1.0) -> list[str]:
    setup = setup_of(CHAT_TEMPLATE)
    setup.run.task = Rows(answer, asked)
    setup.config = setup.config.model_copy(update={"data": setup.config.data.model_copy(update={"path": "rows.jsonl"})})
    setup.policy.model = Softer(setup.policy.model, softer)
    found = [*other_answer_findings(setup, LIMITS)]
    assert all((finding.code, finding.severity) == ("data/misaligned", "warning") for finding in found)
    return [finding.evidence for finding in found]


DENIED: dict[str, Callable[[int], str]] = {
    "another task": lambda n: str((int(right(n)) + 1) % 10),
    "another column": lambda n: str((int(right(n)) + 1 + n % 3) % 10),
    "another row": lambda n: right((n + 17) % 100),
}


@pytest.mark.parametrize("answer", DENIED.values(), ids=DENIED)
def test_answers_that_a_model_is_sure_against_are_named(answer: Callable[[int], str]) -> None:
    (evidence,) = findings_of(answer)
    assert "chooses one of the 10 gold answers with 100 %" in evidence


HEALTHY: dict[str, Callable[[int], str]] = {
    "right": right,
    "two in five are right": lambda n: right(n) if n % 5 < 2 else str(n % 10),
    "as often right as a guess among four": lambda n: right(n) if n % 4 == 0 else str((int(right(n)) + n % 4) % 10),
}


@pytest.mark.parametrize("answer", HEALTHY.values(), ids=HEALTHY)
def test_a_model_that_is_right_at_times_denies_nothing(answer: Callable[[int], str]) -> None:
    assert findings_of(answer) == []


@pytest.mark.parametrize("answer", DENIED.values(), ids=DENIED)
def test_a_model_that_is_not_sure_denies_nothing(answer: Callable[[int], str]) -> None:
    assert findings_of(answer, softer=8.0) == []


@pytest.mark.parametrize("period", [20, 25, 50])
def test_answers_that_begin_anew_are_named_where_questions_go_on(period: int) -> None:
    (evidence,) = findings_of(lambda n: right(n % period))
    assert f"begin anew after {period} rows" in evidence or "chooses one of" in evidence


@pytest.mark.parametrize("period", [12, 25, 50])
def test_questions_in_other_words_have_the_same_answers_again(period: int) -> None:
    assert findings_of(lambda n: right(n % period), lambda n: row(n % period)) == []


def test_a_period_is_told_from_luck() -> None:
    random, chance = Random(1), level(LIMITS)
    drawn = {n: random.choice("ABCD") for n in range(200)}
    assert repeats_after(drawn, chance) is None
    assert repeats_after(dict.fromkeys(range(200), "A"), chance) is None
    assert repeats_after({n: "yes" if n % 40 else "no" for n in range(200)}, chance) is None  # nearly all alike
    assert repeats_after({n: drawn[n % 60] for n in range(200) if n % 10}, chance) == 60  # a tenth is held out
    assert repeats_after({}, chance) is None
