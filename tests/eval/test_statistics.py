"""Statistics against closed forms, printed tables and values worked out by hand."""

import math
import statistics

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from keel.eval.statistics import (
    Estimate,
    estimate,
    holm,
    intervals_overlap,
    paired,
    pareto_frontier,
    pearson,
    ranks,
    spearman,
    winner,
)

# The 97.5 % quantiles of every printed table of Student's t.
TABLE = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 10: 2.2281, 30: 2.0423, 120: 1.9799}


@pytest.mark.parametrize(("df", "quantile"), TABLE.items())
def test_quantiles_of_the_printed_table(df, quantile):
    values = [float(i % 2) for i in range(df + 1)]
    se = statistics.stdev(values) / math.sqrt(df + 1)
    assert estimate(values).margin / se == pytest.approx(quantile, abs=5e-5)


@given(st.lists(st.floats(-50, 50), min_size=2, max_size=5))
def test_p_against_closed_forms_of_few_degrees(values):
    result = estimate(values)
    assume(result.low is not None)
    t = abs(result.mean) / (statistics.stdev(values) / math.sqrt(result.n))
    x = t / math.sqrt(result.n - 1 + t * t)
    tails = {
        1: 1 - 2 * math.atan(t) / math.pi,
        2: 1 - x,
        3: 1 - 2 * (math.atan(t / math.sqrt(3)) + x * math.sqrt(1 - x * x)) / math.pi,
        4: 1 - 1.5 * (x - x**3 / 3),
    }
    assert result.p == pytest.approx(tails[result.n - 1], abs=1e-9)


@pytest.mark.parametrize(
    ("values", "low", "high", "p"),
    [
        ([1, 2, 6], -3.5724106077284183, 9.572410607728418, 0.1884973287993108),
        ([0.5, 0.75], -0.9632755920218323, 2.2132755920218323, 0.12566591637800228),
        ([0.31, 0.42, 0.27, 0.39, 0.35], 0.2732935027346618, 0.42270649726533815, 0.00020615679218649596),
        ([0.9, 0.901, 0.899, 0.9005], 0.8987662345581021, 0.901483765441898, 2.353488515183244e-10),
        ([1e-6, 2.5e-6, -1e-6, 3e-6], -1.484409262392317e-06, 4.234409262392317e-06, 0.2234265316037085),
    ],
)
def test_intervals_of_earlier_studies(values, low, high, p):
    """Recorded from the implementation by hand that printed the first studies: theirs can still be compared."""
    result = estimate(values)
    assert (result.low, result.high, result.p) == pytest.approx((low, high, p), rel=1e-9, abs=1e-15)


def test_mean_and_interval_by_hand():
    """1, 2, 6: mean 3, deviation √7, so 3 ± 4.3027·√(7/3); t = 3/√(7/3) = 1.96396, p = 1 − t/√(2 + t²)."""
    result = estimate([1, 2, 6])
    margin = 4.302652729911275 * math.sqrt(7 / 3)
    assert (result.mean, result.n) == (3, 3)
    assert result.low == pytest.approx(3 - margin)
    assert result.high == pytest.approx(3 + margin)
    t = 3 / math.sqrt(7 / 3)
    assert result.p == pytest.approx(1 - t / math.sqrt(2 + t * t))
    assert not result.excludes_zero


def test_few_and_equal_values():
    assert estimate([]) is None
    assert estimate([2.0]) == Estimate(2.0, None, None, 1)
    assert estimate([2.0, 2.0]) == Estimate(2.0, None, None, 2, None)
    assert estimate([0.0, 0.0]) == Estimate(0.0, None, None, 2, 1.0)


def test_no_spread_is_no_proof():
    """Two seeds of 128 problems that agree to the last digit, and differences whose spread is rounding."""
    result = winner({"a": seeds(0.5, 0.5), "b": seeds(0.5078125, 0.5078125)})
    assert (result.name, result.best, result.rivals, result.p) == (None, "b", ("a",), {"a": None})
    assert winner({"a": seeds(0.5, 0.5, 0.5), "b": seeds(0.51, 0.51, 0.51)}).name is None
    assert 0.6 - 0.5 != 0.2 - 0.1  # the same 0.1 to a reader
    assert paired(seeds(0.1, 0.5, 0.9), seeds(0.2, 0.6, 1.0)).p is None
    assert paired(seeds(0.1, 0.3, 0.7), seeds(0.1 + 1e-17, 0.3 + 6e-17, 0.7 + 1.2e-16)).p == 1.0


def test_two_seeds_name_no_winner():
    """The paired t of 0.4001 and 0.4 is 8001 on one degree of freedom: p = 8e-5."""
    assert paired(seeds(0.1, 0.1001), seeds(0.5, 0.5002)).p < 0.001
    assert winner({"a": seeds(0.1, 0.1001), "b": seeds(0.5, 0.5002)}).name is None


