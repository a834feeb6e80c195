"""The test of drawn tokens accepts correct samplers at every entropy and rejects wrong ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from keel.doctor.draws import (
    Draws,
    best_temperature,
    chance_of,
    filters,
    improbable_runs,
    tail_masses,
    uniform_p_value,
)
from keel.doctor.probes.alternatives import Explanation, _agrees
from keel.doctor.probes.sampler import chance_aligned, chance_within
from keel.doctor.thresholds import load_thresholds
from keel.rollout.sampling import SamplingParams

PLAIN = SamplingParams()


def drawn(sharpness: float, params: SamplingParams = PLAIN, n: int = 1200, seed: int = 0) -> Draws:
    """Tokens drawn under `params` from random logits over 50 tokens. Higher `sharpness` gives lower entropy."""
    generator = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(n, 50, generator=generator, dtype=torch.float64)
    empty = Draws(logits, torch.zeros(n, dtype=torch.long), torch.zeros(n), torch.arange(n) // 10)
    tokens = torch.multinomial(empty.distribution(params).exp(), 1, generator=generator).squeeze(-1)
    return replace(empty, tokens=tokens)


@pytest.mark.parametrize("sharpness", [0.0, 0.5, 2.0, 6.0])
def test_the_policys_own_draws_pass_at_every_entropy(sharpness: float) -> None:
    chances = [uniform_p_value(tail_masses(drawn(sharpness, seed=seed), PLAIN)) for seed in range(40)]
    assert min(chances) > 1e-4
    assert not any(bool(improbable_runs(drawn(sharpness, seed=seed), PLAIN).any()) for seed in range(40))


@pytest.mark.parametrize(
    "params",
    [
        replace(PLAIN, top_p=0.9),
        replace(PLAIN, top_k=3),
        replace(PLAIN, min_p=0.1),
        replace(PLAIN, temperature=0.7),
        replace(PLAIN, temperature=1.5),
    ],
)
def test_other_ways_of_drawing_do_not(params: SamplingParams) -> None:
    sample = drawn(2.0, params)
    assert uniform_p_value(tail_masses(sample, PLAIN)) < 1e-6
    assert uniform_p_value(tail_masses(sample, params)) > 1e-3


@pytest.mark.parametrize(
    ("reported", "agrees"),
    [(PLAIN, True), (replace(PLAIN, temperature=0.7), True), (replace(PLAIN, temperature=3.0), False)],
    ids=["the policy's own", "of what was drawn from", "of neither"],
)
def test_a_way_to_draw_must_not_contradict_what_is_reported(reported: SamplingParams, agrees: bool) -> None:
    colder = replace(PLAIN, temperature=0.7)
    sample = drawn(2.0, colder)
    sample = replace(sample, sample_logp=sample.logp(reported))
    entry = Explanation("sampler/temperature", "temperature 0.7", "", 0.0, sample, colder)
    assert _agrees(entry, sample, PLAIN, load_thresholds()) == agrees


def test_what_is_nearly_blind_is_no_temperature() -> None:
    sample = drawn(0.0, n=400)  # uniform
    sharp = replace(sample, logits=drawn(6.0, n=400).logits)
    assert best_temperature(PLAIN, lambda params: -float(sharp.logp(params).sum())) < 4.5


def test_first_tokens_that_are_not_drawn_show_among_many_that_are() -> None:
    sample = drawn(2.0, n=4000)
    sample = replace(sample, position=torch.arange(4000) % 20)
    assert chance_of(sample, PLAIN) > 1e-3
    first = sample.position == 0
    greedy = replace(sample, tokens=torch.where(first, sample.logits.argmax(-1), sample.tokens))
    assert uniform_p_value(tail_masses(greedy, PLAIN)) > 1e-6
    assert chance_of(greedy, PLAIN) < 1e-6


def test_a_policy_that_is_mostly_sure_is_judged_where_it_is_not() -> None:
    unsure, sure = drawn(1.0, replace(PLAIN, temperature=0.6), n=150), drawn(60.0, n=4000, seed=1)
    names = ("logits", "tokens", "sample_logp", "row")
    both = Draws(*(torch.cat((getattr(unsure, name), getattr(sure, name))) for name in names))
    assert uniform_p_value(tail_masses(both, PLAIN)) > 1e-3
    assert chance_of(both, PLAIN) < 1e-6
    assert chance_of(sure, PLAIN) > 1e-3


def test_the_temperature_is_found_again() -> None:
    sample = drawn(2.0, replace(PLAIN, temperature=0.6), n=4000)
    assert best_temperature(PLAIN, lambda p: -float(sample.logp(p).sum())) == pytest.approx(0.6, rel=0.05)
    reported = sample.logp(replace(PLAIN, temperature=1.3))
    assert best_temperature(PLAIN, lambda p: float((reported - sample.logp(p)).abs().mean())) == pytest.approx(
        1.3, rel=1e-3
    )


def test_filters_begin_with_the_configured_one_and_keep_the_temperature() -> None:
    configured = replace(PLAIN, top_p=0.83, temperature=0.5)
    names, params = zip(*filters(configured), strict=True)
    assert params[0] == configured
    assert "as configured" in names[0]
    assert {p.temperature for p in params} == {0.5}


def test_given_text_in_the_midst_of_draws_is_marked_and_nothing_else() -> None:
    sample = drawn(3.0, n=60)
    least = sample.logits.argmin(-1)
    tokens = sample.tokens.clone()
    tokens[23:28] = least[23:28]
    marked = improbable_runs(replace(sample, tokens=tokens), PLAIN).nonzero().squeeze(-1).tolist()
    assert set(range(23, 28)) <= set(marked)
    assert len(marked) <= 6


def test_copies_within_a_step_by_hand() -> None:
    """2 of the 70 splits of eight completions into halves separate the equal ones. Equal ones alone are no evidence."""
    copied = ("a" * 4, "b" * 4)
    assert chance_within([copied]) == pytest.approx(2 / 70, abs=0.03)
    assert chance_within([copied] * 3) < 0.01
    assert chance_within([("aaab", "aaba")] * 6) > 0.2
    assert chance_within([("aaaa", "aaaa")]) == 1.0  # says nothing


def test_equal_noise_is_told_from_a_sampler_that_is_sure() -> None:
    """Of the 24 orders of four completions one matches: the p-value is 1/24, and 1/576 for two groups."""
    assert chance_aligned([("abcd", "abcd")]) == pytest.approx(1 / 24, abs=0.03)
    assert chance_aligned([("abcd", "abcd")] * 2) < 0.01
    assert chance_aligned([("aaab", "aaba")] * 6) > 0.2  # as likely at any place
    assert chance_aligned([("aaaa", "aaaa")]) == 1.0


def test_p_values_by_hand() -> None:
    even = (torch.arange(100, dtype=torch.float64) + 0.5) / 100
    assert uniform_p_value(even) == 1.0
    assert uniform_p_value(0.5 + 0.5 * even) < 1e-10  # nothing below 0.4: a chance of 0.6^100
    assert uniform_p_value(torch.zeros(0, dtype=torch.float64)) == 1.0
    # recorded from the sums by hand that the thresholds were set with
    assert uniform_p_value(even**1.5) == pytest.approx(0.00499068807981582, rel=1e-9)
    assert uniform_p_value(even**2) == pytest.approx(2.2872422115554154e-08, rel=1e-9)
