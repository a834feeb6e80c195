"""Statistical tests: exact values, false alarms at the stated level, and power against faults."""

from __future__ import annotations

import math
from itertools import combinations
from random import Random
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest

from doctor.schooled import schooled_config
from keel.doctor.evidence import (
    LOOKS,
    TESTS,
    at_least,
    at_most,
    by_signs,
    chance_above,
    chance_of_all_but,
    level,
    log_mean_exp,
    log_odds_of_copies,
    more_groups,
    odds_of_patterns,
)
from keel.doctor.subject import Budget
from keel.doctor.thresholds import load_thresholds
from keel.rollout.sampling import SamplingParams

RUNS = 2000


def allowed(chance: float, runs: int = RUNS) -> float:
    """The largest accepted number of runs below a level: the binomial mean plus five standard deviations."""
    return runs * chance + 5 * math.sqrt(runs * chance * (1 - chance))


def test_the_levels_of_all_tests_and_looks_add_up_to_that_of_a_preflight() -> None:
    limits = load_thresholds()
    assert level(limits) * len(TESTS) * LOOKS == pytest.approx(limits["false_alarms"])


def test_a_test_of_problems_looks_at_more_of_them_where_groups_are_large() -> None:
    asked = list[tuple[int, int]]()  # problems, and completions of each

    def collect(problems: list[int], *, sampling: SamplingParams, **_: object) -> list[SimpleNamespace]:
        asked.append((len(problems), sampling.num_generations))
        return [SimpleNamespace(completions=[None] * sampling.num_generations) for _ in problems]

    setup: Any = SimpleNamespace(
        groups=[SimpleNamespace(completions=[None] * 64)] * 4,
        budget=Budget(doubt_s=60.0),
        config=schooled_config(),
        run=SimpleNamespace(task=SimpleNamespace(sample=lambda count, seed, step: [*range(count)])),
        built=SimpleNamespace(
            sampling=SamplingParams(num_generations=64), judge=SimpleNamespace(remote=False, drain=lambda: None)
        ),
        collect=collect,
    )
    assert len(more_groups(setup, "tool/failing", lambda groups: len(groups) < 200, single=True)) == 4**LOOKS
    assert {generations for _, generations in asked} == {64, 1}
    assert len(more_groups(setup, "tool/failing", lambda groups: len(groups) < 200)) == 16
    assert len(setup.budget.further) == 12  # the single ones are no other test's


def test_chances_by_hand() -> None:
    assert chance_above([1.0] * 4, 0.5) == pytest.approx(1 / 16)
    assert chance_above([1.0, 1.0, 0.0, 0.0], 0.5) == 1.0
    assert chance_above([0.9] * 10, 0.5) == pytest.approx(math.exp(-10 * (0.9 * math.log(1.8) + 0.1 * math.log(0.2))))
    assert chance_above([], 0.5) == 1.0
    assert chance_of_all_but(0, [0.5, 0.25]) == pytest.approx(0.125)
    assert chance_of_all_but(1, [0.5, 0.25]) == pytest.approx(0.125 + 0.5 * 0.25 + 0.5 * 0.75)
    assert chance_of_all_but(2, [0.5, 0.25]) == pytest.approx(1.0)


def test_intervals_hold_the_mean_and_are_those_of_clopper_and_pearson() -> None:
    from scipy.stats import beta

    values = [1.0] * 7 + [0.0] * 3
    assert at_least(values) == pytest.approx(beta.ppf(0.025, 7, 4), abs=1e-6)
    assert at_most(values) == pytest.approx(beta.ppf(0.975, 8, 3), abs=1e-6)
    assert at_least([0.4] * 20) < 0.4 < at_most([0.4] * 20)


@pytest.mark.parametrize("chance", [0.05, 0.01])
@pytest.mark.parametrize("alike", [True, False])
def test_shares_at_the_edge_are_called_no_more_often_than_the_level_says(chance: float, alike: bool) -> None:
    """Completions of a problem are either all cut or none, or independent. The unit is the problem."""
    noise, alarms = Random(1), 0
    for _ in range(RUNS):
        values = []
        for _ in range(12):
            cut = [noise.random() < 0.2] * 4 if alike else [noise.random() < 0.2 for _ in range(4)]
            values.append(fmean(cut))
        alarms += chance_above(values, 0.2) <= chance
    assert alarms <= allowed(chance)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_flat_groups_of_a_task_that_is_solved_now_and_then_are_no_alarm_at_any_size(size: int) -> None:
    noise, alarms = Random(2), 0
    flat = 0.9**size + 0.1**size
    for _ in range(RUNS):
        groups = [sum(noise.random() < 0.1 for _ in range(size)) for _ in range(24)]
        differing = sum(0 < solved < size for solved in groups)
        alarms += chance_of_all_but(differing, [flat] * len(groups)) <= 0.01
    assert alarms <= allowed(0.01)


