"""What a log shows by its shapes: one figure of a healthy run changed, the code that is said first, and what is not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from keel.lab.doctor.checks import check_history
from keel.lab.doctor.history import History, Series
from keel.lab.doctor.names import derived
from keel.lab.doctor.shapes import fall, few_trend
from lab.doctor.histories import altered, configured, healthy
from lab.doctor.simulated import noise

KL, REWARD, ENTROPY, RATE = "kl/policy_ref/k3/mean", "reward/mean", "entropy/mean", "optim/learning_rate"
EQUAL, CUT, LENGTH = "reward/zero_variance_fraction", "length/truncated_fraction", "length/mean"


def logged(base: History, name: str, value: Callable[[float], float]) -> History:
    """A metric more, at the steps of the reward."""
    steps = base.series[REWARD].steps
    return replace(base, series={**base.series, name: Series.of((step, value(step)) for step in steps)})


def flat(base: History) -> History:
    """The same run without any gain."""
    return altered(REWARD, lambda step, was: 0.3 + 0.01 * math.sin(7 * step), base)


def still(base: History) -> History:
    return altered(
        ENTROPY, lambda step, was: 1.2 + 0.01 * math.sin(3 * step), altered(KL, lambda s, w: 1e-5 * s, flat(base))
    )


def unrecorded(base: History, *names: str) -> History:
    return replace(base, series={name: series for name, series in base.series.items() if name not in names})


def unmeasured() -> History:
    """Without what is known of the sampler."""
    return unrecorded(healthy(), "kl/sampler_policy/k3/mean", "logp/sampler_gap_max")


def without_steps(base: History, name: str, *steps: int) -> History:
    """A metric that some lines leave out."""
    was = base.series[name]
    rest = Series.of(pair for pair in zip(was.steps, was.values, strict=True) if pair[0] not in steps)
    return replace(base, series={**base.series, name: rest})


def falling(high: float, low: float) -> Callable[[int, float], float]:
    """A KL that rises to `high` and wastes away."""
    return lambda step, was: max(low, high * min(1.0, step / 15) * (1.0 if step < 25 else 0.8 ** (step - 25)))


FAULTS = {
    "clipped to a trifle": ("optim/no-update", still(configured(optim__max_grad_norm=1e-9))),
    "a rate under every recipe": ("optim/no-update", still(altered(RATE, lambda step, was: 1e-10))),
    "a gradient that stops changing": (
        "optim/no-update",
        unrecorded(altered("grad/norm", lambda step, was: was if step < 15 else 0.25, flat(healthy())), KL, ENTROPY),
    ),
    "greedy by top_k": ("rollout/temperature", altered(EQUAL, lambda s, w: 0.7, configured(rollout__top_k=1))),
    "greedy by temperature": (
        "rollout/temperature",
        altered(EQUAL, lambda s, w: 0.7, configured(rollout__temperature=0.05)),
    ),
    "hot": ("rollout/temperature", altered(ENTROPY, lambda s, w: 6.5, flat(configured(rollout__temperature=3.0)))),
    "hot, of unknown temperature": (
        "rollout/temperature",
        altered(ENTROPY, lambda s, w: 6.5, flat(healthy(source="verl", config={}, vocabulary=None))),
    ),
    "into the limit": (
        "length/explosion",
        altered(CUT, lambda s, w: min(0.8, s / 50), altered(REWARD, lambda s, w: max(0.05, w - s / 80))),
    ),
    "at the limit": ("output/truncated", unrecorded(altered(LENGTH, lambda s, w: 63.5, flat(healthy())), CUT)),
    "nothing is generated": ("length/collapse", altered(LENGTH, lambda s, w: 0.2, flat(healthy()))),
    "requests come back empty": ("length/collapse", logged(healthy(), "length/aborted_fraction", lambda s: 0.8)),
    "half of the ratios": ("ratio/all-clipped", altered("ratio/clip_high_fraction", lambda s, w: 0.6)),
    "other old log-probabilities": ("ratio/all-clipped", logged(healthy(), "kl/old_policy/k1/mean", lambda s: 2.7)),
    "ratios without a mean of 1": ("ratio/all-clipped", logged(healthy(), "ratio/mean", lambda s: 3.1)),
    "a reward that is left out": (
        "reward/non-finite",
        without_steps(healthy(source="prime-rl", config={}), REWARD, 5, 17, 18, 40),
    ),
    "a divergence from the sampler": ("sampler/mismatch", logged(unmeasured(), "sampler/js_divergence", lambda s: 0.1)),
    "turns used up": (
        "answer/unusable",
        logged(logged(healthy(), "turn/mean", lambda s: 4.0), "turn/limit_fraction", lambda s: 0.8),
    ),
    "episodes in error": ("reward/failed", logged(healthy(), "rollout/error_fraction", lambda s: 0.95)),
    "a β without bound": ("kl/controller", altered("kl/beta", lambda s, w: 0.01 * 1.3**s)),
    "completions left out": ("kl/rejects-all", logged(healthy(), "kl/rejected_fraction", lambda s: 0.6)),
    "a KL that wastes away": ("reference/moving", altered(KL, falling(0.06, 1e-4))),
    "held out at zero": (
        "eval/train-gap",
        logged(healthy(120, 120, source="verl", config={}, evaluations=()), "eval/math/acc", lambda s: 0.0),
    ),
    "weights that decay": ("optim/weight-decay", altered(RATE, lambda s, w: 0.1, configured(optim__weight_decay=1.0))),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_shape_is_named_first(name):
    code, history = FAULTS[name]
    first = check_history(history).findings[0]
    assert (first.code, first.severity == "note") == (code, False)


def late(series: Series) -> Series:
    return Series(tuple(step + 500 for step in series.steps), series.values)


HEALTHY = {
    "clipping turned off by 0": flat(configured(optim__max_grad_norm=0)),
    "cold, with a spread": configured(rollout__temperature=0.2),
    "hot, and it learns": configured(rollout__temperature=2.0),
    "a log that begins late": replace(
        still(healthy()), series={name: late(series) for name, series in still(healthy()).series.items()}
    ),
    "a reward every other step": without_steps(healthy(source="prime-rl", config={}), REWARD, *range(2, 61, 2)),
    "an entropy summed over completions": altered(
        ENTROPY, lambda s, w: 40 * w, flat(healthy(source="table", config={}, vocabulary=None))
    ),
    "a KL that goes back with the reward": altered(
        REWARD, lambda s, w: 0.3 + (0.3 if 10 < s < 25 else 0.0), altered(KL, falling(0.06, 1e-4))
    ),
    "several updates in the first step": logged(
        altered(KL, lambda s, w: 0.002 + w, healthy(source="TRL", config={})), "ratio/clip_fraction", lambda s: 0.01
    ),
    "single turns that end at their limit": logged(
        logged(healthy(), "turn/mean", lambda s: 1.0), "turn/limit_fraction", lambda s: 1.0
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_only_looks_like_it_is_left_alone(name):
    serious = {finding.code for finding in check_history(HEALTHY[name]).findings if finding.severity != "note"}
    assert not serious & {"kl/not-learning", "kl/at-start", *(code for code, _ in FAULTS.values())}


def test_shares_follow_from_what_is_logged_instead():
    one = Series.of([(1, 0.25), (2, 0.75)])
    filtered, ended = derived({"reward/differing_fraction": one}), derived({"length/ended_fraction": one})
    assert filtered[EQUAL].values == ended[CUT].values == (0.75, 0.25)


def test_slow_noise_of_a_short_log_is_no_fall():
    rng = np.random.default_rng(0)
    falls = [fall(Series.of(enumerate(noise(rng, 30, 0.5)))) for _ in range(200)]
    assert sum(change is not None and change.chance < 5e-4 for change in falls) <= 2


@pytest.mark.parametrize(
    ("values", "clear"),
    [((0.5, 0.42, 0.33, 0.24, 0.17, 0.09), True), ((0.5, 0.44, 0.51, 0.38, 0.45, 0.4), False), ((0.5,) * 6, False)],
)
def test_six_evaluations_tell_a_fall_by_a_line(values, clear):
    change = few_trend(Series.of(enumerate(values)))
    assert change is not None
    assert (change.chance < 5e-4) == clear


def evaluated(part: float, *evaluations: float, completions: int = 0) -> History:
    """A run of TRL in which a part of the reward is paid, with held-out scores and that part beside them."""
    rows = {"eval/reward": evaluations, "eval/part/right": [part] * len(evaluations)}
    if completions:
        rows["other/eval_runtime"] = [8.0] * len(evaluations)
        rows["other/eval_samples_per_second"] = [completions / 8] * len(evaluations)
    base = logged(healthy(120, 120, source="TRL", config={}, evaluations=()), "reward/part/right", lambda s: 0.3)
    return replace(base, series={**base.series, **{name: Series.of(enumerate(row)) for name, row in rows.items()}})


@pytest.mark.parametrize(
    ("history", "severity", "name"),
    [
        (evaluated(0.0, 0.0, 0.0, 0.0), "note", "reward"),  # of unknown size
        (evaluated(0.0, 0.0, 0.0, 0.0, completions=2), "note", "reward"),
        (evaluated(0.0, 0.0, 0.0, 0.0, completions=64), "warning", "reward"),
        (evaluated(0.0, *[0.0] * 12), "warning", "reward"),
        (evaluated(0.0, 0.2, 0.3, 0.4, completions=64), "warning", "part/right"),
        (evaluated(0.0, 0.2, 0.3, 0.4, completions=2), "note", "part/right"),
        (evaluated(0.3, 0.2, 0.3, 0.4, completions=64), None, ""),
    ],
)
def test_held_out_scores_at_zero_are_named_at_a_level(history, severity, name):
    gaps = [finding for finding in check_history(history).findings if finding.code == "eval/train-gap"]
    assert [gap.severity for gap in gaps] == ([] if severity is None else [severity])
    assert all(f"held-out {name} stays at 0" in gap.evidence for gap in gaps)
