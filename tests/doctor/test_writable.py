"""Gold answers that stop texts or limits of tokens do not let be written, and those that need not be written whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from keel.base.types import Completion, Group, Problem, Reward
from keel.doctor.probes import writable
from keel.doctor.probes.judged_golds import JudgedGold
from keel.doctor.probes.writable import kept, unwritable_findings
from keel.doctor.thresholds import load_thresholds


class Letters:
    """A token a character."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, tokens))


def setup_of(groups: list[Group] | None = None, **rollout: Any) -> Any:
    options = {"stop": (), "max_completion_length": 64, "max_turn_length": None} | rollout
    return SimpleNamespace(
        config=SimpleNamespace(rollout=SimpleNamespace(**options), reward=SimpleNamespace(aggregate="sum")),
        policy=SimpleNamespace(tokenizer=Letters()),
        groups=groups or [],
    )


def tried(row: JudgedGold, reward: float) -> Group:
    """A completion of that problem that ended by itself."""
    return Group(row.problem, (), (Completion((1,), (True,), (0.0,), (0.0,), "", "eos"),), (Reward(reward),))


def rows(*golds: str) -> list[JudgedGold]:
    return [JudgedGold(Problem(str(i), "?", gold), (gold,), 1.0, 0.0, (0.0,)) for i, gold in enumerate(golds)]


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the whole answer earns."""
    monkeypatch.setattr(
        writable, "totals_of", lambda setup, problem, episodes: [float(e == (problem.answer,)) for e in episodes]
    )


@pytest.mark.parametrize(
    ("turns", "rollout", "left"),
    [
        (("12", "34"), {}, ("12", "34")),
        (("1\n2", "34"), {"stop": ("\n",)}, ("1", "34")),
        (("12", "3456"), {"max_completion_length": 4}, ("12", "34")),
        (("123", "456"), {"max_turn_length": 2}, ("12",)),
    ],
    ids=["whole", "a stop text in a turn", "the limit of all turns", "the limit of a turn ends the episode"],
)
def test_turns_end_as_the_rollout_ends_them(turns: Any, rollout: dict[str, Any], left: Any) -> None:
    assert kept(setup_of(**rollout), turns)[0] == left


@pytest.mark.parametrize(
    ("rollout", "severity"),
    [
        ({}, None),
        ({"stop": ("\n\n", "User:")}, None),
        ({"stop": ("0",)}, "error"),
        ({"stop": ("7",)}, "warning"),
        ({"max_completion_length": 2}, "error"),
    ],
    ids=["usual", "stop texts after answers", "in all answers", "in some answers", "too short a limit"],
)
def test_what_cuts_gold_answers_is_named(rollout: dict[str, Any], severity: str | None) -> None:
    golds = rows(*(f"10{i}" for i in range(16)), *(f"107{i}" for i in range(8)))
    groups = [tried(row, 0.0) for row in (golds[:4] + golds[-1:])]
    found = [*unwritable_findings(setup_of(groups, **rollout), golds, load_thresholds())]
    assert [(f.code, f.severity) for f in found] == ([("output/truncated", severity)] if severity else [])


def test_one_long_row_and_answers_that_can_be_said_in_fewer_words_are_no_fault() -> None:
    thresholds = load_thresholds()
    odd = rows(*(f"1{i}" for i in range(30)), "a very long answer")
    assert not [*unwritable_findings(setup_of(max_completion_length=8), odd, thresholds)]
    worked = rows(*(f"a worked solution, so {i}" for i in range(12)))
    for rewards, severity in (((0.0, 0.0), "error"), ((), "warning"), ((0.0, 1.0), None), ((1.0,) * 12, None)):
        groups = [tried(row, reward) for row, reward in zip(worked, rewards, strict=False)]
        found = [*unwritable_findings(setup_of(groups, max_completion_length=8), worked, thresholds)]
        assert [finding.severity for finding in found] == [severity] * (severity is not None), rewards


def test_rewards_that_are_normalised_in_their_group_do_not_tell_what_a_completion_earns() -> None:
    worked = rows(*(f"a worked solution, so {i}" for i in range(12)))
    setup = setup_of([tried(row, 0.0) for row in worked], max_completion_length=8)
    setup.config.reward.aggregate = "normalised_sum"
    assert [f.severity for f in unwritable_findings(setup, worked, load_thresholds())] == ["warning"]


def test_what_ends_the_last_turn_is_named() -> None:
    limits = {"stop": ("\n",), "max_completion_length": 3}
    assert kept(setup_of(**limits), ("1\n2", "3456")) == (("1", "34"), False)
    assert kept(setup_of(**limits), ("12", "3\n4")) == (("12", "3"), True)
