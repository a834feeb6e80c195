"""`keel verify` proves what it says, and would notice if it were false."""

import sys
from dataclasses import replace

import pytest
import torch

from keel.kl import KLOptions, estimators, facts
from keel.losses import LOSSES, LossOptions
from keel.losses import objective as objective_function
from keel.verify import gradients, losses, oracle, run, samples, values
from keel.verify.oracle import random_bandits, relative_error, sequence_world

objective = sys.modules[objective_function.__module__]  # the package has a function of the module's name


@pytest.fixture(scope="module")
def checks():
    return [check for _, section in run() for check in section]


@pytest.mark.slow
def test_every_fact_holds(checks):
    assert [check for check in checks if not check.ok] == []


@pytest.mark.slow
def test_every_row_of_the_facts_is_proven(checks):
    proven = [check.fact for check in checks]
    assert len(proven) == len(set(proven))
    for fact in facts.FACTS:
        label = f"{fact.estimator} in the {fact.placement}, {fact.sampling}-policy"
        assert f"{label}, {f'gradient {fact.gradient}' if fact.level == 'token' else 'sequence level'}" in proven


@pytest.mark.parametrize("claim", ["policy||ref", "ref||policy", "zero", "away", "wrong", "total-variation"])
def test_a_false_claim_is_caught(claim):
    """Each token-level row with another verdict than its own must fail on every distribution."""
    bandit = random_bandits(1, seed=5)[0]
    for fact in facts.FACTS:
        honest = fact.expected_gradient
        if fact.level != "token" or honest == claim or honest.startswith("near"):
            continue
        if claim == "wrong" and honest in ("total-variation", "away", "jsd", "topk"):
            continue  # these are no KL's gradient either: "wrong" is less than the truth, not false
        assert not gradients.fact_error(replace(fact, expected_gradient=claim), bandit)[1], (fact, claim)


@pytest.mark.parametrize("claim", ["policy||ref", "ref||policy", "none"])
def test_a_false_value_is_caught(claim):
    bandit = random_bandits(1, seed=5)[0]
    for fact in facts.FACTS:
        if fact.level == "token" and fact.value != claim:
            assert not gradients.value_holds(replace(fact, value=claim), bandit), fact


def test_near_the_wrong_thing_is_caught():
    bandit = random_bandits(1, seed=5)[0]
    for fact in facts.FACTS:
        if fact.level == "token" and fact.expected_gradient.startswith("near"):
            for name in ("policy||ref", "ref||policy", "total-variation"):
                claim = f"near {name}"
                proven = gradients.fact_error(replace(fact, expected_gradient=claim), bandit)[1]
                assert proven == (claim == fact.expected_gradient), (fact, claim)


def test_a_wrong_estimator_is_caught(monkeypatch):
    wrong = {**estimators.ESTIMATORS, "k3": lambda d: torch.expm1(-d) + d}
    monkeypatch.setattr(estimators, "ESTIMATORS", wrong)
    assert not all(check.ok for check in values.gaussian())
    assert not all(check.ok for check in gradients.gradients())


@pytest.mark.parametrize("name", ["policy_gradient", "dapo", "gspo"])
def test_a_ratio_against_the_wrong_one_of_three_policies_is_caught(name, monkeypatch):
    """On stale samples π/old is not π/μ."""
    world = sequence_world()
    penalties = [p for p in losses.PENALTIES if "rho" in p[2] or p[1] != "reward"]
    assert all(losses.penalty_check(name, p, oracle.STALE, world).ok for p in penalties)
    monkeypatch.setattr(objective, "kl_behaviour_logp", lambda batch, logp, level="token": batch.old_logp)
    exact = [p for p in penalties if p[:3] != ("k3", "loss", "plain") and p[1:4] != ("advantage", "auto", "sequence")]
    if name == "gspo":  # near, and exact under token_mean
        exact = [("k2", "loss", "auto", "token", "token_mean"), ("k1", "loss", "auto", "sequence", "token_mean")]
    assert not any(losses.penalty_check(name, p, oracle.STALE, world).ok for p in exact)


@pytest.mark.parametrize("name", ["policy_gradient", "dapo"])
def test_a_reward_that_is_valued_by_the_sampler_is_caught(name):
    """Of one token, at the first update: k1 of π in the reward is ∇KL(π‖p), k1 of μ lacks ∇KL(π‖μ)."""
    stale = losses.completions(sequence_world(steps=1), oracle.STALE)
    loss = LossOptions(loss_type=name)
    kl = KLOptions(estimator="k1", placement="reward", beta=1.0, log_ratio_clamp=None)
    pairing = kl.pairing(LOSSES[name].reduction, off_policy=True)

    def error(valued_by):
        measured = losses.penalty_gradient(replace(stale, old=valued_by), loss, kl, pairing)
        return relative_error(measured, losses.target(stale, "token"))

    assert error(stale.logp.detach()) < losses.EXACT
    assert error(stale.sample) > 0.01


def test_a_measurement_that_forgets_its_weights_is_caught(monkeypatch):
    monkeypatch.setattr(samples, "mismatch_ratio", lambda old, *_: torch.ones_like(old))
    failed = {check.fact for check in [*samples.stale(), *samples.filters()] if not check.ok}
    assert {
        "measured k1 × π/μ is the policy's KL at μ's prefixes",
        "k3 weighted by π/q, divided by KL(policy‖ref)",
    } <= failed


def test_the_plain_k3_trainer_lands_on_the_forward_optimum():
    """Stationary point of E[R] − β·KL(ref‖policy) in the right answer's logit: a(1−a) = β(a − 0.1)."""
    plain = next(t for t in values.DESCENT_CASES if t.name == "k3 in the loss, plain")
    accuracy, _ = values.train(plain.penalty)
    for beta, a in zip(values.BETAS, accuracy.tolist(), strict=True):
        assert a * (1 - a) == pytest.approx(beta * (a - 0.1), abs=1e-6)


def test_rows_of_the_sequence_world():
    world = sequence_world(steps=3, vocabulary=4)
    rows = world.rows(torch.tensor([[2, 3, 1], [0, 0, 0]]))
    assert rows.tolist() == [[0, 1 + 2, 5 + 4 * 2 + 3], [0, 1, 5]]
    assert world.policy.shape == (21, 4)
