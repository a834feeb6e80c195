"""From tokens to one number: literals, and the same loss under any split into microbatches."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel.base.errors import KeelError
from keel.losses import REDUCTIONS, Denominators, count_denominators
from keel.losses.reductions import get_reduction

VALUES = torch.tensor([[1.0, 2.0, 6.0], [4.0, math.nan, 8.0], [math.inf, math.nan, -math.inf]])
MASK = torch.tensor([[True, True, True], [True, False, True], [False, False, False]])


@pytest.mark.parametrize(
    ("name", "expected"),
    [("sequence_mean", (3 + 6 + 0) / 3), ("token_mean", 21 / 5), ("constant", 21 / 30)],
)
def test_literal_values(name, expected):
    got = REDUCTIONS[name](VALUES, MASK, count_denominators(MASK, 10))
    assert got.item() == pytest.approx(expected, rel=1e-6)


def test_counts_by_hand():
    assert count_denominators(MASK, 7) == Denominators(3.0, 5.0, 7)


def test_a_share_of_the_minibatch_by_hand():
    """4 sequences and 10 tokens in all, of which this process holds 2 and 4."""
    by = Denominators(4.0, 10.0, 5)
    values, mask = torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bool)
    got = {name: reduce(values, mask, by).item() for name, reduce in REDUCTIONS.items()}
    expected = {"sequence_mean": 0.5, "token_mean": 0.4, "constant": 0.2}
    assert got == pytest.approx(expected)


@given(st.integers(0, 10_000), st.sampled_from(sorted(REDUCTIONS)), st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_any_split_into_microbatches_gives_the_same_loss_and_gradient(seed, name, sizes):
    g = torch.Generator().manual_seed(seed)
    shape = (sum(sizes), 5)
    mask = torch.rand(shape, generator=g) < 0.6
    whole = torch.randn(shape, generator=g, dtype=torch.float64).requires_grad_()
    parts = whole.detach().clone().requires_grad_()
    by = count_denominators(mask, 9)
    loss = REDUCTIONS[name](whole, mask, by)
    loss.backward()
    total = 0.0
    for values, piece in zip(parts.split(sizes), mask.split(sizes), strict=True):
        part = REDUCTIONS[name](values, piece, by)
        part.backward(retain_graph=True)
        total += part.item()
    assert total == pytest.approx(loss.item(), abs=1e-12)
    torch.testing.assert_close(parts.grad, whole.grad, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", sorted(REDUCTIONS))
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (2, 0)])
def test_empty_is_zero_with_a_zero_gradient(name, shape):
    values = torch.full(shape, math.nan, requires_grad=True)
    mask = torch.zeros(shape, dtype=torch.bool)
    loss = REDUCTIONS[name](values, mask, count_denominators(mask, 4))
    loss.backward()
    assert loss.item() == 0
    assert (values.grad == 0).all()


def test_bad_input():
    with pytest.raises(KeelError, match=r"set rollout\.max_completion_length"):
        REDUCTIONS["constant"](VALUES, MASK, count_denominators(MASK))
    with pytest.raises(KeelError, match="unknown reduction 'token_men': did you mean 'token_mean'"):
        get_reduction("token_men")
    with pytest.raises(KeelError, match="boolean"):
        count_denominators(MASK.float())
