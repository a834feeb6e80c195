"""Full-vocabulary KL in both directions, the tail bucket, and the unbiased top-k form."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel.base.errors import KeelError
from keel.kl import exact_kl, topk_kl, topk_kl_unbiased
from keel.kl.exact import jsd

INF = math.inf


def distributions(seed, vocabulary=6, scale=1.5, rows=1):
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=scale, size=(2, rows, vocabulary))
    return logits, np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


def logprobs(logits):
    return torch.log_softmax(logits, -1)


def test_literal_values_in_both_directions():
    policy, ref = (
        torch.tensor([0.5, 0.5], dtype=torch.float64).log(),
        torch.tensor([0.25, 0.75], dtype=torch.float64).log(),
    )
    assert exact_kl(policy, ref).item() == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), abs=1e-15)
    reverse = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert exact_kl(policy, ref, "ref_policy").item() == pytest.approx(reverse, abs=1e-15)


@given(st.integers(0, 10_000), st.sampled_from([2, 3, 17]))
def test_matches_numpy_and_is_never_negative(seed, vocabulary):
    logits, (pi, p) = distributions(seed, vocabulary, rows=3)
    policy, ref = (logprobs(torch.from_numpy(x)) for x in logits)
    np.testing.assert_allclose(exact_kl(policy, ref), (pi * np.log(pi / p)).sum(-1), atol=1e-13)
    np.testing.assert_allclose(exact_kl(policy, ref, "ref_policy"), (p * np.log(p / pi)).sum(-1), atol=1e-13)
    assert (exact_kl(policy, ref) >= -1e-15).all()
    assert exact_kl(policy, policy).abs().max() == 0


@pytest.mark.parametrize("direction", ["policy_ref", "ref_policy"])
def test_gradient_matches_the_closed_form_in_the_logits(direction):
    logits, (pi, p) = distributions(3)
    theta = torch.from_numpy(logits[0]).requires_grad_()
    exact_kl(logprobs(theta), logprobs(torch.from_numpy(logits[1])), direction).sum().backward()
    kl = (pi * np.log(pi / p)).sum(-1, keepdims=True)
    expected = pi * (np.log(pi / p) - kl) if direction == "policy_ref" else pi - p
    np.testing.assert_allclose(theta.grad.numpy(), expected, atol=1e-13)


@pytest.mark.parametrize("direction", ["policy_ref", "ref_policy"])
def test_impossible_tokens_in_both_cost_nothing(direction):
    policy = torch.tensor([0.5, 0.5, 0.0]).log().requires_grad_()
    ref = torch.tensor([0.25, 0.75, 0.0]).log()
    value = exact_kl(policy, ref, direction)
    assert value.item() == pytest.approx(exact_kl(policy[:2], ref[:2], direction).item(), abs=1e-7)
    value.backward()
    assert torch.isfinite(policy.grad).all()


def test_a_token_the_reference_forbids_costs_a_great_deal_but_not_nan():
    value = exact_kl(torch.tensor([0.5, 0.5]).log(), torch.tensor([1.0, 0.0]).log())
    assert value > 1e30


def test_half_precision_is_widened():
    policy = torch.log_softmax(torch.randn(2, 64, generator=torch.Generator().manual_seed(0)), -1).bfloat16()
    ref = torch.log_softmax(torch.randn(2, 64, generator=torch.Generator().manual_seed(1)), -1).bfloat16()
    got = exact_kl(policy, ref)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, exact_kl(policy.double(), ref.double()).float(), rtol=1e-5, atol=1e-6)


@given(st.integers(0, 10_000), st.integers(2, 9), st.data())
def test_tail_bucket_lies_between_zero_and_exact(seed, vocabulary, data):
    k = data.draw(st.integers(1, vocabulary - 1))
    logits, (pi, p) = distributions(seed, vocabulary, rows=2)
    policy, ref = (logprobs(torch.from_numpy(x)) for x in logits)
    got = topk_kl(policy, ref, k).numpy()
    assert (got >= -1e-14).all()
    assert (got <= exact_kl(policy, ref).numpy() + 1e-14).all()
    for row in range(2):
        head = np.argsort(-pi[row])[:k]
        rest = np.setdiff1d(np.arange(vocabulary), head)
        buckets_pi, buckets_p = (
            np.append(pi[row, head], pi[row, rest].sum()),
            np.append(p[row, head], p[row, rest].sum()),
        )
        assert got[row] == pytest.approx((buckets_pi * np.log(buckets_pi / buckets_p)).sum(), abs=1e-12)


def test_head_alone_would_be_negative_and_the_bucket_repairs_it():
    policy, ref = (
        torch.tensor([0.4, 0.3, 0.3], dtype=torch.float64).log(),
        torch.tensor([0.8, 0.1, 0.1], dtype=torch.float64).log(),
    )
    assert 0.4 * math.log(0.4 / 0.8) < 0
    assert topk_kl(policy, ref, 1).item() == pytest.approx(0.4 * math.log(0.5) + 0.6 * math.log(3), abs=1e-14)


def test_tail_bucket_with_all_but_one_token_is_exact():
    logits, _ = distributions(5)
    policy, ref = (logprobs(torch.from_numpy(x)) for x in logits)
    torch.testing.assert_close(topk_kl(policy, ref, 5), exact_kl(policy, ref), rtol=0, atol=1e-14)


def test_tail_of_impossible_tokens_is_finite():
    policy = torch.tensor([0.5, 0.5, 0.0, 0.0]).log().requires_grad_()
    ref = torch.tensor([0.25, 0.25, 0.25, 0.25]).log()
    value = topk_kl(policy, ref, 2)
    assert value.item() == pytest.approx(math.log(2), abs=1e-6)
    value.backward()
    assert torch.isfinite(policy.grad).all()


def test_tail_bucket_is_stable_when_the_head_has_almost_all_the_mass():
    policy = logprobs(torch.tensor([[0.0, -30.0, -31.0]]))
    ref = logprobs(torch.tensor([[0.0, -32.0, -30.0]]))
    exact = topk_kl(policy.double(), ref.double(), 1).item()
    assert topk_kl(policy, ref, 1).item() == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("seed", range(4))
def test_unbiased_top_k_by_enumeration(seed, k):
    """Σ_y π(y)·value(y) = KL and Σ_y π(y)·∇value(y) = ∇KL."""
    logits, (pi, p) = distributions(seed)
    ref = logprobs(torch.from_numpy(logits[1]))
    mean, gradient = 0.0, np.zeros(6)
    for y in range(6):
        theta = torch.from_numpy(logits[0]).requires_grad_()
        value = topk_kl_unbiased(logprobs(theta), ref, torch.tensor([y]), k).sum()
        value.backward()
        mean += pi[0, y] * value.item()
        gradient += pi[0, y] * theta.grad.numpy()[0]
    kl = (pi * np.log(pi / p)).sum()
    assert mean == pytest.approx(kl, abs=1e-12)
    np.testing.assert_allclose(gradient, (pi * (np.log(pi / p) - kl))[0], atol=1e-10)


def test_unbiased_top_k_of_several_tokens_is_that_of_each():
    logits, _ = distributions(0)
    policy, ref = (logprobs(torch.from_numpy(each)) for each in logits)
    every = topk_kl_unbiased(policy, ref, torch.arange(6).unsqueeze(0), 2)
    each = [topk_kl_unbiased(policy, ref, torch.tensor([y]), 2) for y in range(6)]
    assert torch.equal(every[0], torch.cat(each))


@pytest.mark.parametrize("weight", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", range(4))
def test_jsd_against_its_definition(seed, weight):
    logits, (pi, p) = distributions(seed)
    mixture = (1 - weight) * pi + weight * p
    expected = (1 - weight) * (pi * np.log(pi / mixture)).sum(-1) + weight * (p * np.log(p / mixture)).sum(-1)
    policy, ref = (logprobs(torch.from_numpy(each)) for each in logits)
    np.testing.assert_allclose(jsd(policy, ref, weight).numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(jsd(policy, ref, weight).numpy(), jsd(ref, policy, 1 - weight).numpy(), rtol=1e-12)
    assert jsd(policy, policy, weight).abs().max() < 1e-15


def test_jsd_tends_to_either_kl_and_is_at_most_log_2():
    logits, _ = distributions(1)
    policy, ref = (logprobs(torch.from_numpy(each)) for each in logits)
    small = 1e-5
    np.testing.assert_allclose(jsd(policy, ref, small) / small, exact_kl(policy, ref, "ref_policy"), rtol=1e-3)
    np.testing.assert_allclose(jsd(policy, ref, 1 - small) / small, exact_kl(policy, ref), rtol=1e-3)
    apart = torch.tensor([[0.0, -80.0]], dtype=torch.float64)
    assert jsd(apart, apart.flip(-1), 0.5).item() == pytest.approx(math.log(2))


def test_unbiased_top_k_of_a_head_token_is_the_head_alone():
    pi, p = torch.tensor([[0.6, 0.3, 0.1]], dtype=torch.float64), torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.float64)
    head = 0.6 * math.log(3)
    assert topk_kl_unbiased(pi.log(), p.log(), torch.tensor([0]), 1).item() == pytest.approx(head, abs=1e-14)
    tail = topk_kl_unbiased(pi.log(), p.log(), torch.tensor([2]), 1).item()
    assert tail == pytest.approx(head + math.log(0.2), abs=1e-14)


TWO = torch.zeros(1, 2)
MISTAKES = [
    (lambda: exact_kl(TWO, torch.zeros(1, 3)), "ref_logprobs has shape (1, 3) but policy_logprobs has (1, 2)"),
    (lambda: exact_kl(TWO, TWO, "sideways"), "unknown direction 'sideways': known: policy_ref, ref_policy"),
    (lambda: exact_kl(TWO.long(), TWO), "policy_logprobs must be floating point"),
    (lambda: jsd(TWO, TWO, 1.0), "the JSD's weight is 1: it must be between 0 and 1"),
    (lambda: topk_kl(TWO, TWO, 0), "k is 0: it must be from 1 to 1"),
    (lambda: topk_kl(TWO, TWO, 2), "k is 2"),
    (lambda: topk_kl_unbiased(TWO, TWO, torch.tensor([0.0]), 1), "tokens must be integer ids of shape (1,)"),
    (lambda: topk_kl_unbiased(TWO, TWO, torch.tensor([0, 1]), 1), "tokens must be integer ids of shape (1,)"),
]


@pytest.mark.parametrize(("call", "says"), MISTAKES, ids=[says for _, says in MISTAKES])
def test_mistakes_are_one_line(call, says):
    with pytest.raises(KeelError) as caught:
        call()
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