def test_what_never_differs_is_called_on_a_hundred_completions_whatever_the_size() -> None:
    for size in (2, 4, 8, 16):
        groups = -(-128 // size)
        assert chance_of_all_but(0, [0.9**size + 0.1**size] * groups) < level(load_thresholds())


def odds(groups: list[list[int]], probabilities: list[float]) -> float:
    total = 0.0
    for group in groups:
        logp = [math.log(probabilities[c]) for c in group]
        pairs = [(group[i] == group[j], logp[i]) for i, j in combinations(range(len(group)), 2)]
        total += log_odds_of_copies(pairs, [(c == group[0], logp[0]) for c in group[1:]])
    return total


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("sure", [0.3, 0.7, 0.97])
def test_a_policy_that_repeats_itself_is_not_called_a_copier(size: int, sure: float) -> None:
    """The probability of a log evidence ratio of x is at most e^−x, however certain the policy is."""
    probabilities = [sure, *([(1 - sure) / 4] * 4)]
    noise, alarms = Random(3), 0
    for _ in range(RUNS):
        groups = [noise.choices(range(5), probabilities, k=size) for _ in range(4)]
        alarms += odds(groups, probabilities) >= -math.log(0.01)
    assert alarms <= allowed(0.01)


def test_copies_are_called_where_the_policy_would_have_varied() -> None:
    probabilities, noise = [0.2] * 5, Random(4)
    copied = [[noise.randrange(5)] * 4 for _ in range(4)]
    assert odds(copied, probabilities) > -math.log(level(load_thresholds()))
    sure = [0.99, 0.01]
    assert abs(odds([[0, 0, 0, 0]] * 4, sure)) < 0.5  # a model that is sure says nothing


def patterns(groups: list[list[int]], probabilities: list[float]) -> float:
    return log_mean_exp(odds_of_patterns([(group, [math.log(probabilities[c]) for c in group]) for group in groups]))


@pytest.mark.parametrize("sure", [0.3, 0.7, 0.97])
def test_groups_that_repeat_themselves_by_chance_show_no_pattern(sure: float) -> None:
    probabilities = [sure, *([(1 - sure) / 4] * 4)]
    noise = Random(5)
    drawn = ([noise.choices(range(5), probabilities, k=4) for _ in range(4)] for _ in range(RUNS))
    assert sum(patterns(groups, probabilities) >= -math.log(0.01) for groups in drawn) <= allowed(0.01)


@pytest.mark.parametrize("copied", [lambda a, b: [a, a, b, b], lambda a, b: [a, b, a, b], lambda a, b: [a, a, a, a]])
def test_the_same_copies_in_every_group_are_seen_at_a_policy_that_is_rather_sure(copied) -> None:
    probabilities, noise = [0.7, 0.1, 0.1, 0.1], Random(6)
    groups = [copied(*noise.choices(range(4), probabilities, k=2)) for _ in range(16)]
    assert patterns(groups, probabilities) > -math.log(level(load_thresholds()))
    assert patterns([*groups, [0, 1, 2, 3]], probabilities) < 0


def test_some_copies_are_called_where_completions_are_long() -> None:
    """Half of the groups are independent. The others contain two copies of a text with probability e^−20."""
    apart, twice = [(False, -20.0)] * 6, [(True, -20.0), *[(False, -20.0)] * 5]
    total = sum(log_odds_of_copies(pairs, [(False, -20.0)] * 3) for pairs in (apart, twice, apart, twice))
    assert total > 30


def test_signs_by_hand() -> None:
    assert by_signs([1.0, 2.0, 0.0, 3.0]) == pytest.approx(1 / 8)
    assert by_signs([1.0, -2.0, 3.0, 0.0]) == pytest.approx(1 / 2)
    assert by_signs([0.0, -1.0]) == 1.0
