"""Rewards to advantages: literals, TRL's formula, zero variance, leave-one-out, ragged groups."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel.base.errors import KeelError
from keel.losses import advantages, group_statistics, zero_variance

REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, 3.0, 5.0], dtype=torch.float64)
GROUP = torch.tensor([0, 0, 0, 0, 1, 1])


@pytest.mark.parametrize(
    ("baseline", "scale", "expected"),
    [
        ("group_mean", "none", [0.5, -0.5, -0.5, 0.5, -1.0, 1.0]),
        ("group_mean", "group", [0.5 / 0.57745027, -0.5 / 0.57745027, -0.5 / 0.57745027, 0.5 / 0.57745027]),
        ("leave_one_out", "none", [2 / 3, -2 / 3, -2 / 3, 2 / 3, -2.0, 2.0]),
        ("none", "none", [1.0, 0.0, 0.0, 1.0, 3.0, 5.0]),
    ],
)
def test_literal_values(baseline, scale, expected):
    got = advantages(REWARDS, GROUP, baseline=baseline, scale=scale)[: len(expected)]
    np.testing.assert_allclose(got, expected, atol=1e-8)


def test_second_group_by_hand():
    np.testing.assert_allclose(advantages(REWARDS, GROUP)[4:], np.array([-1, 1]) / (2**0.5 + 1e-4), atol=1e-14)


def test_statistics_by_hand():
    mean, std, size = group_statistics(REWARDS, GROUP)
    np.testing.assert_allclose(mean, [0.5] * 4 + [4] * 2)
    np.testing.assert_allclose(std, [3**-0.5] * 4 + [2**0.5] * 2)
    assert size.tolist() == [4] * 4 + [2] * 2


@given(st.integers(0, 10_000), st.integers(2, 6), st.integers(1, 5), st.sampled_from(["group", "batch", "none"]))
def test_equals_trls_formula(seed, generations, prompts, scale):
    rewards = torch.from_numpy(np.random.default_rng(seed).normal(size=prompts * generations))
    grouped = rewards.view(-1, generations)
    expected = rewards - grouped.mean(1).repeat_interleave(generations)
    if scale == "group":
        expected = expected / (grouped.std(1).repeat_interleave(generations) + 1e-4)
    elif scale == "batch":
        expected = expected / (rewards.std() + 1e-4)
    group = torch.arange(prompts).repeat_interleave(generations)
    torch.testing.assert_close(advantages(rewards, group, scale=scale), expected, rtol=0, atol=1e-10)


@st.composite
def ragged(draw):
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    labels = np.repeat(draw(st.permutations(range(10, 10 + len(sizes)))), sizes)
    order = draw(st.permutations(range(len(labels))))
    rewards = draw(st.lists(st.floats(-3, 3), min_size=len(labels), max_size=len(labels)))
    return torch.tensor(rewards, dtype=torch.float64), torch.from_numpy(labels[list(order)].copy())


@given(ragged())
def test_ragged_groups_in_any_order(data):
    rewards, group = data
    got = advantages(rewards, group).numpy()
    r, labels = rewards.numpy(), group.numpy()
    for label in set(labels):
        mine = r[labels == label]
        std = mine.std(ddof=1) if len(mine) > 1 else 0.0
        np.testing.assert_allclose(got[labels == label], (mine - mine.mean()) / (std + 1e-4), atol=1e-9)


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_without_a_baseline_the_deviation_is_from_zero(scale):
    """R / √mean(R²): a unanimous group is as large as any other, where R / std is 1/ε of it."""
    rewards, group = torch.tensor([1.0, 1.0, 1.0, 0.0, 3.0, 4.0]), torch.tensor([0, 0, 0, 1, 1, 1])
    got = advantages(rewards, group, baseline="none", scale=scale, epsilon=0.0)
    by = {"group": [1.0] * 3 + [(25 / 3) ** 0.5] * 3, "batch": [(28 / 6) ** 0.5] * 6}[scale]
    assert got.tolist() == pytest.approx((rewards / torch.tensor(by)).tolist())
    same = advantages(torch.full((4,), 0.7), torch.zeros(4, dtype=torch.long), baseline="none", scale=scale)
    assert same.tolist() == pytest.approx([1.0] * 4, rel=1e-3)


@given(st.lists(st.floats(-10, 10), min_size=4, max_size=4), st.sampled_from(["group", "batch"]))
def test_no_advantage_is_larger_than_its_group(values, scale):
    """With any baseline |A| stays below √n · n/(n−1): no scaling turns agreement into size."""
    rewards, group = torch.tensor(values, dtype=torch.float64), torch.zeros(4, dtype=torch.long)
    for baseline in ("group_mean", "leave_one_out", "none"):
        assert advantages(rewards, group, baseline=baseline, scale=scale).abs().max() <= 4**0.5 * 4 / 3


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e6 + 0.1])
@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_rewards_give_exactly_zero(value, baseline, scale, dtype):
    """0.1 summed seven times and divided by seven is not 0.1: the rounding must not be divided by ε."""
    rewards, group = torch.tensor([value] * 7 + [0.0, 1.0], dtype=dtype), torch.tensor([0] * 7 + [1] * 2)
    got = advantages(rewards, group, baseline=baseline, scale=scale)
    assert (got[:7] == 0).all()
    assert (got[7:] != 0).all()


def test_single_completion_has_no_advantage():
    assert advantages(torch.tensor([3.0]), torch.tensor([0])).tolist() == [0.0]
    assert advantages(torch.tensor([3.0]), torch.tensor([0]), scale="batch").tolist() == [0.0]


def test_half_precision_rewards_are_widened():
    assert advantages(torch.tensor([1.0, 0.0]).bfloat16(), torch.tensor([0, 0])).dtype == torch.float32


def test_empty_batch():
    assert advantages(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0,)


def test_zero_variance_marks_whole_groups():
    rewards, group = torch.tensor([1.0, 1.0, 0.0, 1.0, 2.0]), torch.tensor([5, 5, 2, 2, 9])
    assert zero_variance(rewards, group).tolist() == [True, True, False, False, True]


def test_whole_number_rewards_work_like_floating_ones():
    rewards, group = torch.tensor([1, 1, 0, 1]), torch.tensor([0, 0, 1, 1])
    torch.testing.assert_close(advantages(rewards, group), advantages(rewards.float(), group))
    assert zero_variance(rewards, group).tolist() == [True, True, False, False]


MISTAKES = [
    (lambda: advantages(REWARDS, GROUP, baseline="mean"), "unknown baseline 'mean': did you mean 'group_mean'?"),
    (lambda: advantages(REWARDS, GROUP, scale="std"), "unknown scale_rewards 'std'"),
    (lambda: advantages(REWARDS, GROUP[:3]), "must both be [B]"),
    (lambda: advantages(REWARDS[:1], GROUP[:1], baseline="leave_one_out"), "raise rollout.num_generations"),
]


@pytest.mark.parametrize(("call", "says"), MISTAKES, ids=[says for _, says in MISTAKES])
def test_mistakes_are_one_line(call, says):
    with pytest.raises(KeelError) as caught:
        call()
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
