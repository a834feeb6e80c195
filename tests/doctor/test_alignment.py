"""Answers against prompts: a shift is seen, and likelihoods with heavy tails raise no alarm beyond its level."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch
from torch import Tensor

from keel.doctor.probes.alignment import association, far_rows, rearranged, shifts
from keel.doctor.probes.answers import deviations_of
from keel.doctor.probes.choices import SettingChoice, missed_rank, surely_other
from keel.doctor.thresholds import load_thresholds

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


def test_where_a_model_misses_it_ranks_and_foresees() -> None:
    rows = torch.tensor([[0.7, 0.2, 0.1], [0.2, 0.7, 0.1], [0.3, 0.2, 0.5], [0.1, 0.4, 0.5]], dtype=torch.float64)
    choice = SettingChoice(rows.log(), torch.tensor([0, 1, 0, 0]))
    assert choice.first[1].tolist() == [True, True, False, False]
    assert choice.ranks_of_missed().tolist() == [1.0, 0.0]  # beside one other answer each: likelier, and less likely
    assert choice.foresight() == 1.0  # 0.7 where it is right, 0.5 where it is not


def _taught(random: Random, rows: int, sure: float, answers: int = 8) -> tuple[Tensor, list[int]]:
    """A model that is `sure` of one answer a prompt and finds one other twice as likely as the rest, and the first."""
    first = [random.randrange(answers) for _ in range(rows)]
    weights = torch.full((rows, answers), 1.0, dtype=torch.float64)
    for row, choice in enumerate(first):
        weights[row, (choice + random.randrange(1, answers)) % answers] = 2.0
        weights[row, choice] = 0.0
        weights[row] *= (1 - sure) / weights[row].sum()
        weights[row, choice] = min(0.99, max(0.01, random.gauss(sure, 0.1)))
    return (weights / weights.sum(-1, keepdim=True)).log(), first


@pytest.mark.parametrize("right", [0.15, 0.3, 0.4])
def test_answers_of_others_are_told_from_those_a_model_fails(right: float) -> None:
    thresholds, dice = load_thresholds(), Random(0)
    likelihood, first = _taught(dice, 90, 0.7)
    others = [choice if dice.random() < right else dice.randrange(8) for choice in first]
    assert surely_other(SettingChoice(likelihood, torch.tensor(others)), thresholds)
    second = likelihood.argsort(-1)[:, -2]  # where it fails, its second thought is right half of the time
    failed = [
        choice if dice.random() < right else int(second[row]) if dice.random() < 0.5 else dice.randrange(8)
        for row, choice in enumerate(first)
    ]
    assert not surely_other(SettingChoice(likelihood, torch.tensor(failed)), thresholds)
    assert not surely_other(SettingChoice(likelihood, torch.tensor(first)), thresholds)


@pytest.mark.slow
@pytest.mark.parametrize(("answers", "skill"), [(4, 0.45), (4, 0.8), (10, 0.45), (10, 1.2)])
@pytest.mark.parametrize("sharpened", [2.0, 4.0])
def test_a_model_that_is_too_sure_is_left_alone(answers: int, skill: float, sharpened: float) -> None:
    """Right answers have `skill` more of normal evidence, which the model takes for many times what it is."""
    draw, accused = torch.Generator().manual_seed(0), 0
    for _ in range(200):
        gold = torch.randint(answers, (96,), generator=draw)
        evidence = torch.randn(96, answers, generator=draw, dtype=torch.float64)
        evidence[torch.arange(96), gold] += skill
        accused += surely_other(SettingChoice((sharpened * evidence).log_softmax(-1), gold), load_thresholds())
    assert accused <= 3


@pytest.mark.parametrize(("answers", "skill"), [(3, 0.3), (10, 1.0)])
def test_the_rank_of_a_missed_answer_is_that_of_a_simulation(answers: int, skill: float) -> None:
    draw = torch.Generator().manual_seed(1)
    evidence = torch.randn(40_000, answers, generator=draw, dtype=torch.float64)
    evidence[:, 0] += skill
    others = evidence[:, 1:] < evidence[:, :1]
    right = others.all(-1)
    simulated = (others[~right].sum(-1) / (answers - 2)).mean()
    assert missed_rank(float(right.double().mean()), answers) == pytest.approx(float(simulated), abs=0.01)
