"""Values, numerics, masks and bad input of k1, k2, k3, abs."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from keel.base.errors import KeelError
from keel.kl import ESTIMATORS, estimate, importance_ratio, k1, k2, k3, log_ratio, masked_mean, reward_to_go

INF, NAN = math.inf, math.nan


def rows(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("k1", [-1.0, 0.0, 0.5]),
        ("k2", [0.5, 0.0, 0.125]),
        ("k3", [0.718281828459045, 0.0, 0.106530659712633]),  # e − 2, 0, e^−½ − ½
        ("abs", [1.0, 0.0, 0.5]),
    ],
)
def test_literal_values(name, expected):
    logp, ref = rows([-2.0, -0.7, -1.0], dtype=torch.float64), rows([-1.0, -0.7, -1.5], dtype=torch.float64)
    torch.testing.assert_close(estimate(name, logp, ref)[0], rows(*expected, dtype=torch.float64), rtol=0, atol=1e-14)


def test_registry_is_the_four_estimators():
    assert set(ESTIMATORS) == {"k1", "k2", "k3", "abs"}


@pytest.mark.parametrize(
    ("name", "m", "bias", "spread"),
    [
        ("k1", 0.1, 0.0, 20.0),
        ("k1", 1.0, 0.0, 2.0),
        ("k2", 0.1, 0.0025, math.sqrt(2.01)),
        ("k2", 1.0, 0.25, math.sqrt(3)),
        ("k3", 0.1, 0.0, 1.4166),
        ("k3", 1.0, 0.0, 2 * math.sqrt(math.e - 2)),
    ],
)
def test_gaussian_example_by_quadrature(name, m, bias, spread):
    """N(0,1) against N(m,1): bias and spread relative to m²/2 in closed form; the integral is Gauss-Hermite."""
    x, w = np.polynomial.hermite_e.hermegauss(120)
    w = w / w.sum()
    logp, ref = torch.from_numpy(-0.5 * x**2), torch.from_numpy(-0.5 * (x - m) ** 2)
    value = estimate(name, logp[None], ref[None], clamp=None)[0].numpy()
    mean = (w * value).sum()
    std = math.sqrt((w * (value - mean) ** 2).sum())
    assert mean / (m * m / 2) - 1 == pytest.approx(bias, abs=1e-9)
    assert std / (m * m / 2) == pytest.approx(spread, abs=5e-5 if spread == 1.4166 else 1e-8)


@pytest.mark.parametrize("d", [1e-6, -1e-6, 1e-5, -3e-4])
def test_k3_is_accurate_near_zero_in_fp32(d):
    value = k3(torch.tensor(d, dtype=torch.float32)).item()
    assert value >= 0
    assert abs(value - d * d / 2) <= 2 * np.finfo(np.float32).eps * abs(d)
    naive = (np.exp(np.float32(d)) - np.float32(1) - np.float32(d)).item()
    assert abs(value - d * d / 2) < abs(naive - d * d / 2)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_computed_in_fp32(name, dtype):
    logp, ref = rows([-9.25, -0.125, -3.5]).to(dtype), rows([-1.75, -0.25, -3.25]).to(dtype)
    got = estimate(name, logp, ref)
    assert got.dtype == torch.float32
    assert torch.equal(got, estimate(name, logp.float(), ref.float()))
    assert torch.isfinite(got).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_does_not_overflow_where_fp16_would(dtype):
    got = estimate("k3", rows([-18.0]).to(dtype), rows([-0.5]).to(dtype))
    assert got.item() == pytest.approx(math.exp(17.5) - 18.5, rel=1e-6)


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_fp64_is_kept(name):
    assert estimate(name, rows([-1.0], dtype=torch.float64), rows([-2.0], dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize(("gap", "held"), [(30.0, 20.0), (-30.0, -20.0), (20.0, 20.0), (19.5, 19.5)])
def test_clamp_holds_the_value(gap, held):
    assert log_ratio(rows([0.0]), rows([gap])).d.item() == held


@pytest.mark.parametrize(("name", "slope"), [("k1", 1.0), ("k2", -20.0), ("k3", 1 - math.exp(20.0)), ("abs", -1.0)])
def test_clamp_lets_the_gradient_pass(name, slope):
    logp = rows([-31.0], dtype=torch.float64).requires_grad_()
    estimate(name, logp, rows([-1.0], dtype=torch.float64)).sum().backward()
    assert logp.grad.item() == pytest.approx(slope, rel=1e-12)


def test_clamp_counts_how_often_it_bit():
    ratio = log_ratio(rows([0.0, 0.0, 0.0, 0.0]), rows([20.0, 20.5, -21.0, 99.0]), torch.tensor([[True] * 3 + [False]]))
    assert ratio.clamped.tolist() == [[False, True, True, False]]


def test_no_clamp_keeps_everything():
    ratio = log_ratio(rows([0.0]), rows([50.0]), clamp=None)
    assert ratio.d.item() == 50.0
    assert not ratio.clamped.any()


def test_clamp_is_adjustable():
    assert log_ratio(rows([0.0]), rows([9.0]), clamp=5.0).d.item() == 5.0


BAD = [(-INF, -1.0), (-1.0, -INF), (-INF, -INF), (NAN, -1.0), (-1.0, NAN), (INF, -INF)]


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@pytest.mark.parametrize(("policy", "reference"), BAD)
def test_anything_outside_the_mask_is_zero_in_value_and_gradient(name, policy, reference):
    logp = rows([-1.0, policy]).requires_grad_()
    ref = rows([-1.5, reference]).requires_grad_()
    value = estimate(name, logp, ref, torch.tensor([[True, False]]))
    assert value[0, 1] == 0
    value.sum().backward()
    for grad in (logp.grad, ref.grad):
        assert torch.isfinite(grad).all()
        assert grad[0, 1] == 0
        assert grad[0, 0] != 0


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@pytest.mark.parametrize(("policy", "reference", "d"), [(-INF, -1.0, 20.0), (-1.0, -INF, -20.0), (-INF, -INF, 0.0)])
def test_minus_infinity_inside_the_mask_is_finite(name, policy, reference, d):
    logp = rows([policy]).requires_grad_()
    value = estimate(name, logp, rows([reference]), torch.tensor([[True]]))
    expected = {"k1": -d, "k2": d * d / 2, "k3": math.expm1(d) - d, "abs": abs(d)}[name]
    assert value.item() == pytest.approx(expected, rel=1e-6)
    value.sum().backward()
    assert torch.isfinite(logp.grad).all()


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_nan_inside_the_mask_is_seen(name):
    assert estimate(name, rows([NAN, -1.0]), rows([-1.0, -1.0]), torch.tensor([[True, True]])).isnan().tolist() == [
        [True, False]
    ]


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_empty_mask_gives_zero_value_and_zero_gradient(name):
    logp = rows([-INF, NAN]).requires_grad_()
    mask = torch.zeros(1, 2, dtype=torch.bool)
    mean = masked_mean(estimate(name, logp, rows([NAN, -INF]), mask), mask)
    assert mean.item() == 0
    mean.backward()
    assert logp.grad.tolist() == [[0.0, 0.0]]


def test_masked_mean_by_hand():
    values = rows([1.0, 2.0, NAN], [4.0, INF, 8.0])
    mask = torch.tensor([[True, True, False], [True, False, True]])
    assert masked_mean(values, mask).item() == 3.75


def test_importance_ratio_by_hand():
    logp, old = rows([-1.0, -2.0], [-1.0, NAN]), rows([-1.5, -1.0], [-3.0, -INF])
    mask = torch.tensor([[True, True], [True, False]])
    token = importance_ratio(logp, old, mask)
    torch.testing.assert_close(token, rows([math.exp(0.5), math.exp(-1)], [math.exp(2), 1.0]))
    sequence = importance_ratio(logp, old, mask, level="sequence")
    torch.testing.assert_close(sequence, rows([math.exp(-0.5)], [math.exp(2)]))


def test_capped_ratio_carries_the_caps_gradient_above_the_cap():
    logp = rows([0.0, -2.0]).requires_grad_()
    rho = importance_ratio(logp, rows([-2.0, -1.5]), cap=2.0)
    assert rho.tolist() == [[pytest.approx(2.0), pytest.approx(math.exp(-0.5))]]
    rho.sum().backward()
    assert logp.grad.tolist() == [[pytest.approx(2.0), pytest.approx(math.exp(-0.5))]]


@pytest.mark.parametrize(("logp", "old"), [(-INF, -1.0), (-1.0, -INF), (-INF, -INF)])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_ratio_of_impossible_tokens_is_finite(level, logp, old):
    rho = importance_ratio(rows([logp] * 3), rows([old] * 3), level=level)
    assert torch.isfinite(rho).all()


MISTAKES = [
    (lambda: estimate("k3", rows([0.0]), rows([0.0, 1.0])), "ref_logp has shape (1, 2) but logp has (1, 1)"),
    (lambda: estimate("k3", rows([0.0]), rows([0.0]), torch.ones(1, 1)), "action_mask must be boolean, got float32"),
    (lambda: estimate("k3", rows([0.0]), rows([0.0]), torch.ones(1, 1, dtype=torch.int64)), "action_mask.bool()"),
    (lambda: estimate("k3", rows([0.0]), rows([0.0]), torch.ones(1, dtype=torch.bool)), "action_mask has shape (1,)"),
    (lambda: estimate("k1", torch.tensor([[3]]), rows([0.0])), "logp must be floating point, got int64"),
    (lambda: estimate("k1", rows([0.0]), torch.tensor([[3]])), "ref_logp must be floating point, got int64"),
    (lambda: estimate("kl3", rows([0.0]), rows([0.0])), "unknown estimator 'kl3': did you mean 'k3'?"),
    (lambda: estimate("k3", rows([0.0]), rows([0.0]), clamp=0.0), "log_ratio_clamp must be positive or null, got 0.0"),
    (lambda: estimate("k3", rows([0.0]), rows([0.0]), clamp=NAN), "log_ratio_clamp must be positive"),
    (lambda: importance_ratio(rows([0.0]), rows([0.0]), level="word"), "unknown ratio level 'word'"),
    (lambda: importance_ratio(rows([0.0]), rows([0.0]), cap=-1.0), "cap must be positive"),
    (lambda: masked_mean(rows([0.0]), torch.ones(1, 1)), "boolean"),
    (lambda: masked_mean(torch.ones(2, 3), torch.ones(3, dtype=torch.bool)), "shape"),
    (lambda: masked_mean(torch.ones(2, 3), torch.ones(2, 1, dtype=torch.bool)), "shape"),
]


@pytest.mark.parametrize(("call", "says"), MISTAKES, ids=[says for _, says in MISTAKES])
def test_mistakes_are_one_line_that_names_the_thing(call, says):
    with pytest.raises(KeelError) as caught:
        call()
    message = str(caught.value)
    assert says in message
    assert "\n" not in message


def test_unknown_estimator_lists_the_known_ones():
    with pytest.raises(KeelError, match=r"known: abs, (\S+, )*k1, k2, k3"):
        estimate("zzz", rows([0.0]), rows([0.0]))


def test_keel_error_is_a_value_error():
    assert issubclass(KeelError, ValueError)


shapes = st.tuples(st.integers(1, 4), st.integers(1, 6))
logps = st.one_of(st.floats(-60, 0, width=32), st.just(-INF))


@st.composite
def masked_pairs(draw):
    shape = draw(shapes)
    return (
        torch.from_numpy(draw(hnp.arrays(np.float32, shape, elements=logps))),
        torch.from_numpy(draw(hnp.arrays(np.float32, shape, elements=logps))),
        torch.from_numpy(draw(hnp.arrays(np.bool_, shape))),
    )


@given(masked_pairs(), st.sampled_from(sorted(ESTIMATORS)))
def test_nothing_is_nan_under_any_mask(data, name):
    logp, ref, mask = data
    logp = logp.clone().requires_grad_()
    value = estimate(name, logp, ref, mask)
    mean = masked_mean(value, mask)
    mean.backward()
    assert torch.isfinite(value).all()
    assert torch.isfinite(mean)
    assert torch.isfinite(logp.grad).all()
    assert (value[~mask] == 0).all()
    assert (logp.grad[~mask] == 0).all()


@given(masked_pairs(), st.floats(-50, 0, width=32))
def test_what_is_outside_the_mask_does_not_matter(data, other):
    logp, ref, mask = data
    for name in ESTIMATORS:
        filled = estimate(name, torch.where(mask, logp, other), torch.where(mask, ref, NAN), mask)
        assert torch.equal(estimate(name, logp, ref, mask), filled)


@given(st.floats(-20, 20, width=32))
def test_order_of_the_estimators(d):
    """k3 ≥ 0, k3 − k1 = r − 1, and k3 − k2 has the sign of d³."""
    x = torch.tensor(d, dtype=torch.float64)
    assert k3(x) >= 0
    assert (k3(x) - k1(x)).item() == pytest.approx(math.exp(d) - 1, rel=1e-9, abs=1e-12)
    assert (k3(x) - k2(x)) * np.sign(d) >= -1e-12


@given(hnp.arrays(np.float64, shapes, elements=st.floats(-5, 5)))
def test_reward_to_go_is_the_suffix_sum(values):
    expected = np.cumsum(values[:, ::-1], axis=1)[:, ::-1]
    np.testing.assert_allclose(reward_to_go(torch.from_numpy(values)).numpy(), expected, atol=1e-12)


def test_reward_to_go_skips_what_is_masked():
    assert reward_to_go(rows([1.0, NAN, 3.0]), torch.tensor([[True, False, True]])).tolist() == [[4.0, 3.0, 3.0]]
