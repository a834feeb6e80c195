"""Thresholds are data with reasons, and a loosened threshold is always reported."""

from __future__ import annotations

import re
from dataclasses import asdict

import pytest

import keel
from doctor.histories import altered
from keel.base.errors import KeelError
from keel.cli import main
from keel.config import load_config
from keel.doctor import CODES, load_thresholds
from keel.doctor.checks import check_history
from keel.doctor.thresholds import check_thresholds, shipped_thresholds, thresholds_of
from keel.trainer.options import GuardLimits


def test_each_has_unit_source_and_reason():
    for name, threshold in shipped_thresholds().items():
        assert threshold.unit, name
        assert threshold.source, name
        assert threshold.reason, name
        assert threshold.alarm in ("above", "below"), name


def test_the_contracts_figures():
    limits = load_thresholds()
    assert limits["kl_over_budget"] == 0.2
    assert limits["kl_not_learning"] == 0.01
    assert limits["near_limit"] == 0.2
    assert limits["reward_spread"] == 0.1


def test_codes_speak_of_thresholds_that_exist():
    for code in CODES.values():
        for name in re.findall(r"`(\w+)`", code.decided):
            assert name in shipped_thresholds(), (code.name, name)


def test_raising_an_alarm_is_said_and_tightening_it_is_not():
    assert load_thresholds({"kl_over_budget": 0.1, "kl_not_learning": 0.02}).raised == ()
    (note,) = load_thresholds({"kl_over_budget": 0.5}).raised
    assert "threshold kl_over_budget raised from 0.2 to 0.5" in note
    (note,) = load_thresholds(["kl_not_learning=0.001"]).raised
    assert "threshold kl_not_learning lowered from 0.01 to 0.001" in note


def test_a_silenced_finding_leaves_its_trace():
    far = altered("kl/policy_ref/k3/mean", lambda step, was: 0.0 if step == 1 else min(0.3, 0.02 * step))
    assert [f.code for f in check_history(far).findings] == ["kl/over-budget"]
    quiet = check_history(far, load_thresholds({"kl_over_budget": 0.5}))
    assert [f.code for f in quiet.findings] == ["doctor/threshold-raised"]
    assert "raised from 0.2 to 0.5" in quiet.findings[0].evidence
    assert quiet.raised_thresholds
    assert quiet.exit_status == 0


@pytest.mark.parametrize(
    "overrides", [{"kl_over_budgt": 1}, {"kl_over_budget": "much"}, ["kl_over_budget"], {"kl_explosion": True}]
)
def test_mistakes_are_one_line(overrides):
    with pytest.raises(KeelError, match="threshold"):
        load_thresholds(overrides)


def test_a_configuration_carries_them():
    config = load_config({}, ["doctor.thresholds.kl_over_budget=0.4"])
    assert config.doctor.thresholds.params == {"kl_over_budget": 0.4}
    run = load_config(config).to_dict()
    assert thresholds_of(run)["kl_over_budget"] == 0.4
    assert thresholds_of(run, ["kl_over_budget=0.3"])["kl_over_budget"] == 0.3
    with pytest.raises(KeelError, match="kl_over_budget"):
        check_thresholds(load_config({"doctor": {"thresholds": {"kl_over_budge": 1}}}))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["guards.grad_spike=3", "doctor.thresholds.grad_spike=50"],
            "guards.grad_spike is 3 and doctor.thresholds.grad_spike is 50: both set the same threshold, "
            "give one of them",
        ),
        (["doctor.thresholds.grad_spike=1"], "threshold grad_spike is 1: it must be above 1"),
        (["doctor.thresholds.grad_spike=-1"], "threshold grad_spike is -1: it must be above 1"),
        (["doctor.thresholds.tool_errors=-0.1"], "threshold tool_errors is -0.1: it must be at least 0"),
    ],
)
def test_a_threshold_that_a_guard_reads_is_one_number_that_makes_sense(overrides, says):
    with pytest.raises(KeelError) as caught:
        check_thresholds(load_config({}, overrides))
    assert str(caught.value) == says


def test_a_guards_threshold_may_be_given_twice_if_it_agrees():
    for overrides in (
        ["guards.grad_spike=3", "doctor.thresholds.grad_spike=3"],
        ["guards.grad_spike=3"],
        ["doctor.thresholds.grad_spike=3"],
    ):
        config = load_config({}, overrides)
        check_thresholds(config)
        assert thresholds_of(config.to_dict())["grad_spike"] == 3.0
        assert GuardLimits.of(config.guards, config.doctor.thresholds.params).grad_spike == 3.0


def test_the_limits_of_the_trainer_are_thresholds_of_the_same_value():
    assert {name: shipped_thresholds()[name].value for name in asdict(GuardLimits())} == asdict(GuardLimits())
    given = {"doctor": {"thresholds": dict.fromkeys(asdict(GuardLimits()), 2.0)}}
    config = load_config(given)
    assert set(asdict(GuardLimits.of(config.guards, config.doctor.thresholds.params)).values()) == {2.0}


def test_commands_and_programs_refuse_an_unknown_threshold(tmp_path, capsys):
    said = "unknown threshold 'kl_over_budge': did you mean 'kl_over_budget'?"
    assert main(["train", "default", "doctor.thresholds.kl_over_budge=1", f"run.dir={tmp_path}"]) == 2
    assert said in capsys.readouterr().err
    with pytest.raises(KeelError, match=re.escape(said)):
        keel.train({"run": {"dir": str(tmp_path)}}, overrides=["doctor.thresholds.kl_over_budge=1"])
