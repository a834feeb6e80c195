"""`keel verify` proves what it says, and would notice if it were false."""

from dataclasses import replace

import pytest
import torch

from keel.kl import estimators, facts
from keel.verify import gradients, optimum, run, values
from keel.verify.oracle import random_bandits, sequence_world


@pytest.fixture(scope="module")
def checks():
    return [check for _, section in run() for check in section]


def test_every_fact_holds(checks):
    assert [check for check in checks if not check.ok] == []


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
        if claim == "wrong" and honest in ("total-variation", "away"):
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


def test_the_plain_k3_trainer_lands_on_the_forward_optimum():
    """Stationary point of E[R] − β·KL(ref‖policy) in the right answer's logit: a(1−a) = β(a − 0.1)."""
    plain = next(t for t in optimum.TRAINERS if t.name == "k3 in the loss, plain")
    accuracy, _ = optimum.train(plain.penalty)
    for beta, a in zip(optimum.BETAS, accuracy.tolist(), strict=True):
        assert a * (1 - a) == pytest.approx(beta * (a - 0.1), abs=1e-6)


def test_rows_of_the_sequence_world():
    world = sequence_world(steps=3, vocabulary=4)
    rows = world.rows(torch.tensor([[2, 3, 1], [0, 0, 0]]))
    assert rows.tolist() == [[0, 1 + 2, 5 + 4 * 2 + 3], [0, 1, 5]]
    assert world.policy.shape == (21, 4)
