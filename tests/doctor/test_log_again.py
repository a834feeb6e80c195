"""Repeated, frozen or impossible values in a log: the code that comes first, and healthy look-alikes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from doctor.histories import altered, healthy
from keel.doctor.checks import check_history
from keel.doctor.history import History, Series
from keel.doctor.shapes import around, jitter

KL, REWARD, ENTROPY, LENGTH = "kl/policy_ref/k3/mean", "reward/mean", "entropy/mean", "length/mean"
NORM, EQUAL, SPREAD, CUT = (
    "grad/norm",
    "reward/zero_variance_fraction",
    "reward/within_group_std",
    "length/truncated_fraction",
)
STEPS = 120


def run(**changes: object) -> History:
    return healthy(steps=STEPS, **changes)


def peer(**changes: object) -> History:
    """Another trainer's log with unknown options."""
    return run(source="verl", config={}, evaluations=(), **changes)


def also(base: History, name: str, *values: float) -> History:
    """A further metric, with one value per step or a few at equal intervals."""
    places = np.linspace(1, STEPS, len(values))
    return replace(base, series={**base.series, name: Series.of(zip(places, values, strict=True))})


def wave(step: int, times: float = 4.0) -> float:
    return math.sin(2 * math.pi * times * step / STEPS)


def without(base: History, *names: str) -> History:
    return replace(base, series={name: row for name, row in base.series.items() if name not in names})


def unpaid(base: History, steps: range, value: float = 0.0) -> History:
    """Batches in which all completions earn one value."""
    base = altered(EQUAL, lambda s, w: 1.0 if s in steps else w, base)
    base = altered(SPREAD, lambda s, w: 0.0 if s in steps else w, base)
    return altered(REWARD, lambda s, w: value if s in steps else w, base)


def drifting(norm: float, far: float = 2.0) -> History:
    """A policy that drifts and loses reward, with gradients of constant size."""
    base = altered(
        NORM, lambda s, w: norm * w, altered(REWARD, lambda s, w: 0.5 - 0.001 * s + 0.02 * math.sin(7 * s), run())
    )
    return without(altered(KL, lambda s, w: far * (s - 1) / STEPS, base), EQUAL, SPREAD)


def repeated(base: History, begin: int, stretch: int, until: int = STEPS) -> History:
    """A log that repeats its lines from some line on."""
    for name, series in base.series.items():
        lines = [n if n < begin or n >= until else begin + (n - begin) % stretch for n in range(len(series))]
        base = replace(base, series={**base.series, name: Series(series.steps, tuple(series.values[n] for n in lines))})
    return base


def in_parts(accuracy: list[float], base: History | None = None) -> History:
    form = [0.2 + 0.01 * math.sin(3 * s) for s in range(STEPS)]
    base = also(also(peer() if base is None else base, "reward/part/accuracy", *accuracy), "reward/part/form", *form)
    return altered(REWARD, lambda s, w: accuracy[s - 1] + form[s - 1], base)


def accuracies(gone: int, over: int = 1) -> list[float]:
    """A part of the accuracy is lost from a step on, within a number of steps."""
    return [max(0.0, 0.5 + 0.02 * math.sin(5 * s) - 0.6 * max(0, s - gone) / over) for s in range(STEPS)]


def apart(spells: int, share: float) -> History:
    """A policy that loses a share of its reward several times for a while, with a matching KL."""
    away = {s for n in range(spells) for s in range(20 + 30 * n, 32 + 30 * n)}
    base = altered(REWARD, lambda s, w: (1 - share) * w if s in away else w, run())
    base = altered(ENTROPY, lambda s, w: w * (1 + 2 * share) if s in away else w, base)
    return altered(KL, lambda s, w: w + 4 * share if s in away else w, base)


def copied(base: History) -> History:
    """A policy that writes one text only from a step on."""
    base = altered(ENTROPY, lambda s, w: w if s < 60 else 0.03 + 0.003 * math.sin(3 * s), base)
    base = altered(LENGTH, lambda s, w: w if s < 60 else 20 + 0.3 * math.sin(s), base)
    base = altered(EQUAL, lambda s, w: w if s < 60 else 0.97, base)
    return altered(REWARD, lambda s, w: w if s < 60 else 0.2 + 0.01 * math.sin(5 * s), base)


SAW = altered(KL, lambda s, w: 0.1 * (s % 15) / 15 * (1 + 0.05 * math.sin(9 * s)) + 1e-6, peer())

