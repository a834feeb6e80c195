"""Metrics that merge: the same number under any split, and over two real processes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keel.base.metrics import (
    EffectiveSampleSize,
    Last,
    Max,
    Mean,
    Quantile,
    Share,
    Sum,
    merge,
    to_host,
    values,
)

numbers = st.lists(st.floats(-100, 100), min_size=1, max_size=12)
positive = st.lists(st.floats(0.01, 100), min_size=1, max_size=12)


def ess(weights):
    return EffectiveSampleSize(sum(weights), sum(w * w for w in weights), len(weights))


KINDS = {
    "sum": (lambda x: Sum(sum(x)), lambda x: math.fsum(x)),
    "mean": (lambda x: Mean(sum(x), len(x)), lambda x: math.fsum(x) / len(x)),
    "max": (lambda x: Max(max(x)), max),
    "ess": (ess, lambda x: sum(x) ** 2 / (len(x) * sum(w * w for w in x))),
    "median": (lambda x: Quantile(0.5, tuple(x)), lambda x: torch.tensor(sorted(x)).double().quantile(0.5).item()),
}


@pytest.mark.parametrize("kind", sorted(KINDS))
@given(values=positive, at=st.integers(0, 12))
def test_merging_does_not_depend_on_the_split(kind, values, at):
    make, direct = KINDS[kind]
    left, right = values[:at], values[at:]
    merged = make(left) + make(right) if left and right else make(values)
    assert merged.value == pytest.approx(make(values).value, rel=1e-9)
    assert merged.value == pytest.approx(direct(values), rel=1e-5)


@given(a=numbers, b=numbers, c=numbers)
def test_merging_is_associative(a, b, c):
    for make, _ in KINDS.values():
        x, y, z = make(a), make(b), make(c)
        assert ((x + y) + z).value == pytest.approx((x + (y + z)).value, rel=1e-9, abs=1e-9)


def test_values_by_hand():
    assert Mean(6.0, 4).value == 1.5
    assert ess([1.0, 1.0]).value == 1.0
    assert ess([1.0, 0.0, 0.0, 0.0]).value == 0.25
    assert Quantile(0.95, tuple(map(float, range(101)))).value == pytest.approx(95.0)
    assert (Quantile(0.5, (1.0, 9.0)) + Quantile(0.5, (2.0,))).value == 2.0


def test_nothing_counted_is_not_nan():
    assert Mean(0.0, 0).value == 0.0
    assert Quantile(0.5, ()).value == 0.0
    assert ess([]).value == 1.0


@pytest.mark.parametrize(("a", "b"), [(math.nan, 1.0), (1.0, math.nan)])
def test_a_nan_is_not_overlooked_by_max(a, b):
    assert math.isnan((Max(a) + Max(b)).value)


def test_merge_adds_what_both_have_and_keeps_the_rest():
    first, second = {"a": Sum(1.0), "b": Max(2.0)}, {"a": Sum(3.0), "c": Mean(1.0, 2)}
    assert values(merge(first, second)) == {"a": 4.0, "b": 2.0, "c": 0.5}
    assert first == {"a": Sum(1.0), "b": Max(2.0)}


def test_tensors_merge_as_numbers_do_and_come_over_in_one_transfer(monkeypatch):
    plain = [
        {"sum": Sum(0.1), "mean": Mean(0.2, 3), "max": Max(-math.inf), "share": Share(0.1, -0.7), "ess": ess([0.3])},
        {"sum": Sum(0.7), "mean": Mean(0.4, 4), "max": Max(2.5), "share": Share(0.2, 0.9), "ess": ess([1.1, 0.9])},
    ]

    def on_device(metric):
        return type(metric)(*(torch.tensor(x, dtype=torch.float64) for x in vars(metric).values()))

    transfers, inner = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: transfers.append(x.shape) or inner(x))
    tensors = merge(*({name: on_device(metric) for name, metric in part.items()} for part in plain))
    assert to_host(tensors) == merge(*plain)
    assert transfers == [(9,)]
    assert values(tensors) == values(merge(*plain)) == {name: metric.value for name, metric in tensors.items()}
    nan = Max(torch.tensor(math.nan)) + Max(torch.tensor(1.0))
    assert math.isnan(nan.value)


def test_the_last_takes_the_place_of_what_was_there():
    merged = merge({"a": Mean(1.0, 2), "b": Last(1.0)}, {"a": Last(torch.tensor(3.0)), "b": Last(4.0)})
    assert values(merged) == {"a": 3.0, "b": 4.0}
