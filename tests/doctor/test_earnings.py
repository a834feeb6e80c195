"""What completions earn where problems are asked in another way, by samples that grow while they are in doubt."""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from doctor.schooled import schooled_config
from keel.base.types import Completion, Group, Problem, Reward
from keel.doctor.probes import earnings as module
from keel.doctor.probes.earnings import batches, earned_otherwise
from keel.doctor.probes.evidence import by_signs, undecided_tests
from keel.doctor.thresholds import load_thresholds

LIMITS = load_thresholds()


@dataclass(frozen=True)
class Sampling:
    num_generations: int = 4
    max_completion_length: int = 6


def groups_of(problems: Any, rate: float, size: int, dice: random.Random) -> list[Group]:
    completion = Completion((1,), (True,), (0.0,), (0.0,), "", "eos")
    return [
        Group(p, (1,), (completion,) * size, tuple(Reward(float(dice.random() < rate)) for _ in range(size)))
        for p in problems
    ]


def setup_of(monkeypatch: pytest.MonkeyPatch, own: float, other: float, *, remote: bool = False, seed: int = 0) -> Any:
    """A run whose completions earn `own`, and `other` where they are asked otherwise; `sizes` are the groups of it."""
    dice, sizes = random.Random(seed), list[tuple[str, int]]()

    def draw(count: int, *, seed: int, step: int) -> list[Problem]:
        return [Problem(f"{step}/{i}", "?") for i in range(count)]

    @dataclass(frozen=True)
    class Collector:
        sampling: Sampling
        release: bool = False

        def collect(self, problems: Any, *, step: int) -> list[Group]:
            size = self.sampling.num_generations
            sizes.extend((str(problem.prompt), size) for problem in problems)
            return groups_of(problems, other, size, dice)

    monkeypatch.setattr(module, "build_collector", lambda *parts: Collector(Sampling()))
    judge = SimpleNamespace(remote=remote, drain=list)
    setup = SimpleNamespace(
        config=schooled_config(),
        failures=(),
        shared={},
        doubt_s=60.0,
        groups=groups_of(draw(4, seed=0, step=0), own, 2, dice),
        policy=SimpleNamespace(tokenizer=None),
        run=SimpleNamespace(engine=None, world=None, task=SimpleNamespace(sample=draw)),
        built=SimpleNamespace(judge=judge, sampling=Sampling()),
        collect=lambda problems, **options: groups_of(problems, own, 4, dice),
        sizes=sizes,
    )
    setup.whole = setup
    return setup


@pytest.mark.parametrize(("own", "other", "sure"), [(0.0, 0.6, True), (0.2, 0.7, True), (0.6, 0.1, False)])
def test_what_earns_more_is_told(monkeypatch: pytest.MonkeyPatch, own: float, other: float, sure: bool) -> None:
    setup = setup_of(monkeypatch, own, other)
    earned = earned_otherwise(setup, setup.config, LIMITS, lambda problem: Problem(problem.key, "changed"))
    assert earned is not None
    assert earned.sure is sure
    assert (earned.other > earned.own) == (other > own)
    assert {prompt for prompt, _ in setup.sizes} == {"changed"}
    assert [size for _, size in setup.sizes[:5]] == [2, 2, 2, 2, 4][: len(setup.sizes)]  # as many as on the own side


def test_what_earns_the_same_is_never_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    higher = 0
    for seed in range(40):
        setup = setup_of(monkeypatch, 0.4, 0.4, seed=seed)
        earned = earned_otherwise(setup, setup.config, LIMITS)
        assert earned is not None
        assert not earned.sure
        higher += earned.other > earned.own
        assert bool(undecided_tests(setup)) == (earned.other > earned.own)
    assert higher  # where a mean that is higher would have been taken for evidence


def test_nothing_is_asked_of_a_judge_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = setup_of(monkeypatch, 0.0, 1.0, remote=True)
    assert earned_otherwise(setup, setup.config, LIMITS) is None
    assert setup.sizes == []


def test_signs_by_hand() -> None:
    assert by_signs([1.0, 2.0, 0.0, 3.0]) == pytest.approx(1 / 8)
    assert by_signs([1.0, -2.0, 3.0, 0.0]) == pytest.approx(1 / 2)
    assert by_signs([0.0, -1.0]) == 1.0


def test_no_problem_stands_twice_in_a_batch_nor_groups_of_two_sizes() -> None:
    dice = random.Random(0)
    groups = [
        g
        for key, size in zip("abacbb", (2, 2, 2, 2, 4, 4), strict=True)
        for g in groups_of([Problem(key, "?")], 0.5, size, dice)
    ]
    assert ["".join(group.problem.key for group in batch) for batch in batches(groups)] == ["ab", "ac", "b", "b"]
    assert [*batches([])] == []
