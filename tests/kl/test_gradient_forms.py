"""Expected gradients by enumeration over categorical distributions: every row of the table, on- and off-policy.

Nothing of the package's own oracle is used: distributions, scores s = ∇log π and the sums are numpy's.
"""

import math

import numpy as np
import pytest
import torch

from keel.base.errors import KeelError
from keel.kl import (
    FACTS,
    GradientForm,
    KLOptions,
    check_pairing,
    kl_loss,
    parse_gradient,
    straight_through,
    weighted_estimate,
)
from keel.kl.estimators import with_form
from keel.kl.exact import penalty_divergence
from keel.kl.facts import over_vocabulary

SEEDS = range(4)
VOCABULARY = 5


class World:
    """Policy π, reference p, sampler μ over a few tokens, with closed-form KL gradients in the policy's logits."""

    def __init__(self, seed):
        rng = np.random.default_rng(1000 + seed)
        self.logits = rng.normal(size=(3, VOCABULARY))
        self.pi, self.p, self.mu = np.exp(self.logits) / np.exp(self.logits).sum(-1, keepdims=True)
        self.score = np.eye(VOCABULARY) - self.pi  # row y: ∇ log π(y)

    def expected(self, function, sampler):
        """Σ_y sampler(y) ∇ f(y): gradient of the loss f on tokens drawn from the sampler (not differentiated)."""
        theta = torch.from_numpy(self.logits[0]).requires_grad_()
        logp = torch.log_softmax(theta, -1)[:, None]
        ref, old = torch.from_numpy(np.log(self.p))[:, None], torch.from_numpy(np.log(self.mu))[:, None]
        values = function(logp, ref, old)
        (torch.from_numpy(sampler)[:, None] * values).sum().backward()
        return theta.grad.numpy()

    @property
    def kl_policy_ref(self):
        u = np.log(self.pi / self.p)
        return self.pi * (u - (self.pi * u).sum())

    @property
    def kl_ref_policy(self):
        return self.pi - self.p

    @property
    def kl_sampler_policy(self):
        return self.pi - self.mu


def form(estimator, gradient, on_policy, cap=None):
    def function(logp, ref, old):
        return weighted_estimate(
            estimator, parse_gradient(gradient), logp, ref, None if on_policy else old, clamp=None, ratio_cap=cap
        )

    return function


def gradient_of(world, estimator, gradient, on_policy):
    return world.expected(form(estimator, gradient, on_policy), world.pi if on_policy else world.mu)


def close(a, b):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-10)


def far(a, b):
    assert np.linalg.norm(a - b) > 1e-3 * np.linalg.norm(b)


ON_POLICY = [
    ("k1", "plain", "zero"),
    ("k2", "plain", "policy_ref"),
    ("k3", "plain", "ref_policy"),
    ("k1", "k2", "policy_ref"),
    ("k3", "k2", "policy_ref"),
    ("abs", "k2", "policy_ref"),
    ("k1", "rho", "policy_ref"),
    ("k3", "rho", "policy_ref"),
    ("k1", "sg_rho", "zero"),
    ("k2", "sg_rho", "policy_ref"),
    ("k3", "sg_rho", "ref_policy"),
    ("k1", "sg_rho*k2", "policy_ref"),
    ("k3", "sg_rho*k2", "policy_ref"),
    ("k1", "rho*k3", "policy_ref"),
]
OFF_POLICY = [
    ("k1", "rho", "policy_ref"),
    ("k3", "rho", "policy_ref"),
    ("k2", "sg_rho", "policy_ref"),
    ("k1", "sg_rho*k2", "policy_ref"),
    ("k3", "sg_rho*k2", "policy_ref"),
    ("abs", "sg_rho*k2", "policy_ref"),
    ("k1", "rho*k3", "policy_ref"),
    ("k2", "rho*k3", "policy_ref"),
    ("k1", "sg_rho", "zero"),
    ("k3", "sg_rho", "ref_policy"),
]
WRONG = [
    ("k2", "rho", True),
    ("k2", "rho", False),
    ("k2", "plain", False),
    ("k3", "plain", False),
    ("k3", "k2", False),
    ("k3", "sg_rho", False),
    ("abs", "rho", True),
    ("abs", "rho", False),
    ("abs", "plain", True),
]


