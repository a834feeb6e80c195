"""Reported KL: names, values by hand, the cluster standard error, and masks of every kind."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel.base.errors import KeelError
from keel.kl import measure_kl, token_statistics
from keel.kl.measure import MaskIndex, depth_bin, depth_metrics, mean_by_depth, occupied_bins, positions, prefix_gap
from keel.verify.losses import completions
from keel.verify.oracle import STALE, sequence_world

STATISTICS = {"mean", "se", "min", "max", "p95"}
MASK = torch.tensor([[True, True, False], [True, False, False]])
LOGP = torch.tensor([[-1.0, -2.0, math.nan], [-3.0, -math.inf, 0.0]])
REF = torch.tensor([[-2.0, -1.5, 0.0], [-33.0, math.nan, 0.0]])  # d = −1, ½ and −30, clamped to −20


def test_names():
    names = {f"kl/policy_ref/{k}/{s}" for k in ("k1", "k2", "k3") for s in STATISTICS}
    names |= {f"kl/policy_ref/sequence/{s}" for s in ("mean", "se", "p95")}
    names |= {"kl/policy_ref/overlap", "kl/clamped_fraction"}
    assert set(measure_kl(LOGP, REF, MASK)) == names
    exact = measure_kl(LOGP, REF, MASK, exact_kl=torch.ones(2, 3))
    assert set(exact) == names | {f"kl/policy_ref/exact/{s}" for s in STATISTICS}


def test_values_by_hand():
    got = measure_kl(LOGP, REF, MASK, exact_kl=torch.tensor([[1.0, 2.0, math.nan], [6.0, math.inf, math.nan]]))
    u = np.array([1.0, -0.5, 20.0])
    for name, values in (("k1", u), ("k2", u**2 / 2), ("k3", np.exp(-u) - 1 + u), ("exact", np.array([1.0, 2.0, 6.0]))):
        assert got[f"kl/policy_ref/{name}/mean"] == pytest.approx(values.mean(), rel=1e-6)
        assert got[f"kl/policy_ref/{name}/min"] == pytest.approx(values.min(), rel=1e-6)
        assert got[f"kl/policy_ref/{name}/max"] == pytest.approx(values.max(), rel=1e-6)
        assert got[f"kl/policy_ref/{name}/p95"] == pytest.approx(np.quantile(values, 0.95), rel=1e-6)
    sums = np.array([0.5, 20.0])
    assert got["kl/policy_ref/sequence/mean"] == pytest.approx(sums.mean())
    assert got["kl/policy_ref/sequence/se"] == pytest.approx(sums.std(ddof=1) / math.sqrt(2))
    assert got["kl/policy_ref/sequence/p95"] == pytest.approx(np.quantile(sums, 0.95))
    assert got["kl/clamped_fraction"] == pytest.approx(1 / 3)
    assert got["kl/policy_ref/overlap"] == pytest.approx(np.minimum(1, np.exp(-u)).mean())


@pytest.mark.parametrize("scale", [0.0, 1.0, 5.0])
def test_the_overlap_is_the_probability_that_both_share(scale):
    """By enumeration, also on samples from another policy."""
    torch.manual_seed(0)
    policy, reference, sampler = (scale * torch.randn(3, 9, dtype=torch.float64)).log_softmax(-1)
    shared = torch.minimum(policy.exp(), reference.exp()).sum().item()
    mask = torch.ones(9, 1, dtype=torch.bool)
    for drawn, weights in ((policy, None), (sampler, (policy - sampler).exp())):
        values = [
            measure_kl(policy[i].view(1, 1), reference[i].view(1, 1), mask[:1], clamp=None,
                       weights=None if weights is None else weights[i].view(1, 1))["kl/policy_ref/overlap"]
            for i in range(9)
        ]  # fmt: skip
        assert (drawn.exp() * torch.tensor(values, dtype=torch.float64)).sum().item() == pytest.approx(shared, abs=1e-9)


def test_standard_error_by_hand():
    """Residual sums per completion, mean 3: (1−3)+(2−3) = −3 and 6−3 = 3; se² = 2/1·18/9."""
    values = torch.tensor([[1.0, 2.0, 0.0], [6.0, 0.0, 0.0]])
    assert token_statistics(values, MASK)["se"] == pytest.approx(2.0)


def test_standard_error_of_one_token_each_is_the_textbooks():
    values = torch.tensor([[1.0], [2.0], [4.0], [7.0]])
    got = token_statistics(values, torch.ones(4, 1, dtype=torch.bool))
    assert got["se"] == pytest.approx(np.std([1, 2, 4, 7], ddof=1) / 2)


def test_standard_error_agrees_with_a_bootstrap_over_completions():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 12, size=80)
    mask = np.arange(12)[None] < lengths[:, None]
    values = (rng.normal(size=(80, 1)) + 0.5 * rng.normal(size=(80, 12))) * mask  # tokens of a row move together
    rows = rng.integers(0, 80, size=(4000, 80))
    means = values.sum(1)[rows].sum(1) / lengths[rows].sum(1)
    se = token_statistics(torch.from_numpy(values), torch.from_numpy(mask))["se"]
    assert se == pytest.approx(means.std(), rel=0.1)
    naive = values[mask].std() / math.sqrt(mask.sum())
    assert se > 1.5 * naive


def test_completions_without_tokens_do_not_count():
    values, mask = torch.tensor([[1.0, 2.0, 0.0], [6.0, 0.0, 0.0]]), MASK
    padded = token_statistics(
        torch.cat([values, torch.full((3, 3), math.nan)]), torch.cat([mask, mask.new_zeros(3, 3)])
    )
    assert padded == token_statistics(values, mask)


def test_an_empty_mask_reports_zeros():
    got = measure_kl(LOGP, REF, torch.zeros_like(MASK), exact_kl=torch.full((2, 3), math.nan))
    assert set(got.values()) == {0.0}


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 5))
def test_nothing_is_nan_under_any_mask(seed, rows, width):
    g = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, width, generator=g) < 0.4
    logp, ref = (-torch.rand(rows, width, generator=g) * 5 for _ in range(2))
    hole = torch.rand(rows, width, generator=g)
    logp = torch.where(mask, logp, torch.where(hole < 0.5, -math.inf, math.nan))
    for name, value in measure_kl(logp, ref, mask).items():
        assert math.isfinite(value), name


def test_half_precision_is_measured_in_fp32():
    logp, ref = (torch.tensor([[-9.0, -3.5]]).bfloat16(), torch.tensor([[-1.25, -3.75]]).bfloat16())
    mask = torch.ones(1, 2, dtype=torch.bool)
    got = measure_kl(logp, ref, mask)["kl/policy_ref/k3/mean"]
    assert got == pytest.approx(((math.exp(7.75) - 8.75) + (math.exp(-0.25) - 0.75)) / 2, rel=1e-6)


def test_no_gradient_is_kept():
    logp = torch.tensor([[-1.0]], requires_grad=True)
    got = measure_kl(logp, torch.tensor([[-2.0]]), torch.ones(1, 1, dtype=torch.bool))
    assert all(isinstance(value, float) for value in got.values())


def test_bad_input():
    with pytest.raises(KeelError, match="boolean"):
        measure_kl(LOGP, REF, MASK.float())
    with pytest.raises(KeelError, match="ref_logp has shape"):
        measure_kl(LOGP, REF[:, :2], MASK)
    with pytest.raises(KeelError, match="action_mask has shape"):
        token_statistics(torch.zeros(2, 2), MASK)


def test_weights_by_hand():
    """Means of w·k and their own spread; p95 as if each token were there w times; the exact KL takes no weight."""
    weights = torch.tensor([[2.0, 1.0, math.nan], [3.0, math.nan, 7.0]])
    exact = torch.tensor([[1.0, 2.0, math.nan], [6.0, math.inf, math.nan]])
    plain, got = (measure_kl(LOGP, REF, MASK, exact_kl=exact, weights=w) for w in (None, weights))
    u, w = np.array([1.0, -0.5, 20.0]), np.array([2.0, 1.0, 3.0])
    for name, values in (("k1", u), ("k2", u**2 / 2), ("k3", np.exp(-u) - 1 + u)):
        terms, mean = w * values, (w * values).mean()
        residuals = np.array([(terms[:2] - mean).sum(), (terms[2:] - mean).sum()])
        assert got[f"kl/policy_ref/{name}/mean"] == pytest.approx(mean, rel=1e-6)
        assert got[f"kl/policy_ref/{name}/se"] == pytest.approx(math.sqrt(2 * (residuals**2).sum()) / 3, rel=1e-6)
        assert got[f"kl/policy_ref/{name}/min"] == pytest.approx(values.min(), rel=1e-6)
        assert got[f"kl/policy_ref/{name}/max"] == pytest.approx(values.max(), rel=1e-6)
    assert got["kl/policy_ref/sequence/mean"] == pytest.approx((1.5 + 60.0) / 2)
    for part in STATISTICS:
        assert got[f"kl/policy_ref/exact/{part}"] == plain[f"kl/policy_ref/exact/{part}"]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12).filter(any), st.integers(0, 1000))
def test_the_weighted_p95_counts_a_token_as_often_as_it_weighs(counts, seed):
    rng = np.random.default_rng(seed)
    values, weights = rng.normal(size=len(counts)), np.array(counts, dtype=float)
    logp, mask = torch.from_numpy(values)[None], torch.ones(1, len(counts), dtype=torch.bool)
    got = measure_kl(logp, torch.zeros_like(logp), mask, weights=torch.from_numpy(weights)[None])
    expected = np.quantile(np.repeat(values, counts), 0.95, method="inverted_cdf")
    assert got["kl/policy_ref/k1/p95"] == pytest.approx(expected)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_weighted_means_and_their_errors_on_samples_of_an_older_policy(name):
    """400 batches from μ: each mean is the policy's KL at μ's prefixes, and spreads as its standard error says."""
    every = completions(sequence_world(scale=0.5), STALE)
    logp, mu, ref, exact = (x.detach() for x in (every.logp, every.sample, every.ref, every.exact))
    lengths = every.mask.double().sum(-1)
    expected = (every.weights @ exact.sum(-1) / (every.weights @ lengths)).item()
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(every.weights, 400 * 64, replacement=True, generator=generator).view(400, 64)
    weights = (logp - mu).exp()
    batches = [measure_kl(logp[i], ref[i], every.mask[i], weights=weights[i], clamp=None) for i in drawn]
    means, errors = (np.array([b[f"kl/policy_ref/{name}/{part}"] for b in batches]) for part in ("mean", "se"))
    assert abs(means.mean() - expected) < 4 * means.std() / math.sqrt(len(means))
    assert math.sqrt((errors**2).mean()) == pytest.approx(means.std(), rel=0.1)


def test_the_prefix_gap_by_hand():
    """Two tokens: the first has no prefix, the second's weighs w₀ more than it is counted."""
    logp, ref = torch.tensor([[-1.0, -2.0, 0.0]]), torch.tensor([[-1.5, -2.5, 0.0]])
    mask = torch.tensor([[True, True, False]])
    got = prefix_gap(logp, ref, torch.tensor([[-1.5, -1.8, 9.0]]), mask, MaskIndex.of(mask))
    w0, w1 = math.exp(0.5), math.exp(-0.2)
    assert float(got["kl/policy_ref/prefix_gap/mean"]) == pytest.approx((w0 - 1) * w1 * 0.5)


