"""The expected gradient of the KL term, against the table of verified pairings and closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from doctor.schooled import schooled_config
from keel.doctor.expected import (
    REVERSED,
    TARGET_KL,
    clamped_share,
    cosine,
    measure_term,
    term_gradient,
)
from keel.doctor.keel_subject import build_subject
from keel.doctor.probes.kl_term import GradientNorms, probe_kl_term
from keel.kl import KLOptions, Pairing
from keel.kl.facts import FACTS, POLICY_REF, Fact


def states(seed: int = 0, count: int = 6, vocabulary: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    reference = torch.randn(count, vocabulary, generator=generator, dtype=torch.float64)
    return reference + 0.1 * torch.randn(count, vocabulary, generator=generator, dtype=torch.float64), reference


def options(fact: Fact) -> tuple[KLOptions, Pairing]:
    gradient = fact.gradient if fact.placement == "loss" and fact.level == "token" else "plain"
    named = {"estimator": fact.estimator, "placement": fact.placement, "level": fact.level, "gradient": gradient}
    named |= {"topk": 4} if fact.estimator.startswith("topk") else {}
    kl = KLOptions.model_validate({**named, "allow_biased": True})
    return kl, kl.pairing()


# Sequences of one token cannot tell what a KL over the vocabulary of the tokens to come does to those before them.
OVER_VOCABULARY = ("exact", "exact_reverse", "jsd", "topk", "topk_unbiased")
UNSEEN = [(name, placement, "sequence") for name in OVER_VOCABULARY for placement in ("reward", "advantage")]
ON_POLICY = [f for f in FACTS if f.sampling == "on" and (f.estimator, f.placement, f.level) not in UNSEEN]


@pytest.mark.parametrize("fact", ON_POLICY, ids=lambda f: f"{f.estimator}-{f.placement}-{f.gradient}-{f.level}")
def test_every_proven_row_is_measured_as_what_it_claims(fact: Fact) -> None:
    measured = measure_term(*states(), *options(fact))
    assert measured.kl == pytest.approx(TARGET_KL, rel=1e-3)
    if fact.expected_gradient == "wrong":
        assert measured.name not in (POLICY_REF, "zero")
    else:
        assert measured.name == fact.expected_gradient.removeprefix("along ")  # the policy's prefixes are one
    if fact.expected_gradient == POLICY_REF:
        assert measured.cosine == pytest.approx(1.0)
        assert measured.size == pytest.approx(1.0)


@pytest.mark.parametrize("fact", [fact for fact in ON_POLICY if fact.expected_gradient == POLICY_REF], ids=str)
def test_a_certain_policy_does_not_reach_the_clamp(fact: Fact) -> None:
    """At 0.3 nats, a certain policy would need ratios of e^20, at which the term is clamped."""
    policy, reference = states()
    reference[:, 0] += 25.0
    measured = measure_term(policy + (reference - states()[1]), reference, *options(fact))
    assert measured.name == POLICY_REF
    assert measured.size == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(("clamp", "share"), [(None, 0.0), (0.1, 0.0), (4.9, 0.0), (5.0, 1.0), (40.0, 0.0)])
def test_a_tight_clamp_is_part_of_its_term(clamp: float | None, share: float) -> None:
    """Two tokens are exchanged, 30 nats apart: above a clamp of 5, and below one of 40."""
    policy, reference = torch.tensor([[30.0, 0.0]]).double(), torch.tensor([[0.0, 30.0]]).double().log_softmax(-1)
    assert clamped_share(policy, reference, clamp) == pytest.approx(share)


def test_the_gradient_of_k2_is_pi_times_u_less_its_mean() -> None:
    policy, reference = states(3)
    logp, ref = policy.log_softmax(-1), reference.log_softmax(-1)
    u = logp - ref
    by_hand = logp.exp() * (u - (logp.exp() * u).sum(-1, keepdim=True)) / len(policy)
    fact = next(f for f in ON_POLICY if (f.estimator, f.gradient, f.level) == ("k2", "plain", "token"))
    gradient, value = term_gradient(policy, ref, *options(fact))
    torch.testing.assert_close(gradient, by_hand)
    assert value == pytest.approx((logp.exp() * u.square() / 2).sum(-1).mean().item())


def test_reversed_k3_follows_chi_square() -> None:
    kl = KLOptions(estimator="keel.lab.studies.reversed_k3:reversed_k3", gradient="plain", allow_biased=True)
    measured = measure_term(*states(1), kl, kl.pairing())
    assert measured.name == REVERSED
    assert measured.value > measured.kl


def test_cosine_of_opposites() -> None:
    x = torch.tensor([1.0, -2.0])
    assert cosine(x, -3 * x) == pytest.approx(-1.0)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
def test_the_beta_for_a_share_gives_that_share(share: float) -> None:
    norms = GradientNorms(policy=3.0, kl=0.2)
    beta = norms.beta_for(share)
    assert beta is not None
    assert norms.share(beta) == pytest.approx(share)
    assert GradientNorms(0.0, 0.2).beta_for(share) is None
    assert "do not differ" in GradientNorms(0.0, 0.2).line(0.01, (share,), 0.1)


@pytest.mark.parametrize("override", ["kl.estimator=exact", "kl.placement=advantage"])
def test_the_probe_leaves_policy_and_gradients_as_they_were(override: str) -> None:
    from keel.models.fingerprint import fingerprint

    estimator = ["kl.estimator=k1"] if "advantage" in override else []
    setup = build_subject(schooled_config(override, *estimator))
    before = fingerprint(setup.policy.model)
    outcome = probe_kl_term(setup)
    assert fingerprint(setup.policy.model) == before
    assert all(parameter.grad is None for parameter in setup.policy.model.parameters())
    assert outcome.figures["cosine"] == pytest.approx(1.0, abs=1e-6)
    assert 0 < outcome.figures["gradient_share"] < 1
    assert outcome.figures["beta_for_1%"] < outcome.figures["beta_for_10%"] < outcome.figures["beta_for_50%"]


def test_weights_that_are_no_numbers_leave_the_term_unchecked() -> None:
    setup = build_subject(schooled_config())
    with torch.no_grad():
        next(setup.policy.model.parameters()).fill_(math.nan)
    outcome = probe_kl_term(setup)
    assert any("not finite" in line for line in outcome.unchecked)


def test_a_penalty_that_is_not_needed_is_a_note() -> None:
    setup = build_subject(schooled_config("loss.loss_type=dr_grpo", "kl.beta=0.05"))
    findings = probe_kl_term(setup).findings
    assert [(finding.code, finding.severity) for finding in findings] == [("kl/unneeded", "note")]


def test_a_penalty_in_the_reward_is_divided_by_the_spread() -> None:
    setup = build_subject(schooled_config("kl.placement=reward", "kl.estimator=k1", "loss.scale_rewards=batch"))
    outcome = probe_kl_term(setup)
    rewards = torch.tensor([reward.total for group in setup.groups for reward in group.rewards])
    assert outcome.figures["effective_beta"] == pytest.approx(0.01 / rewards.std().item(), rel=1e-5)
    assert [(finding.code, finding.severity) for finding in outcome.findings] == [("kl/scale", "note")]
