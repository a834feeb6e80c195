"""Shifted answers are found, and heavy-tailed likelihoods raise no more false alarms than the level permits."""

from __future__ import annotations

import math

import pytest
import torch

from keel.doctor.pairing import SettingChoice, association, deviations_of, shifts

AFTER = [*range(1, 16), None]


def test_one_likelihood_that_dwarfs_the_others_is_one_rank():
    """For Student's t with two degrees of freedom, a normal approximation of raw values would be wrong."""
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
    """With all pairs or some, the mean square over random permutations is 1."""
    draw = torch.Generator().manual_seed(2)
    likelihood = torch.randn(16, 16, generator=draw, dtype=torch.float64)
    squares = [
        association(likelihood, [*torch.randperm(16, generator=draw).tolist()[:paired], *[None] * (16 - paired)]) ** 2
        for _ in range(600)
    ]
    assert sum(squares) / len(squares) == pytest.approx(1, abs=0.15)


def test_a_shift_is_counted_by_the_rows_that_are_there() -> None:
    partners = shifts([4, 5, 7, 8], "in the data")
    assert partners["1 after their own in the data"] == [1, None, 3, None]
    assert partners["3 before their own in the data"] == [None, None, 0, 1]


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