def test_stretches_double():
    where = torch.tensor([0, 63, 64, 127, 128, 255, 256, 8191, 8192])
    assert depth_bin(where).tolist() == [0, 0, 64, 64, 128, 128, 256, 4096, 8192]


def test_means_and_errors_are_those_of_the_completions():
    prompts = [60, 10, 120]
    where = positions(prompts, 8)
    starts = (0, 64)
    assert where[0].tolist() == [60, 61, 62, 63, 64, 65, 66, 67]
    values = torch.arange(24, dtype=torch.float64).reshape(3, 8)
    mask = torch.ones(3, 8, dtype=torch.bool)
    mask[2, 4:] = False
    found = mean_by_depth(values, mask, where, starts)
    shallow, deep = [0, 1, 2, 3, *range(8, 16)], [4, 5, 6, 7, *range(16, 20)]
    assert found[0][0].item() == pytest.approx(sum(shallow) / 12)
    assert found[64][0].item() == pytest.approx(sum(deep) / 8)
    mean = sum(shallow) / 12  # a ratio estimator with two completions
    residuals = [sum(x - mean for x in part) for part in ([0, 1, 2, 3], range(8, 16))]
    assert found[0][1].item() == pytest.approx((2 * sum(r * r for r in residuals)) ** 0.5 / 12)
    together = (12 * found[0][0] + 8 * found[64][0]) / 20
    assert together.item() == pytest.approx(values[mask].mean().item())


def test_one_stretch_is_no_metric():
    where, mask = positions([3], 5), torch.ones(1, 5, dtype=torch.bool)
    assert depth_metrics(torch.ones(1, 5), mask, where, occupied_bins(where, mask)) == {}


def test_a_stretch_needs_four_completions():
    where = positions([60, 60, 60, 60, 124], 8)
    mask = torch.ones(5, 8, dtype=torch.bool)
    assert occupied_bins(where, mask) == (0, 64)  # 64 also holds tokens of the fifth, 128 of no other
    mask[0, 4:] = mask[1, 4:] = False
    assert occupied_bins(where, mask) == (0,)
    assert occupied_bins(where, ~mask & mask) == ()


def test_metrics_are_named_by_where_a_stretch_begins():
    where, mask = positions([62] * 4, 4), torch.tensor([[True, True, False, True]] * 4)
    metrics = depth_metrics(torch.tensor([[1.0, 3.0, 100.0, 5.0]] * 4), mask, where, occupied_bins(where, mask))
    named = {name: float(value) for name, value in metrics.items() if name.endswith("mean")}
    assert named == {"kl/sampler_policy/depth_0/mean": 2.0, "kl/sampler_policy/depth_64/mean": 5.0}