def test_pairs_take_the_seeds_that_both_have():
    """Differences 1, 1, 4 of seeds 1, 2, 3; seed 9 has no partner."""
    first, second = {1: 10.0, 2: 20.0, 3: 30.0, 9: 0.0}, {3: 34.0, 1: 11.0, 2: 21.0}
    assert paired(first, second) == estimate([1, 1, 4])
    assert paired({1: 1.0}, {2: 1.0}) is None


def test_pairing_removes_what_seeds_share():
    first = {seed: 10.0 * seed for seed in range(5)}
    second = {seed: 10.0 * seed + 1 + 0.1 * (seed % 2) for seed in range(5)}
    assert paired(first, second).excludes_zero
    assert intervals_overlap(estimate(list(first.values())), estimate(list(second.values())))


def test_holm_by_hand():
    """0.01·3 = 0.03; then max(0.03, 0.02·2) = 0.04; then max(0.04, 0.03·1) = 0.04."""
    assert holm({"b": 0.02, "a": 0.01, "c": 0.03}) == pytest.approx({"a": 0.03, "b": 0.04, "c": 0.04})
    assert holm({"a": 0.6, "b": 0.7, "c": None}) == {"a": 1.0, "b": 1.0, "c": None}


def seeds(*values):
    return dict(enumerate(values))


def test_a_winner_beats_every_other():
    result = winner({"low": seeds(0.50, 0.51, 0.52), "high": seeds(0.90, 0.91, 0.921), "mid": seeds(0.7, 0.71, 0.72)})
    assert (result.name, result.best, result.rivals) == ("high", "high", ())


def test_no_winner_when_intervals_overlap():
    """Every seed favours b by about 0.1, which the paired test sees; but the intervals overlap."""
    result = winner({"a": seeds(0.1, 0.5, 0.9), "b": seeds(0.2, 0.601, 1.002)})
    assert result.p["a"] < 0.05
    assert (result.name, result.best, result.rivals) == (None, "b", ("a",))


def test_no_winner_by_chance_or_by_one_seed():
    assert winner({"a": seeds(0.4, 0.6, 0.5), "b": seeds(0.6, 0.4, 0.53)}).name is None
    assert winner({"a": seeds(0.1), "b": seeds(0.9)}).name is None
    assert winner({"a": seeds(0.5, 0.5), "b": seeds(0.5, 0.5)}).name is None
    assert winner({"a": {}}) is None
    assert winner({"a": seeds(1.0, 1.0)}).name is None


def test_correlations_by_hand():
    """x = 1, 2, 3, 4, y = 1, 3, 2, 4: Sxy = 4, Sxx = Syy = 5, so both are 0.8; z = artanh 0.8 = 1.0986."""
    result = pearson([1, 2, 3, 4], [1, 3, 2, 4])
    assert result.value == pytest.approx(0.8)
    assert result.low == pytest.approx(math.tanh(math.atanh(0.8) - 1.959964))
    assert result.high == pytest.approx(math.tanh(math.atanh(0.8) + 1.959964))
    ranked = spearman([1, 20, 300, 4000], [0.1, 0.3, 0.2, 9])
    assert ranked.value == pytest.approx(0.8)
    assert ranked.low == pytest.approx(math.tanh(math.atanh(0.8) - 1.959964 * math.sqrt(1.32)))


def test_correlations_that_say_nothing():
    assert pearson([1, 1, 1], [1, 2, 3]) is None
    assert spearman([1, 2], [1, 2]) is None
    assert not pearson([1, 2, 3], [2, 4, 6]).excludes_zero


def test_a_perfect_correlation_has_an_exact_p():
    """Of n! orders one agrees and one opposes: 2/6, 2/24, 2/120; with two pairs of ties 2·2!·2!/6! at n = 6."""
    for n, p in ((3, 1 / 3), (4, 1 / 12), (5, 1 / 60)):
        rising, falling = spearman(range(n), [10**i for i in range(n)]), pearson(range(n), range(0, -n, -1))
        assert (rising.value, falling.value) == (1, -1)
        assert rising.p == pytest.approx(p)
        assert falling.p == pytest.approx(p)
        assert rising.excludes_zero == falling.excludes_zero == (p < 0.05)
    tied = spearman([1, 1, 2, 2, 3, 4], [0.1, 0.1, 0.2, 0.2, 0.3, 0.7])
    assert tied.p == pytest.approx(8 / 720)


def test_equal_values_share_their_rank():
    assert ranks([10, 20, 10, 30]) == [1.5, 3.0, 1.5, 4.0]


def test_frontier():
    """b costs more than a and gains less; d costs what c costs and gains more."""
    assert pareto_frontier({"a": (1, 5), "b": (2, 4), "c": (3, 6), "d": (3, 7), "e": (9, 7)}) == ["a", "d"]
