"""The three placements by hand, and what dividing by the group's spread does to β."""

import math

import numpy as np
import pytest
import torch

from keel.base.errors import KeelError
from keel.kl import advantage_penalty, check_pairing, estimate, kl_loss, reward_penalty
from keel.losses import advantages

KL = torch.tensor([[0.5, -0.25, 9.0], [1.0, 2.0, 3.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, False], [True, True, True]])


def test_what_the_reward_loses_by_hand():
    assert reward_penalty(KL, MASK, 0.1).tolist() == pytest.approx([-0.025, -0.6])


def test_what_the_advantage_loses_by_hand():
    token = advantage_penalty(KL, MASK, 0.1)
    np.testing.assert_allclose(token, [[-0.05, 0.025, 0.0], [-0.1, -0.2, -0.3]], atol=1e-12)
    sequence = advantage_penalty(KL, MASK, 0.1, level="sequence")
    np.testing.assert_allclose(sequence, [[-0.025, 0.025, 0.0], [-0.6, -0.5, -0.3]], atol=1e-12)


def test_third_door_by_hand():
    logp, ref = torch.tensor([[-1.0, -2.0]], dtype=torch.float64), torch.tensor([[-2.0, math.nan]], dtype=torch.float64)
    mask = torch.tensor([[True, False]])
    token = kl_loss(check_pairing("k3"), logp, ref, mask)
    assert token.tolist() == [[pytest.approx(math.exp(-1)), 0.0]]
    sequence = kl_loss(check_pairing("k1", level="sequence"), logp, ref, mask)
    assert sequence.tolist() == [1.0]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_third_door_with_the_exact_kl(level):
    logp, exact = torch.zeros(1, 2), torch.tensor([[0.25, math.nan]])
    got = kl_loss(check_pairing("exact", level=level), logp, None, torch.tensor([[True, False]]), exact_kl=exact)
    assert got.sum().item() == 0.25


def test_the_penalty_is_detached_in_reward_and_advantage():
    kl = KL.clone().requires_grad_()
    assert not reward_penalty(kl, MASK, 0.1).requires_grad
    assert not advantage_penalty(kl, MASK, 0.1).requires_grad


@pytest.mark.parametrize("hole", [math.nan, math.inf])
def test_what_is_outside_the_mask_does_not_enter(hole):
    kl = KL.clone()
    kl[0, 2] = hole
    assert torch.equal(reward_penalty(kl, MASK, 0.1), reward_penalty(KL, MASK, 0.1))
    for level in ("token", "sequence"):
        left, right = (advantage_penalty(x, MASK, 0.1, level=level) for x in (kl, KL))
        assert torch.equal(left, right)


@pytest.mark.parametrize("sigma", [0.04, 0.5, 3.0])
def test_effective_coefficient_is_beta_over_sigma(sigma):
    """How much a nat of KL costs in advantage: β/σ in the reward with std scaling, β in the advantage."""
    group, beta, nudge = torch.zeros(4, dtype=torch.long), 0.01, 1e-6
    base = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64) * sigma / math.sqrt(4 / 3)
    kl = torch.zeros(4, 1, dtype=torch.float64)
    more = kl + nudge * torch.tensor([[1.0], [1.0], [-1.0], [-1.0]])  # does not change mean or, to first order, std
    mask = torch.ones(4, 1, dtype=torch.bool)

    def first_door(scale):
        before, after = (advantages(base + reward_penalty(x, mask, beta), group, scale=scale) for x in (kl, more))
        return ((before - after)[0] / nudge).item()

    assert first_door("group") == pytest.approx(beta / sigma, rel=1e-2)
    assert first_door("none") == pytest.approx(beta, rel=1e-6)
    second = (advantage_penalty(kl, mask, beta) - advantage_penalty(more, mask, beta))[0, 0] / nudge
    assert second.item() == pytest.approx(beta, rel=1e-6)


@pytest.mark.parametrize("placement", ["reward", "advantage"])
def test_k1_in_reward_or_advantage_has_the_gradient_of_the_sequence_kl(placement):
    """Two steps, two tokens, by enumeration: −E[A·Σ_t s_t] with the shaped reward, without other rewards."""
    g = torch.Generator().manual_seed(0)
    theta = torch.randn(3, 2, generator=g, dtype=torch.float64).requires_grad_()
    ref_logits = torch.randn(3, 2, generator=g, dtype=torch.float64)
    tokens = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])
    rows = torch.stack([torch.zeros(4, dtype=torch.long), 1 + tokens[:, 0]], 1)
    logp, ref = (torch.log_softmax(x, -1)[rows, tokens] for x in (theta, ref_logits))
    total = logp.sum(-1)
    (truth,) = torch.autograd.grad((total.exp() * (total - ref.sum(-1))).sum(), theta, retain_graph=True)
    kl, mask = estimate("k1", logp, ref), torch.ones(4, 2, dtype=torch.bool)
    if placement == "reward":
        shaped = reward_penalty(kl, mask, 1.0)[:, None]
    else:
        shaped = advantage_penalty(kl, mask, 1.0, level="sequence")
    (got,) = torch.autograd.grad(-(total.exp().detach()[:, None] * shaped * logp).sum(), theta)
    torch.testing.assert_close(got, truth, rtol=0, atol=1e-12)


X = torch.zeros(1, 2)
ON = torch.ones(1, 2, dtype=torch.bool)
MISTAKES = [
    (lambda: reward_penalty(KL, MASK.float(), 0.1), "action_mask must be boolean"),
    (lambda: advantage_penalty(KL, MASK[:, :2], 0.1), "action_mask has shape (2, 2)"),
    (lambda: advantage_penalty(KL, MASK, 0.1, level="word"), "unknown level 'word'"),
    (lambda: kl_loss(check_pairing("k3"), X, None, ON), "needs ref_logp"),
    (lambda: kl_loss(check_pairing("exact"), X, X, ON), "set kl.exact=true"),
    (lambda: kl_loss(check_pairing("k1", "reward"), X, X, ON), "kl.placement=loss, got reward"),
    (lambda: kl_loss(check_pairing("exact"), X, None, ON, exact_kl=torch.zeros(1, 1)), "shape"),
    (lambda: kl_loss(check_pairing("k3"), X, torch.zeros(1, 3), ON), "ref_logp has shape (1, 3)"),
]


@pytest.mark.parametrize(("call", "says"), MISTAKES, ids=[says for _, says in MISTAKES])
def test_mistakes_are_one_line(call, says):
    with pytest.raises(KeelError) as caught:
        call()
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
