"""Simulated logs: faults are named first, and unusual healthy runs have no finding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from doctor.histories import healthy
from doctor.log_faults import LOG_FAULTS
from doctor.simulated import KINDS, Drawn, changed, noise, simulate
from keel.doctor.checks import check_history
from keel.doctor.history import History, Series
from keel.doctor.shapes import ends, fall, frozen_since, jumps, negative, trend

LEVEL = 0.01  # of thresholds.yaml: log_chance


def alarms(history: History) -> list[str]:
    return [finding.code for finding in check_history(history).findings if finding.severity != "note"]


def series(values: np.ndarray) -> Series:
    return Series.of(enumerate(values.tolist(), start=1))


# ------------------------------------------------------------------------------------------------ sound


@pytest.mark.slow
def test_sound_logs_are_accused_at_most_as_often_as_the_level_says():
    """120 runs of every kind and trainer. More false alarms than one in a hundred would contradict the level."""
    rng = np.random.default_rng(5)
    accused = [codes for kind in KINDS for _ in range(15) if (codes := alarms(simulate(rng, kind).history))]
    assert stats.binomtest(len(accused), 120, LEVEL, alternative="greater").pvalue > 0.05, accused


@pytest.mark.parametrize("shape", ["trend", "ends", "fall", "jump", "negative"])
def test_a_shape_in_noise_alone_is_as_rare_as_its_chance_says(shape):
    """Autocorrelated noise, partly heavy-tailed: a p-value of at most 1 % occurs in at most 1 % of the series."""
    rng = np.random.default_rng(3)
    tests = {
        "trend": lambda s: t.chance if (t := trend(s)) is not None else 1.0,
        "ends": lambda s: e.chance if (e := ends(s)) is not None else 1.0,
        "fall": lambda s: f.chance if (f := fall(s)) is not None else 1.0,
        "jump": lambda s: 0.0 if jumps(s, LEVEL) else 1.0,
        "negative": lambda s: negative(s, 1e-6),
    }
    count = 300
    low = sum(
        tests[shape](series(noise(rng, int(rng.integers(25, 200)), rng.uniform(0, 0.7), heavy=bool(i % 2)))) <= LEVEL
        for i in range(count)
    )
    assert stats.binomtest(low, count, LEVEL, alternative="greater").pvalue > 0.01, low


def test_shapes_are_what_they_say():
    line, steps = np.arange(40.0), np.r_[np.zeros(20), np.ones(20)]
    rising = trend(series(line))
    assert rising is not None
    assert rising.size > 30
    assert rising.chance < 1e-6
    (jump,) = jumps(series(steps + 0.01 * np.sin(7 * line)), LEVEL)
    assert jump.step == 21
    assert jump.size == pytest.approx(1, abs=0.02)
    assert jumps(series(line), LEVEL) == []  # a slope is no jump
    peak = fall(series(np.r_[line[:20], line[:20][::-1]] + 0.1 * np.sin(7 * line)))
    assert peak is not None
    assert peak.before > 15 > 5 > peak.after
    assert frozen_since(series(np.r_[line, 39.0, 39.0])) == (40, 3)
    assert frozen_since(Series((), ())) == (0, 0)
    assert negative(series(-np.ones(30)), 1e-6) < 1e-6
    assert negative(series(np.ones(30)), 1e-6) == 1.0


@pytest.mark.parametrize("source", ["verl", "OpenRLHF"])
def test_a_kl_of_exactly_0_may_be_a_run_without_a_kl_term(source):
    drawn = changed(
        simulate(np.random.default_rng(0), "no KL term", source), "entropy/mean", lambda v, s: v * (1.5 - s)
    )
    diagnosis = check_history(drawn.history)
    assert diagnosis.exit_status == 0
    assert [(f.code, f.severity) for f in diagnosis.findings] == [("reference/follows", "note")]


# ------------------------------------------------------------------------------------------------ broken


def long_enough(rng: np.random.Generator) -> Drawn:
    while len((drawn := simulate(rng, str(rng.choice(["usual", "slow"])))).steps) < 60:
        pass
    return drawn


@pytest.mark.parametrize("fault", LOG_FAULTS)
def test_a_broken_log_is_named_first(fault):
    code, break_ = LOG_FAULTS[fault]
    rng = np.random.default_rng(11)
    for _ in range(3):
        drawn = break_(long_enough(rng), rng)
        findings = check_history(drawn.history).findings
        assert [finding.code for finding in findings][:1] == [code], (drawn.kind, drawn.source, findings)
        assert any(character.isdigit() for character in findings[0].evidence)
        assert findings[0].cause
        assert findings[0].advice


def test_advice_is_in_the_options_of_the_logs_own_trainer():
    rng = np.random.default_rng(1)
    for source, option in [("verl", "actor_rollout_ref.actor.optim.lr"), ("TRL", "learning_rate")]:
        drawn = LOG_FAULTS["rate 0"][1](simulate(rng, "usual", source), rng)
        assert f"set {option}" in check_history(drawn.history).findings[0].advice


# ------------------------------------------------------------------------------------------------ anything

NUMBERS = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([0.0, 1.0, 1e308, -1e308, 3.4e38, 5e-324, 10**400, True, None, "1", [], {}]),
)
ANYTHING = st.recursive(NUMBERS | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3), max_leaves=4)
METRICS = sorted({*healthy().series, "reward/part/a", "reward/penalized", "advantage/max", "eval/x", "mismatch/ess"})
OPTIONS = [
    *("kl.beta", "kl.budget", "kl.controller", "loss.loss_type", "loss.scale_rewards", "loss.epsilon_high"),
    *("optim.learning_rate", "optim.max_grad_norm", "optim.warmup_steps", "run.max_steps", "reference.kind"),
    *("rollout.temperature", "rollout.top_p", "rollout.max_staleness", "rollout.max_completion_length"),
]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_log_ends_in_a_traceback(data):
    """Any numbers, names, events, rollouts and option types."""
    kinds = st.sampled_from(["stop", "rollback", "kl/final", "reward/failed", "guard/skipped", "tool/errors", None])
    events = data.draw(
        st.lists(
            st.fixed_dictionaries({"kind": kinds}, optional={"step": ANYTHING, "code": ANYTHING, "metrics": ANYTHING})
        )
    )
    rollouts = data.draw(
        st.lists(st.dictionaries(st.sampled_from(["step", "reward", "tracked"]), ANYTHING), max_size=9)
    )
    config: dict[str, dict[str, object]] = {}
    for option in data.draw(st.sets(st.sampled_from(OPTIONS))):
        section, name = option.split(".")
        config.setdefault(section, {})[name] = data.draw(ANYTHING)
    names = data.draw(st.lists(st.sampled_from(METRICS), max_size=6, unique=True))
    count = data.draw(st.integers(0, 40))
    drawn = {
        name: Series.of(enumerate(data.draw(st.lists(NUMBERS, min_size=count, max_size=count)), start=1))
        for name in names
    }
    history = healthy(
        series={**(healthy().series if data.draw(st.booleans()) else {}), **drawn},
        source=data.draw(st.sampled_from(["keel", "TRL", "verl", "table"])),
        events=tuple(events),
        rollouts=tuple(rollouts),
        config=config,
    )
    assert check_history(history).exit_status in (0, 1)
