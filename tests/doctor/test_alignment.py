"""Answers against prompts: a shift is seen, and likelihoods with heavy tails raise no alarm beyond its level."""

from __future__ import annotations

import math

import pytest
import torch

from keel.doctor.pairing import SettingChoice, association, deviations_of, far_rows, rearranged, shifts

AFTER = [*range(1, 16), None]


def test_one_likelihood_that_dwarfs_the_others_is_one_rank():
    """Student's t with two degrees of freedom: a normal tail of its raw values would be far too short."""
    draw = torch.Generator().manual_seed(0)
    alarms = 0
    for _ in range(1500):
        noise, scale = (torch.randn(2, 16, 16, generator=draw, dtype=torch.float64) for _ in range(2))
        heavy = noise[0] / (scale.square().sum(0) / 2).sqrt()
        alarms += association(heavy, AFTER[:16]) > deviations_of(0.01)
    assert alarms <= 32  # 15 of 1500 by the level; over 32 once in 20,000


def test_a_shift_of_few_rows_is_beyond_the_level_of_a_preflight():
    draw = torch.Generator().manual_seed(1)
    likelihood = torch.randn(12, 12, generator=draw, dtype=torch.float64) + 6 * torch.eye(12).roll(1, dims=1)
    assert association(likelihood, [*range(1, 12), 0]) > deviations_of(1e-3 / 40 / 14)
    assert association(likelihood, range(12)) < deviations_of(0.05)


@pytest.mark.parametrize("paired", [16, 12])
def test_the_variance_of_a_random_pairing_is_exact(paired: int) -> None:
    """Of all pairs, or of some: the mean square over random permutations is 1."""
    draw = torch.Generator().manual_seed(2)
    likelihood = torch.randn(16, 16, generator=draw, dtype=torch.float64)
    squares = [
        association(likelihood, [*torch.randperm(16, generator=draw).tolist()[:paired], *[None] * (16 - paired)]) ** 2
        for _ in range(600)
    ]
    assert sum(squares) / len(squares) == pytest.approx(1, abs=0.15)


REARRANGED = {
    "the one 2 after theirs in the data": lambda n, total: n + 2,
    "the one of the opposite order of the data": lambda n, total: 2 + total - 1 + 2 - n,
    "the one half of the data away": lambda n, total: 2 + (n - 2 + total // 2) % total,
}


@pytest.mark.parametrize("total", [40, 100, 500, 501])
@pytest.mark.parametrize("which", REARRANGED)
def test_rows_hold_the_counterparts_of_each_rearrangement(which: str, total: int) -> None:
    """Numbers begin at 2, and every tenth row is held out."""
    rows = [n for n in range(2, 2 + total) if n % 10]
    chosen = far_rows(rows)
    likelihood = torch.randn(len(chosen), len(chosen), generator=torch.Generator().manual_seed(3)).double()
    for i, n in enumerate(chosen):
        target = REARRANGED[which](n, total)
        if target in chosen:
            likelihood[i, chosen.index(target)] += 6
    scores = {name: association(likelihood, p) for name, p in rearranged(chosen, min(rows), max(rows)).items()}
    best = max(scores, key=scores.__getitem__)
    assert best.startswith(which.partition(" theirs")[0])
    assert scores[best] > deviations_of(1e-3 / 52 / 4 / len(scores)) or total == 40
    assert len(set(chosen)) == len(chosen) <= 72


def test_a_shift_is_counted_by_the_rows_that_are_there() -> None:
    partners = shifts([4, 5, 7, 8], "in the data")
    assert partners["the one 1 after theirs in the data"] == [1, None, 3, None]
    assert partners["the one 3 before theirs in the data"] == [None, None, 0, 1]


def test_what_a_model_says_of_the_answers() -> None:
    likelihood = torch.full((3, 3), 0.1, dtype=torch.float64).fill_diagonal_(0.8).log()
    sure, usual = SettingChoice(likelihood, torch.arange(3)), 1 / 3
    assert sure.support.tolist() == pytest.approx([math.log(0.8 / usual)] * 3)
    assert sure.mass == pytest.approx(1.0)
    assert sure.opinion == pytest.approx(0.8 * math.log(0.8 / usual) + 0.2 * math.log(0.1 / usual))
    others = SettingChoice(likelihood, torch.tensor([1, 2, 0]))
    assert others.support.tolist() == pytest.approx([math.log(0.1 / usual)] * 3)
    blind = SettingChoice(torch.full((3, 3), 0.1, dtype=torch.float64).log(), torch.arange(3))
    assert blind.support.tolist() == pytest.approx([0.0] * 3)
    assert (blind.mass, blind.opinion) == (pytest.approx(0.3), pytest.approx(0.0))
