"""Checks by the shape of metrics: one metric of a healthy run is changed, and the first code is compared."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from doctor.histories import altered, configured, evaluation, healthy
from doctor.simulated import noise
from keel.doctor.checks import check_history
from keel.doctor.checks.base import Log
from keel.doctor.checks.evaluation import MOST, _completions
from keel.doctor.history import History, Series
from keel.doctor.names import derived
from keel.doctor.shapes import course, ends, fall, few_trend, trend
from keel.doctor.thresholds import load_thresholds
from keel.kl.controllers import get_controller

KL, REWARD, ENTROPY, RATE = "kl/policy_ref/k3/mean", "reward/mean", "entropy/mean", "optim/learning_rate"
EQUAL, CUT, LENGTH = "reward/zero_variance_fraction", "length/truncated_fraction", "length/mean"
RATIOS = "ratio/clip_low_fraction", "ratio/clip_high_fraction"
LIMITS = load_thresholds()


def logged(base: History, name: str, value: Callable[[float], float]) -> History:
    """A further metric, at the steps of the reward."""
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
    """The run without metrics of the sampler."""
    return unrecorded(healthy(), "kl/sampler_policy/k3/mean", "logp/sampler_gap_max")


def without_steps(base: History, name: str, *steps: int) -> History:
    """A metric that some lines omit."""
    was = base.series[name]
    rest = Series.of(pair for pair in zip(was.steps, was.values, strict=True) if pair[0] not in steps)
    return replace(base, series={**base.series, name: rest})


def steered(controller: str, steps: int = 80, **options: float) -> History:
    """A run with one of Keel's controllers: the drift depends on β, and the reward on the drift."""
    rule, kl = get_controller(controller)(0.01, target=0.02, **options), 0.0
    kls, betas, state = dict[int, float](), dict[int, float](), rule.init()
    for step in range(1, steps + 1):
        betas[step], kls[step] = state.beta, kl
        state = rule.update(state, kl)
        kl += 0.1 * (0.2 / (1 + 200 * betas[step]) - kl)
    base = configured(healthy(steps=steps), kl__controller={"name": controller, "target": 0.02, **options})
    base = altered(REWARD, lambda s, w: 0.3 + 0.8 * math.sqrt(kls[s]) + 0.02 * math.sin(5 * s), base)
    return altered("kl/beta", lambda s, w: betas[s], altered(KL, lambda s, w: kls[s], base))


def overshot(**options: object) -> History:
    """The run with a controller that reacts too late, and changed options."""
    return configured(steered("dual", smoothing=0.9), **options)


def falling(high: float, low: float) -> Callable[[int, float], float]:
    """A KL that rises to `high` and falls again."""
    return lambda step, was: max(low, high * min(1.0, step / 15) * (1.0 if step < 25 else 0.8 ** (step - 25)))


def unclipped(base: History) -> History:
    """The run without other metrics of ratios."""
    names = [name for name in base.series if name.startswith(("ratio/", "kl/old_policy"))]
    return unrecorded(base, *(name for name in names if name != "ratio/clip_high_fraction"))


def nothing_right(step: int) -> dict[str, object]:
    """An evaluation of 64 held-out problems, none of them right."""
    return {"step": step, "task": "math", "split": "trained", "pass@1": 0.0, "ci95": [0.0, 0.06], "n": 64}


def scored(*shares: float) -> History:
    """A verl run with held-out accuracies at equal intervals."""
    base = healthy(120, 120, source="verl", config={}, evaluations=())
    points = Series.of((1 + 119 * i / (len(shares) - 1), share) for i, share in enumerate(shares))
    return replace(base, series={**base.series, "eval/math/acc": points})


def renamed(base: History, name: str, other: str) -> History:
    return replace(unrecorded(base, name), series={**unrecorded(base, name).series, other: base.series[name]})


def traded(base: History) -> History:
    """One reward part falls while another one gains more."""
    base = logged(base, "reward/part/accuracy", lambda s: 0.4 - 0.003 * s + 0.01 * math.sin(7 * s))
    return logged(base, "reward/part/style", lambda s: 0.1 + 0.007 * s + 0.01 * math.sin(5 * s))


