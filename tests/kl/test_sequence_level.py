"""Sequence-level KL by enumeration of a 3-step, 4-token tabular policy: the table of errors, cosines and variances."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel.base.errors import KeelError
from keel.kl import (
    exact_kl,
    k1_to_go,
    k2_sequence,
    k3_sequence,
    parse_gradient,
    rao_blackwell,
    sequence_estimate,
    weighted_estimate,
)

SEQUENCES = torch.tensor(list(itertools.product(range(4), repeat=3)))  # [64, 3]
ROWS = torch.stack(
    [torch.zeros(64, dtype=torch.long), 1 + SEQUENCES[:, 0], 5 + 4 * SEQUENCES[:, 0] + SEQUENCES[:, 1]], 1
)


def world(seed=1):
    g = torch.Generator().manual_seed(seed)
    policy = torch.randn(21, 4, generator=g, dtype=torch.float64)
    reference = torch.randn(21, 4, generator=g, dtype=torch.float64)
    sampler = policy + 0.5 * torch.randn(21, 4, generator=g, dtype=torch.float64)
    return policy, reference, sampler


def logps(logits):
    """Per-token log-probabilities `[64, 3]` of every sequence."""
    return torch.log_softmax(logits, -1)[ROWS, SEQUENCES]


def true_gradient(policy, reference):
    """∇ Σ_y π(y) Σ_t log π/p by autograd through the probabilities themselves: no score function anywhere."""
    theta = policy.clone().requires_grad_()
    logp = logps(theta).sum(-1)
    (logp.exp() * (logp - logps(reference).sum(-1))).sum().backward()
    return theta.grad.flatten().numpy()


def per_sample_gradients(policy, loss):
    """`[64, 84]`: the gradient of the loss on each of the 64 sequences."""
    theta = policy.clone().requires_grad_()
    per_sequence = loss(theta)
    assert per_sequence.shape == (64,)
    return np.stack(
        [torch.autograd.grad(value, theta, retain_graph=True)[0].flatten().numpy() for value in per_sequence]
    )


def vocabulary_kl(theta, reference):
    return exact_kl(torch.log_softmax(theta, -1)[ROWS], torch.log_softmax(reference, -1)[ROWS])


def token_loss(estimator):
    def loss(theta, reference):
        return weighted_estimate(estimator, parse_gradient("plain"), logps(theta), logps(reference), clamp=None).sum(-1)

    return loss


LOSSES = {
    "per-token k2": token_loss("k2"),
    "exact per-token KL": lambda theta, ref: vocabulary_kl(theta, ref).sum(-1),
    "per-token k3": token_loss("k3"),
    "k1 reward-to-go": lambda theta, ref: k1_to_go(logps(theta), logps(ref), clamp=None),
    "half squared sum": lambda theta, ref: k2_sequence(logps(theta), logps(ref), clamp=None),
    "rao-blackwell": lambda theta, ref: rao_blackwell(vocabulary_kl(theta, ref), logps(theta)),
}
TABLE = [
    ("per-token k2", 0.468, 0.912, 2.37),
    ("exact per-token KL", 0.468, 0.912, 0.32),
    ("per-token k3", 0.635, 0.806, 14.58),
    ("k1 reward-to-go", 0.0, 1.0, 6.72),
    ("half squared sum", 0.0, 1.0, 9.60),
    ("rao-blackwell", 0.0, 1.0, 2.11),
]


@pytest.mark.parametrize(("name", "error", "cosine", "variance"), TABLE)
def test_table_of_the_sequence_level(name, error, cosine, variance):
    policy, reference, _ = world()
    truth = true_gradient(policy, reference)
    samples = per_sample_gradients(policy, lambda theta: LOSSES[name](theta, reference))
    weights = logps(policy).sum(-1).exp().numpy()
    mean = weights @ samples
    relative = np.linalg.norm(mean - truth) / np.linalg.norm(truth)
    assert relative == pytest.approx(error, abs=1e-12 if error == 0 else 5e-4)
    assert mean @ truth / np.linalg.norm(mean) / np.linalg.norm(truth) == pytest.approx(cosine, abs=5e-4)
    assert (weights @ (samples - mean) ** 2).sum() == pytest.approx(variance, abs=5e-3)


def weighted_gradient(policy, sampler, loss):
    theta = policy.clone().requires_grad_()
    (logps(sampler).sum(-1).exp() * loss(theta)).sum().backward()
    return theta.grad.flatten().numpy()


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("estimator", ["k1", "k2", "exact"])
def test_off_policy_sequence_ratio_is_unbiased(estimator, seed):
    policy, reference, sampler = world(seed)

    def loss(theta):
        return sequence_estimate(
            estimator, logps(theta), logps(reference), None, logps(sampler), exact_kl=vocabulary_kl(theta, reference)
        )

    np.testing.assert_allclose(
        weighted_gradient(policy, sampler, loss), true_gradient(policy, reference), rtol=0, atol=1e-10
    )


@pytest.mark.parametrize("off_policy", [False, True])
def test_sequence_k3_pulls_along_the_forward_kl(off_policy):
    policy, reference, sampler = world()
    theta = policy.clone().requires_grad_()
    p = logps(reference).sum(-1)
    (p.exp() * (p - logps(theta).sum(-1))).sum().backward()
    old = logps(sampler) if off_policy else None
    got = weighted_gradient(
        policy, sampler if off_policy else policy, lambda t: k3_sequence(logps(t), logps(reference), None, old)
    )
    np.testing.assert_allclose(got, theta.grad.flatten().numpy(), rtol=0, atol=1e-10)


def test_token_weighted_k3_off_policy_is_not_the_sequences_gradient():
    policy, reference, sampler = world()

    def loss(theta):
        values = weighted_estimate("k3", parse_gradient("rho"), logps(theta), logps(reference), logps(sampler))
        return values.sum(-1)

    truth = true_gradient(policy, reference)
    assert np.linalg.norm(weighted_gradient(policy, sampler, loss) - truth) > 0.1 * np.linalg.norm(truth)


@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k3", "exact"])
def test_sequence_values_average_to_the_sequence_kl(estimator, off_policy):
    policy, reference, sampler = world()
    source = logps(sampler if off_policy else policy)
    value = sequence_estimate(
        estimator,
        logps(policy),
        logps(reference),
        None,
        source if off_policy else None,
        exact_kl=vocabulary_kl(policy, reference),
    )
    total = logps(policy).sum(-1)
    kl = (total.exp() * (total - logps(reference).sum(-1))).sum().item()
    assert (source.sum(-1).exp() * value).sum().item() == pytest.approx(kl, abs=1e-12)


def test_literal_values():
    logp, ref = torch.tensor([[-1.0, -2.0]]).double(), torch.tensor([[-1.5, -1.0]]).double()
    assert k1_to_go(logp, ref).item() == pytest.approx(-0.5)
    assert k2_sequence(logp, ref).item() == pytest.approx(0.125)
    assert k3_sequence(logp, ref).item() == pytest.approx(math.exp(0.5) - 1.5)
    assert rao_blackwell(torch.tensor([[0.25, 0.5]]).double(), logp).item() == pytest.approx(0.75)
    old = torch.tensor([[-1.0, -3.0]]).double()
    assert k1_to_go(logp, ref, old_logp=old).item() == pytest.approx(-0.5 * math.e)
    assert k1_to_go(logp, ref, old_logp=old, ratio_cap=2.0).item() == pytest.approx(-1.0)


def test_literal_gradients():
    """k1: Σ_{j≥t} u_j; k2: Σu on every token; Rao-Blackwell: 1 through KL_t and the future on log π."""
    ref = torch.tensor([[-1.5, -1.0, -4.0]]).double()
    for function, expected in ((k1_to_go, [0.5, 0.0, 1.0]), (k2_sequence, [0.5, 0.5, 0.5])):
        logp = torch.tensor([[-1.0, -2.0, -3.0]]).double().requires_grad_()
        function(logp, ref).sum().backward()
        np.testing.assert_allclose(logp.grad[0], expected, atol=1e-12)
    logp = torch.tensor([[-1.0, -2.0, -3.0]]).double().requires_grad_()
    kl = torch.tensor([[0.25, 0.5, 2.0]]).double().requires_grad_()
    rao_blackwell(kl, logp).sum().backward()
    assert logp.grad.tolist() == [[2.5, 2.0, 0.0]]
    assert kl.grad.tolist() == [[1.0, 1.0, 1.0]]


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=4),
    st.integers(0, 1000),
    st.sampled_from(["k1", "k2", "k3", "exact"]),
)
def test_padding_does_not_change_value_or_gradient(lengths, seed, estimator):
    """Ragged rows padded with −inf and NaN equal each row alone, unpadded."""
    rng = np.random.default_rng(seed)
    width, fill = max(lengths) + 2, [-math.inf, math.nan]
    plain = [torch.from_numpy(rng.normal(size=(4, n)) - 2) for n in lengths]
    padded = torch.stack(
        [
            torch.cat([row, torch.tensor([fill[i % 2] for i in range(width - row.shape[1])]).double().expand(4, -1)], 1)
            for row in plain
        ],
        1,
    )
    mask = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    logp = padded[0].clone().requires_grad_()
    together = sequence_estimate(estimator, logp, padded[1], mask, padded[2], exact_kl=padded[3])
    together.sum().backward()
    for i, row in enumerate(plain):
        alone = row[0][None].clone().requires_grad_()
        value = sequence_estimate(estimator, alone, row[1][None], None, row[2][None], exact_kl=row[3][None])
        value.sum().backward()
        assert together[i].item() == pytest.approx(value.item(), abs=1e-12)
        np.testing.assert_allclose(logp.grad[i, : lengths[i]], alone.grad[0], atol=1e-12)
        assert (logp.grad[i, lengths[i] :] == 0).all()


def test_holes_inside_a_sequence_are_skipped():
    """Tool output between two turns: its tokens count neither as KL nor as score."""
    logp = torch.tensor([[-1.0, math.nan, -2.0]]).double().requires_grad_()
    ref = torch.tensor([[-2.0, -math.inf, -5.0]]).double()
    value = k1_to_go(logp, ref, torch.tensor([[True, False, True]]))
    value.sum().backward()
    assert value.item() == 4.0
    assert logp.grad.tolist() == [[4.0, 0.0, 3.0]]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_impossible_tokens_do_not_make_the_sequence_ratio_nan(estimator):
    logp = torch.tensor([[-math.inf, -math.inf, -1.0]], requires_grad=True)
    other = torch.tensor([[-1.0, -1.0, -1.0]])
    value = sequence_estimate(estimator, logp, other, None, other)
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert torch.isfinite(logp.grad).all()


def test_bad_input():
    x = torch.zeros(1, 2)
    with pytest.raises(KeelError, match="exact needs its values per token"):
        sequence_estimate("exact", x, x)
    with pytest.raises(KeelError, match="unknown sequence-level estimator 'k4': did you mean 'k"):
        sequence_estimate("k4", x, x)
    with pytest.raises(KeelError, match=r"kl_per_token has shape \(1, 3\)"):
        rao_blackwell(torch.zeros(1, 3), x)
    with pytest.raises(KeelError, match="boolean"):
        k1_to_go(x, x, torch.ones(1, 2))