FOUND = {
    "a policy that is lost and comes back": ("run/shift", apart(3, 0.9)),
    "an entropy that is gone at one step": ("entropy/collapse", copied(peer())),
    "a part that nobody judges any more": ("reward/failed", in_parts(accuracies(60))),
    "a part that was never paid": ("reward/failed", in_parts([0.0] * STEPS)),
    "at the limit, and nothing counts as cut": (
        "output/truncated",
        altered(LENGTH, lambda s, w: 64.0, altered(CUT, lambda s, w: 0.0, run())),
    ),
    "all of one length": (
        "output/truncated",
        also(altered(LENGTH, lambda s, w: 512.0, peer()), "length/max", *[512.0] * STEPS),
    ),
    "a reference that is taken over again and again": ("reference/moving", SAW),
    "a reference that is taken over every sixth step": (
        "reference/moving",
        altered(KL, lambda s, w: 0.02 * (s % 6) + 1e-6, peer()),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_it_is_named_first(name: str) -> None:
    code, history = FOUND[name]
    first = check_history(history).findings[0]
    assert (first.code, first.severity == "note") == (code, False)


WELL = {
    "an entropy that rises and falls once": altered(ENTROPY, lambda s, w: w * math.exp(1.5 * wave(s, 0.5)), run()),
    "an entropy that swings a little": altered(ENTROPY, lambda s, w: w * math.exp(0.3 * wave(s)), run()),
    "a noisy entropy": altered(ENTROPY, lambda s, w: w * math.exp(0.8 * math.sin(s * s)), run()),
    "a reward that dips": altered(REWARD, lambda s, w: w * (0.85 + 0.15 * wave(s)), run()),
    "batches of which none is right, at first": altered(
        REWARD, lambda s, w: 0.0 if s % 3 == 0 else 0.01 * (s % 4), run()
    ),
    "an unpaid batch or two": unpaid(run(), range(40, 45, 4)),
    "batches that earn the same, of groups that differ": altered(REWARD, lambda s, w: 0.1 if s % 10 == 0 else w, run()),
    "a part that is at its top": in_parts([min(0.5, 0.1 + 0.01 * s + 0.01 * math.sin(5 * s)) for s in range(STEPS)]),
    "a part that is paid in full": in_parts([1.0] * STEPS),
    "a part that is lost little by little": in_parts(accuracies(40, 50)),
    "small gradients under which much is learned": altered(NORM, lambda s, w: 1e-7 * w, without(run(), EQUAL, SPREAD)),
    "small gradients, and hardly a move": drifting(1e-7, 0.01),
    "usual gradients under which all is lost": drifting(0.1),
    "a few lines that come back": repeated(run(), 40, 9, 60),
    "rewards in eighths": replace(
        peer(), series={REWARD: Series.of((s, round(4 + 3 * math.sin(s * s)) / 8) for s in range(1, STEPS + 1))}
    ),
    "one line that stays": repeated(run(), 60, 1),
    "answers of one length, which is short": also(
        altered(LENGTH, lambda s, w: 4.0, peer()), "length/max", *[4.0] * STEPS
    ),
    "lengths that differ": also(altered(LENGTH, lambda s, w: 300 + s % 7, peer()), "length/max", *[512.0] * STEPS),
    "a KL that is not measured now and then": altered(KL, lambda s, w: 0.0 if s % 9 == 0 else w, run()),
}
NAMED = {code for code, _ in FOUND.values()}


@pytest.mark.parametrize("name", WELL)
def test_what_only_looks_like_it_is_no_such_thing(name: str) -> None:
    found = {f.code for f in check_history(WELL[name]).findings if f.severity != "note"}
    lost = {"reward/collapse", "kl/explosion", "entropy/rising"} if "lost" in name else set()  # which it is
    still = {"optim/no-update", "reward/constant"} if "stays" in name else set()
    assert not found & (NAMED - lost - still)


def test_a_policy_that_comes_back_has_no_other_reference() -> None:
    assert not {f.code for f in check_history(apart(3, 0.9)).findings} & {"reference/moving", "reference/follows"}


def test_jitter_leaves_jumps_out() -> None:
    rng = np.random.default_rng(1)
    stairs = Series.of((s, 50.0 * (s // 30) + rng.normal(0, 1)) for s in range(200))
    assert 0.7 < jitter(stairs) < 1.4


def test_levels_around_a_step() -> None:
    rng = np.random.default_rng(2)
    series = Series.of((s, 5.0 * (s >= 50) + rng.normal(0, 1)) for s in range(100))
    change, none = around(series, 50, 10), around(series, 20, 10)
    assert change is not None
    assert none is not None
    assert change.chance < 1e-4 < 0.01 < none.chance
    assert around(series, 98, 10) is None