def frozen(base: History) -> History:
    """Constant metrics from the twentieth step on."""
    for name, series in base.series.items():
        base = altered(name, lambda step, was, row=series: was if step < 20 else row.values[19], base=base)
    return base


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
    "a gap whose square is no number": (
        "sampler/mismatch",
        logged(unmeasured(), "logp/sampler_gap_mean", lambda s: 1e30),
    ),
    "solved half way, and on it goes": (
        "reward/constant",
        altered(REWARD, lambda s, w: 1.0 if s > 15 else w, altered(EQUAL, lambda s, w: 1.0 if s > 15 else w)),
    ),
    "a gradient that doubles every few steps": (
        "optim/spike",
        altered(
            REWARD,
            lambda s, w: w if s < 45 else w * (60 - s) / 15,
            altered("grad/norm", lambda s, w: w * 2 ** max(0.0, (s - 20) / 4)),
        ),
    ),
    "a β that swings with its KL": (
        "kl/controller",
        altered(
            KL,
            lambda s, w: 0.04 * min(1.0, s / 20) * math.exp(1.5 * math.sin(s / 3)),
            altered("kl/beta", lambda s, w: 0.05 * math.exp(1.5 * math.sin(s / 3 - 1.5))),
        ),
    ),
    "most of what was learned given back": (
        "reward/collapse",
        altered(
            REWARD,
            lambda s, w: w - max(0.0, 0.4 * (s - 80) / 159) - 0.18 * min(1.0, max(0.0, (s - 80) / 20)),
            healthy(steps=160),
        ),
    ),
    "a rate that swings": ("optim/lr-too-high", altered(RATE, lambda s, w: 1e-6 * 10 ** math.sin(s / 3))),
    "ratios that never leave 1": (
        "loss/clip",
        altered("ratio/clip_high_fraction", lambda s, w: 0.0, unclipped(configured(loss__num_iterations=4))),
    ),
    "held out at zero, in a run of Keel's": (
        "eval/train-gap",
        healthy(120, 120, evaluations=tuple(nothing_right(step) for step in (0, 40, 80, 120))),
    ),
    "turns used up": (
        "answer/unusable",
        logged(logged(healthy(), "turn/mean", lambda s: 4.0), "turn/limit_fraction", lambda s: 0.8),
    ),
    "episodes in error": ("reward/failed", logged(healthy(), "rollout/error_fraction", lambda s: 0.95)),
    "a β without bound": ("kl/controller", altered("kl/beta", lambda s, w: 0.01 * 1.3**s)),
    "completions left out": ("kl/rejects-all", logged(healthy(), "kl/rejected_fraction", lambda s: 0.6)),
    "a thousandfold β at a resume": (
        "kl/too-strong",
        altered(
            KL,
            lambda s, w: 0.003 if s < 30 else 1e-5,
            altered("kl/beta", lambda s, w: w * (1000 if s >= 30 else 1), flat(healthy(120, 120))),
        ),
    ),
    "a reference that is replaced while β grows": (
        "reference/moving",
        altered(KL, lambda s, w: 0.03 if s < 30 else 1e-5, altered("kl/beta", lambda s, w: 1e-3 * s)),
    ),
    "a β that no recipe has, in few steps": (
        "kl/too-strong",
        altered(KL, lambda s, w: 1e-5 * s, flat(altered("kl/beta", lambda s, w: 20.0, healthy(24, 24)))),
    ),
    "more and more noise beside a bonus that is next to none": (
        "entropy/rising",
        altered(ENTROPY, lambda s, w: 1.2 + 0.05 * s, flat(configured(loss__entropy_coef=1e-4))),
    ),
    "held out at zero": (
        "eval/train-gap",
        logged(healthy(120, 120, source="verl", config={}, evaluations=()), "eval/math/acc", lambda s: 0.0),
    ),
    "held out that stands still, of a name of its own": (
        "eval/train-gap",
        renamed(scored(*(0.4925,) * 6), "eval/math/acc", "eval/math/all/avg@1"),
    ),
    "held out that falls with a part": ("reward/part-falling", traded(scored(0.5, 0.4, 0.3, 0.2, 0.15, 0.1))),
    "a KL that grows by leaps": (
        "kl/explosion",
        altered(
            KL,
            lambda s, w: 0.01 * math.exp(max(0.0, (s - 80) / 10) + 0.5 * math.sin(2 * s) + 0.4 * (s % 17 > 8)),
            altered(REWARD, lambda s, w: w if s < 85 else 0.1 * w, healthy(steps=160)),
        ),
    ),
    "every figure frozen, without a reference": (
        "optim/no-update",
        frozen(altered(KL, lambda s, w: 0.0, unrecorded(healthy(source="OpenRLHF", config={}), "kl/beta"))),
    ),
    "every figure frozen, some of it clipped": (
        "optim/no-update",
        frozen(unrecorded(logged(healthy(source="prime-rl", config={}), "ratio/clip_fraction", lambda s: 0.01), KL)),
    ),
    "an entropy that is gone, and nothing gained since": (
        "entropy/collapse",
        altered(
            ENTROPY,
            lambda s, w: max(0.03, 1.2 - 0.015 * s),
            altered(REWARD, lambda s, w: 0.1 + 0.006 * min(s, 76) + 0.02 * math.sin(7 * s), healthy(steps=160)),
        ),
    ),
    "a length that is lost early": (
        "length/collapse",
        altered(LENGTH, lambda s, w: 3 + 0.1 * math.sin(9 * s) if s > 12 else w, flat(healthy())),
    ),
    "solved early, to the last completion": (
        "reward/constant",
        unrecorded(
            altered(REWARD, lambda s, w: 1.0 if s > 20 else w, healthy(source="verl", config={})),
            *(EQUAL, "reward/std", "reward/within_group_std"),
        ),
    ),
    "a gap that comes and goes": (
        "sampler/mismatch",
        altered("kl/sampler_policy/k3/mean", lambda s, w: 0.3 if s % 3 == 1 else 2e-5),
    ),
    "tools that break on the way": (
        "tool/failing",
        altered(
            REWARD,
            lambda s, w: w if s < 30 else 0.1 + 0.02 * math.sin(7 * s),
            logged(
                logged(healthy(), "tool/calls_mean", lambda s: 2.0),
                "tool/error_fraction",
                lambda s: (0.8 if s > 30 else 0.08) + 0.02 * math.sin(5 * s),
            ),
        ),
    ),
    "a form that is never learned": (
        "output/unparseable",
        altered(
            "parse/ok_fraction",
            lambda s, w: 0.12 + 0.01 * (s * 7 % 3),
            altered("reward/mean", lambda s, w: 0.1 + 0.01 * (s * 7 % 5)),
        ),
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
    "a first step of several updates, whose ratios are not logged": altered(
        KL, lambda s, w: 0.0015 + w, unrecorded(configured(loss__num_iterations=2), *RATIOS)
    ),
    "a k1 of few tokens, which begins at 0": renamed(
        altered(KL, lambda s, w: 0.06 * math.sin(2.3 * s) if s > 1 else 0.0), KL, "kl/policy_ref/k1/mean"
    ),
    "a β of 1 in few steps": altered(
        KL, lambda s, w: 1e-5 * s, flat(altered("kl/beta", lambda s, w: 1.0, healthy(24, 24)))
    ),
    "an entropy that is gone while the reward still rises": altered(ENTROPY, lambda s, w: max(0.03, 1.2 - 0.04 * s)),
    "solved in the end": altered(
        REWARD, lambda s, w: 1.0 if s > 45 else w, altered(EQUAL, lambda s, w: 1.0 if s > 45 else w)
    ),
    "a β that overshoots once": altered(
        "kl/beta", lambda s, w: 0.05 * (1 + 6 * math.exp(-(((s - 15) / 6) ** 2))), altered(KL, lambda s, w: w)
    ),
    "several uses of a batch, some of it clipped": configured(loss__num_iterations=4),
    "a KL that jumps with what is written": altered(
        KL, lambda s, w: w + 0.15 * (s > 30), altered(ENTROPY, lambda s, w: w - 0.004 * s)
    ),
    "clipping turned off by 0": flat(configured(optim__max_grad_norm=0)),
    "a β that PID keeps": steered("pid"),
    "a β that the dual keeps": steered("dual"),
    "a β that grew, and nothing was lost": altered(REWARD, lambda s, w: 0.3 + 0.004 * s, overshot()),
    "a KL that is back because its reference moved": altered(
        REWARD, lambda s, w: 0.3 + 0.004 * s, overshot(reference__kind="snapshot", reference__every=20)
    ),
    "a lone spike of the KL": altered(
        KL, lambda s, w: 0.05 if s == 30 else 0.008, configured(kl__controller={"name": "pid", "target": 0.02})
    ),
    "a plateau that gives a little back": altered(
        REWARD,
        lambda s, w: 0.7 + 0.01 * (30 < s < 80) - 0.08 * max(0.0, (s - 80) / 80) + 0.02 * math.sin(7 * s),
        healthy(steps=160),
    ),
    "harder data after much was learned": altered(
        REWARD,
        lambda s, w: 0.3 + 0.3 * min(1.0, s / 70) - 0.18 * max(0.0, (s - 90) / 70) + 0.02 * math.sin(7 * s),
        healthy(steps=160),
    ),
    "a reward in hundredths": logged(
        logged(altered("reward/within_group_std", lambda s, w: 0.004), "reward/max", lambda s: 0.01),
        "reward/min",
        lambda s: 0.0,
    ),
    "cold, with a spread": configured(rollout__temperature=0.2),
    "hot, and it learns": configured(rollout__temperature=2.0),
    "a log that begins late": replace(
        still(healthy()), series={name: late(series) for name, series in still(healthy()).series.items()}
    ),
    "a reward every other step": without_steps(healthy(source="prime-rl", config={}), REWARD, *range(2, 61, 2)),
    "an entropy summed over completions": altered(
        ENTROPY, lambda s, w: 40 * w, flat(healthy(source="table", config={}, vocabulary=None))
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


def test_a_kl_that_goes_back_with_the_reward_is_what_was_unlearned() -> None:
    lost = altered(REWARD, lambda s, w: 0.3 + (0.3 if 10 < s < 25 else 0.0), altered(KL, falling(0.06, 1e-4)))
    assert {finding.code for finding in check_history(lost).findings if finding.severity != "note"} == {
        "reward/collapse"
    }


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
    """A TRL run in which a reward part is paid, with held-out scores of the total and of that part."""
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


@pytest.mark.parametrize(
    "history",
    [
        scored(0.3, 0.2, 0.3, 0.2, 0.2),  # of ten problems
        scored(0.45, 0.173, 0.45, 0.173, 0.45),
        scored(0.9, 1.0, 1.0, 1.0),
        altered("parse/ok_fraction", lambda s, w: 0.12 + 0.003 * s, altered("reward/mean", lambda s, w: 0.1)),
    ],
)
def test_what_chance_or_learning_explains_is_no_alarm(history):
    codes = {finding.code for finding in check_history(history).findings if finding.severity != "note"}
    assert not codes & {"eval/train-gap", "output/unparseable"}


def first(history: History) -> str:
    return next((f.code for f in check_history(history).findings if f.severity != "note"), "")


@pytest.mark.parametrize("share", [5e-324, 1e-310, 1e-9, 0.25, 1.0])
def test_a_share_of_next_to_nothing_is_one_of_many_completions(share: float) -> None:
    assert 1 <= _completions(Log.of(healthy(), LIMITS), Series.of([(1, share), (2, share)])) <= MOST


def test_samples_that_are_known_to_be_old() -> None:
    apart = altered("kl/sampler_policy/k3/mean", lambda step, was: 0.05 + 0.001 * math.sin(5 * step))
    assert first(logged(apart, "staleness/mean", lambda step: 25.0)) == "sampler/too-old"
    assert first(logged(apart, "staleness/mean", lambda step: 0.0)) != "sampler/too-old"


def test_the_clearest_of_several_tests_is_counted_as_often() -> None:
    rng = np.random.default_rng(0)
    series = Series.of((step, 0.002 * step + rng.normal(0, 0.1)) for step in range(200))
    both = [change.chance for change in (trend(series), ends(series)) if change is not None]
    found, log = course(series), Log.of(healthy(), LIMITS)
    assert found is not None
    assert found.chance == pytest.approx(min(1.0, 2 * min(both)))
    assert log.clear(replace(found, chance=log.level / 2), 2)
    assert not log.clear(replace(found, chance=log.level / 2), 3)


def test_a_figure_that_jumps_to_a_level_and_is_the_same_from_there_on() -> None:
    lost = altered(REWARD, lambda step, was: 0.0 if step > 30 else was)
    lost = altered("entropy/mean", lambda step, was: was if step <= 30 else 10.0 + 0.01 * math.sin(3 * step), base=lost)
    lost = altered("length/mean", lambda step, was: was if step <= 30 else 64.0, base=lost)
    assert first(lost) == "run/shift"
    frozen = healthy()
    for name, series in frozen.series.items():  # the last value of each is what it has from then on
        frozen = altered(name, lambda step, was, row=series: was if step <= 30 else row.values[30], base=frozen)
    assert first(frozen) != "run/shift"


@pytest.mark.parametrize(
    ("kl", "gain", "named"),
    [(1e-5, 0.4, True), (3e-4, 0.4, True), (0.02, 0.4, False), (1e-5, 0.02, False)],
    ids=["far too near", "too near", "far enough", "little gained"],
)
def test_a_reward_gains_no_more_than_the_kl_allows(kl: float, gain: float, named: bool) -> None:
    """The KL per completion is 30 times that of a token. Rewards of 0 and 1 have a range of 1."""
    near = altered("kl/policy_ref/k3/mean", lambda step, was: kl * (1 + 0.2 * math.sin(5 * step)) * (step > 1))
    run = altered(REWARD, lambda step, was: 0.3 + gain * step / 60 + 0.02 * math.sin(7 * step), base=near)
    run = altered("reward/std", lambda step, was: 0.15, base=altered(ENTROPY, lambda step, was: 1.2, base=run))
    assert (first(run) == "reference/follows") == named
    moving = replace(run, config={**run.config, "reference": {"kind": "snapshot", "every": 5}})
    assert first(moving) != "reference/follows"


@pytest.mark.parametrize(
    ("scores", "gains", "named"),
    [
        ((0.305,) * 6, True, True),
        ((0.3047,) * 4, True, True),
        ((0.305,) * 3, True, False),
        ((0.305,) * 6, False, False),
        ((0.305, 0.305, 0.315, 0.305, 0.305, 0.305), True, False),
    ],
    ids=["the same", "the same four times", "too few", "so is the reward", "all but the same"],
)
def test_held_out_scores_that_never_change(scores: tuple[float, ...], gains: bool, named: bool) -> None:
    run = healthy() if gains else flat(healthy())
    held_out = Series.of((10 * i, score) for i, score in enumerate(scores))
    run = replace(run, evaluations=(), series={**run.series, "eval/accuracy": held_out})
    assert ("eval/train-gap" in [f.code for f in check_history(run).findings]) == named
    recorded = tuple(evaluation("sort", "trained", 10 * i, score) for i, score in enumerate(scores))
    run = replace(unrecorded(run, "eval/accuracy"), evaluations=recorded)
    assert ("eval/train-gap" in [f.code for f in check_history(run).findings]) == named


def test_a_few_held_out_problems_may_well_score_the_same() -> None:
    for n, named in ((8, False), (128, True)):
        recorded = tuple(evaluation("sort", "trained", 10 * i, 0.25, n) for i in range(5))
        codes = [f.code for f in check_history(replace(healthy(), evaluations=recorded)).findings]
        assert ("eval/train-gap" in codes) == named
    held_out = Series.of((10 * i, 0.3) for i in range(6))  # of ten, for all that is known
    run = replace(healthy(), evaluations=(), series={**healthy().series, "eval/accuracy": held_out})
    assert "eval/train-gap" not in [f.code for f in check_history(run).findings]


def test_the_last_evaluation_on_every_line_is_one_evaluation() -> None:
    run = logged(replace(healthy(), evaluations=()), "eval/accuracy", lambda step: 0.3047)
    assert "eval/train-gap" not in [f.code for f in check_history(run).findings]


def test_without_a_range_of_rewards_the_kl_bounds_no_gain() -> None:
    """Mean rewards from 0.3 to 0.7 may come from rewards between −100 and 100."""
    near = altered(KL, lambda step, was: 1e-5 * (1 + 0.2 * math.sin(5 * step)) * (step > 1))
    assert first(unrecorded(near, "reward/std")) == "reference/follows"  # whose entropy falls by half
    run = altered("reward/std", lambda step, was: 0.15, base=altered(ENTROPY, lambda step, was: 1.2, base=near))
    assert first(run) == "reference/follows"
    alone = unrecorded(run, "reward/std")
    assert first(alone) != "reference/follows"
    ends = logged(logged(alone, "reward/max", lambda step: 1.0), "reward/min", lambda step: 0.0)
    assert first(ends) == "reference/follows"
    wide = logged(logged(alone, "reward/max", lambda step: 100.0), "reward/min", lambda step: -100.0)
    assert first(wide) != "reference/follows"
