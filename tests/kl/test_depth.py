"""KL by depth: stretches by hand, and the mean over tokens put together again from its parts."""

import pytest
import torch

from keel.kl.measure import depth_bin, depth_metrics, mean_by_depth, occupied_bins, positions


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