def target(world, name):
    return {
        "zero": np.zeros(VOCABULARY),
        "policy_ref": world.kl_policy_ref,
        "ref_policy": world.kl_ref_policy,
    }[name]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("estimator", "gradient", "expected"), ON_POLICY)
def test_on_policy_expected_gradient(estimator, gradient, expected, seed):
    world = World(seed)
    close(gradient_of(world, estimator, gradient, True), target(world, expected))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("estimator", "gradient", "expected"), OFF_POLICY)
def test_off_policy_expected_gradient(estimator, gradient, expected, seed):
    world = World(seed)
    close(gradient_of(world, estimator, gradient, False), target(world, expected))


@pytest.mark.parametrize("seed", SEEDS)
def test_unweighted_k1_off_policy_pushes_away_from_the_samples(seed):
    world = World(seed)
    close(gradient_of(world, "k1", "plain", False), -world.kl_sampler_policy)


@pytest.mark.parametrize(("estimator", "gradient", "on_policy"), WRONG)
def test_wrong_forms_are_wrong(estimator, gradient, on_policy):
    world = World(0)
    far(gradient_of(world, estimator, gradient, on_policy), world.kl_policy_ref)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("on_policy", [True, False])
def test_absolute_pulls_along_twice_the_total_variation(seed, on_policy):
    world = World(seed)
    sign = np.sign(world.pi - world.p)
    expected = world.pi * (sign - (world.pi * sign).sum())  # ∇ Σ|π − p|
    close(gradient_of(world, "abs", "plain" if on_policy else "sg_rho", on_policy), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_in_the_reward(seed):
    """Detached value times score: k1 gives ∇KL(π‖p), k3 the difference of both, k2 neither."""
    world = World(seed)

    def in_reward(estimator):
        def function(logp, ref, old):
            return weighted_estimate(estimator, GradientForm(), logp, ref, clamp=None).detach() * logp

        return world.expected(function, world.pi)

    close(in_reward("k1"), world.kl_policy_ref)
    close(in_reward("k3"), world.kl_policy_ref - world.kl_ref_policy)
    close(in_reward("k3") + gradient_of(world, "k3", "plain", True), world.kl_policy_ref)
    far(in_reward("k2"), world.kl_policy_ref)


@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs", "exact"])
@pytest.mark.parametrize("seed", SEEDS)
def test_auto_always_has_the_gradient_of_kl_policy_ref(seed, estimator, off_policy):
    world = World(seed)
    pairing = check_pairing(estimator, off_policy=off_policy)

    def function(logp, ref, old):
        exact = (logp.exp() * (logp - ref)).sum().expand_as(logp)
        mask = torch.ones_like(logp, dtype=torch.bool)
        old_logp = old if off_policy else None
        return kl_loss(pairing, logp, ref, mask, old_logp=old_logp, exact_kl=exact, clamp=None)

    close(world.expected(function, world.mu if off_policy else world.pi), world.kl_policy_ref)


OWN_OPTIONS = {"jsd": {"jsd_weight": 0.3}, "topk": {"topk": 2}, "topk_unbiased": {"topk": 2}}


def jsd_gradient(world):
    """(1−w) π (g − Σ π g) with g = log(π/m): the terms of the mixture m cancel."""
    g = 0.7 * np.log(world.pi / (0.7 * world.pi + 0.3 * world.p))
    return world.pi * (g - (world.pi * g).sum())


def topk_gradient(world):
    """π (g − Σ π g) with g = log(π/p) in the head, and the log-ratio of the two tails outside it."""
    head = np.argsort(-world.pi)[:2]
    g = np.full(VOCABULARY, np.log((1 - world.pi[head].sum()) / (1 - world.p[head].sum())))
    g[head] = np.log(world.pi[head] / world.p[head])
    return world.pi * (g - (world.pi * g).sum())


def fact_function(fact, on_policy):
    """The loss that a token-level row of the facts describes."""

    def function(logp, ref, old):
        u = logp - ref
        if fact.estimator == "exact":
            value = (logp.exp() * u).sum().expand_as(u)
        elif fact.estimator == "exact_reverse":
            value = (ref.exp() * -u).sum().expand_as(u)
        elif over_vocabulary(fact.estimator):
            options = KLOptions(estimator=fact.estimator, **OWN_OPTIONS[fact.estimator])
            tokens = torch.arange(VOCABULARY).unsqueeze(0)
            value = penalty_divergence(options)(logp.T, ref.T, tokens).reshape(-1, 1).expand_as(u)
        elif fact.placement == "loss":
            return form(fact.estimator, fact.gradient, on_policy)(logp, ref, old)
        else:
            value = weighted_estimate(fact.estimator, GradientForm(), logp, ref, clamp=None)
        if fact.placement == "loss":
            return with_form(value, parse_gradient(fact.gradient), logp, ref, None if on_policy else old, clamp=None)
        return value.detach() * (logp - (logp.detach() if on_policy else old)).exp()

    return function


TOKEN_FACTS = [fact for fact in FACTS if fact.level == "token"]


@pytest.mark.parametrize(
    "fact", TOKEN_FACTS, ids=[f"{f.estimator}-{f.placement}-{f.sampling}-{f.gradient}" for f in TOKEN_FACTS]
)
def test_every_token_level_fact_is_true(fact):
    world = World(3)
    on_policy = fact.sampling == "on"
    got = world.expected(fact_function(fact, on_policy), world.pi if on_policy else world.mu)
    sign = np.sign(world.pi - world.p)
    known = {
        "zero": np.zeros(VOCABULARY),
        "policy||ref": world.kl_policy_ref,
        "ref||policy": world.kl_ref_policy,
        "away": -world.kl_sampler_policy,
        "total-variation": world.pi * (sign - (world.pi * sign).sum()),
        "jsd": jsd_gradient(world),
        "topk": topk_gradient(world),
    }
    if fact.expected_gradient in known:
        close(got, known[fact.expected_gradient])
    else:
        for truth in known.values():
            assert np.abs(got - truth).max() > 1e-3


@pytest.mark.parametrize("form_name", ["rho", "sg_rho*k2"])
def test_auto_forms_have_the_estimators_value(form_name):
    """The value is ρ·k whatever carries the gradient, so E_μ[value] is KL for k1 and k3."""
    world = World(1)
    kl = (world.pi * np.log(world.pi / world.p)).sum()
    logp, ref, old = (torch.from_numpy(np.log(x))[:, None] for x in (world.pi, world.p, world.mu))
    for estimator in ("k1", "k3"):
        value = form(estimator, form_name, False)(logp, ref, old)[:, 0].numpy()
        assert (world.mu * value).sum() == pytest.approx(kl, abs=1e-12)


def per_sample(estimator, gradient, cap=None):
    world = World(2)
    logp = torch.from_numpy(np.log(world.pi))[:, None].requires_grad_()
    ref, old = (torch.from_numpy(np.log(x))[:, None] for x in (world.p, world.mu))
    values = form(estimator, gradient, False, cap)(logp, ref, old)
    values.sum().backward()
    return world, values.detach().numpy()[:, 0], logp.grad.numpy()[:, 0]


def test_rho_k3_and_sg_rho_k2_agree_on_every_sample():
    world, _, left = per_sample("k3", "rho")
    _, _, right = per_sample("k2", "sg_rho")
    close(left, right)
    close(left, world.pi / world.mu * np.log(world.pi / world.p))


@pytest.mark.parametrize("cap", [0.5, 1.0, 1.5])
def test_truncated_ratio(cap):
    world, value, gradient = per_sample("k3", "sg_rho*k2", cap)
    u = np.log(world.pi / world.p)
    rho = np.minimum(world.pi / world.mu, cap)
    assert (world.pi / world.mu > cap).any()
    close(value, rho * (np.exp(-u) - 1 + u))
    close(gradient, rho * u)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_truncated_rho_keeps_its_pull_above_the_cap(estimator):
    """min(ρ, c)·(k + ∂k/∂logp): another weight, and still the gradient that ρ·k has."""
    world, _, gradient = per_sample(estimator, "rho", 1.0)
    u, rho = np.log(world.pi / world.p), np.minimum(world.pi / world.mu, 1.0)
    k, slope = (u, 1.0) if estimator == "k1" else (np.exp(-u) - 1 + u, 1 - np.exp(-u))
    close(gradient, rho * (k + slope))


def test_rho_on_policy_is_no_no_op():
    """ρ = 1 in value and still carries gradient."""
    logp = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    value = weighted_estimate("k1", parse_gradient("rho"), logp, torch.tensor([[-3.0]], dtype=torch.float64))
    value.sum().backward()
    assert value.item() == 2.0
    assert logp.grad.item() == 3.0  # u + 1


def test_straight_through():
    x = torch.tensor(3.0, requires_grad=True)
    y = straight_through(x**2, 5 * x)
    y.backward()
    assert (y.item(), x.grad.item()) == (9.0, 5.0)


def test_straight_through_of_an_exploding_value_keeps_a_small_gradient():
    """Value k3, gradient k2's: at d = 12 the value is e^12 and the pull is only 12."""
    logp = torch.tensor([[-13.0]], requires_grad=True)
    value = weighted_estimate("k3", parse_gradient("k2"), logp, torch.tensor([[-1.0]]))
    value.sum().backward()
    assert value.item() == pytest.approx(math.exp(12) - 13, rel=1e-6)
    assert logp.grad.item() == -12.0


@pytest.mark.parametrize("gradient", ["plain", "k2", "rho", "sg_rho", "sg_rho*k2", "rho*k3"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize("hole", [-math.inf, math.nan])
def test_masked_tokens_are_nothing_in_every_form(estimator, gradient, hole):
    logp = torch.tensor([[-1.0, hole]], requires_grad=True)
    ref, old = torch.tensor([[-2.0, hole]]), torch.tensor([[-1.2, hole]])
    mask = torch.tensor([[True, False]])
    value = weighted_estimate(estimator, parse_gradient(gradient), logp, ref, old, mask)
    value.sum().backward()
    assert value[0, 1] == 0
    assert logp.grad[0, 1] == 0
    assert torch.isfinite(logp.grad).all()


@pytest.mark.parametrize("gradient", ["plain", "k2", "rho", "sg_rho", "sg_rho*k2", "rho*k3"])
def test_forms_parse_and_print_back(gradient):
    assert str(parse_gradient(gradient)) == gradient


@pytest.mark.parametrize("text", ["rh0", "", "rho*rho", "k2*rho", "k2*k3", "sg_rho*k2*k2", "plain*k2", "auto"])
def test_unknown_forms_are_refused(text):
    with pytest.raises(KeelError, match="unknown gradient form") as caught:
        parse_gradient(text)
    assert "\n" not in str(caught.value)


def test_near_misses_get_the_nearest_form():
    with pytest.raises(KeelError, match=r"did you mean 'sg_rho\*k2'\?"):
        parse_gradient("sgrho*k2")


def test_a_cap_without_a_ratio_is_refused():
    with pytest.raises(KeelError, match="ratio cap needs a weighted gradient form"):
        weighted_estimate("k3", GradientForm(), torch.zeros(1, 1), torch.zeros(1, 1), ratio_cap=2.0)
