"""Gold answers that are a field of their question are told from those that are chosen by what it asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from keel.base.types import Problem
from keel.doctor.probes import columns
from keel.doctor.probes.columns import column_findings, place_of_answers
from keel.doctor.probes.gold_likelihood import Gold
from keel.doctor.thresholds import load_thresholds
from keel.models.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
PAIRS = sorted(
    [(a, b) for a in range(10) for b in range(10) if a != b], key=lambda pair: (7 * pair[0] + 3 * pair[1]) % 11
)


def encode(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def setup_of(answer: Callable[[int, int], int]) -> Any:
    problems = [Problem(f"{a},{b}", f"max {a} {b}=", answer=str(answer(a, b))) for a, b in PAIRS]
    task = SimpleNamespace(
        prompts_only=False,
        multi_turn=False,
        sample=lambda count, *, seed, step: problems[:count],
        gold_turns=lambda problem: [problem.answer],
    )
    return SimpleNamespace(
        run=SimpleNamespace(task=task),
        policy=SimpleNamespace(tokenizer=TOKENIZER, context_length=None),
        config=SimpleNamespace(run=SimpleNamespace(seed=0)),
    )


def of_the_larger(sure: float) -> Callable[[Any, Sequence[Gold]], list[torch.Tensor]]:
    """A model that has learned which number is the larger one, and how sure it is."""

    def score(setup: Any, rows: Sequence[Gold]) -> list[torch.Tensor]:
        largest = [max(map(int, TOKENIZER.decode(row.prompt).removeprefix("max ").rstrip("=").split())) for row in rows]
        right = [row.answer == encode(str(value)) for row, value in zip(rows, largest, strict=True)]
        return [torch.tensor([-0.1 if is_right else -0.1 - sure]) for is_right in right]

    return score


@pytest.mark.parametrize(
    ("answer", "sure", "named"),
    [
        (lambda a, b: b, 5.0, True),
        (lambda a, b: a, 5.0, True),
        (max, 5.0, False),
        (lambda a, b: b, 0.5, False),  # a model that does not know either
    ],
    ids=["second field", "first field", "the larger one", "an unsure model"],
)
def test_a_field_of_the_question_is_no_answer(
    answer: Callable[[int, int], int], sure: float, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "answer_tokens", of_the_larger(sure))
    monkeypatch.setattr(columns, "rendered", lambda setup, problems: [encode(str(p.prompt)) for p in problems])
    found = [*column_findings(setup_of(answer), load_thresholds())]
    assert [(f.code, f.severity) for f in found] == [("data/misaligned", "warning")] * named


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([("max 1 2", "2"), ("max 4 3", "3"), ("max 5 6", "6")], (2, [1])),
        ([("max 1 2", "2"), ("max 4 3", "4"), ("max 5 6", "6")], None),
        ([("copy 1", "1"), ("copy 2", "2"), ("copy 3", "3")], None),  # nothing else stands there
        ([("max 1 2", "2"), ("max 4 2", "2"), ("max 5 2", "2")], None),
        ([("max 1 2", "2"), ("max of 4 3", "3"), ("max 5 6", "6")], None),
        ([], None),
    ],
)
def test_the_place_of_answers(rows: list[tuple[str, str]], found: tuple[int, list[int]] | None) -> None:
    assert place_of_answers([(tuple(question.split()), answer) for question, answer in rows]) == found
