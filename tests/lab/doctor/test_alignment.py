"""Answers against prompts: a shift is seen, and likelihoods with heavy tails raise no alarm beyond its level."""

from __future__ import annotations

import math

import pytest
import torch

from keel.lab.doctor.probes.alignment import _deviations, against, association


def test_one_likelihood_that_dwarfs_the_others_is_one_rank():
    """Student's t with two degrees of freedom: a normal tail of its raw values would be far too short."""
    draw = torch.Generator().manual_seed(0)
    alarms = 0
    for _ in range(1500):
        noise, scale = (torch.randn(2, 16, 16, generator=draw, dtype=torch.float64) for _ in range(2))
        heavy = noise[0] / (scale.square().sum(0) / 2).sqrt()
        alarms += association(heavy, 1) > _deviations(0.01)
    assert alarms <= 32  # 15 of 1500 by the level; over 32 once in 20,000


def test_a_shift_of_few_rows_is_beyond_the_level_of_a_preflight():
    draw = torch.Generator().manual_seed(1)
    likelihood = torch.randn(12, 12, generator=draw, dtype=torch.float64) + 6 * torch.eye(12).roll(1, dims=1)
    assert association(likelihood, 1) > _deviations(1e-3 / 40 / 14)
    assert association(likelihood, 0) < _deviations(0.05)


def test_what_a_model_says_of_the_answers():
    sure = torch.full((3, 3), 0.1, dtype=torch.float64).fill_diagonal_(0.8).log()
    support, mass, opinion = against(sure, torch.arange(3))
    usual = 1 / 3
    assert support.tolist() == pytest.approx([math.log(0.8 / usual)] * 3)
    assert mass == pytest.approx(1.0)
    assert opinion == pytest.approx(0.8 * math.log(0.8 / usual) + 0.2 * math.log(0.1 / usual))
    others, _, _ = against(sure, torch.tensor([1, 2, 0]))
    assert others.tolist() == pytest.approx([math.log(0.1 / usual)] * 3)
    blind, mass, opinion = against(torch.full((3, 3), 0.1, dtype=torch.float64).log(), torch.arange(3))
    assert (blind.tolist(), mass, opinion) == (pytest.approx([0.0] * 3), pytest.approx(0.3), pytest.approx(0.0))
