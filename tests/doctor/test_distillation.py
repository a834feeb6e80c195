"""Distillation: each fault is named, and a correct run with constant rewards has no finding."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from doctor.histories import altered, configured, evaluation, healthy
from keel.doctor.checks import check_history
from keel.doctor.history import History, Series

KL = "kl/policy_ref/exact/mean"
SERIES = {
    "reward/mean": 0.0,
    "reward/std": 0.0,
    "reward/within_group_std": 0.0,
    "reward/zero_variance_fraction": 1.0,
    "kl/beta": 1.0,
}


def distilled(start: float = 0.37, rate: float = 0.04, *, last: float = 0.6, **options: object) -> History:
    """A correct run: KL to the teacher from 0.37 to about 0.03 nats per token, accuracy from 0.3 to 0.6."""
    options = {"reference__model": "teacher", "loss__policy_weight": 0, "kl__estimator": "exact"} | options
    history = configured(healthy(), **options)
    steps = range(1, 61)
    series = {name: Series.of((step, value) for step in steps) for name, value in SERIES.items()}
    noise = {step: 1 + 0.1 * math.sin(12.9898 * (step - 1)) for step in steps}
    series[KL] = Series.of((step, start * math.exp(-rate * (step - 1)) * noise[step]) for step in steps)
    of_policy = {name: values for name, values in history.series.items() if not name.startswith("kl/policy_ref")}
    evaluations = (evaluation("sort", "trained", 0, 0.3), evaluation("sort", "trained", 60, last))
    return replace(history, series={**of_policy, **series}, evaluations=evaluations, rollouts=())


def codes(history: History) -> list[str]:
    return [finding.code for finding in check_history(history).findings]


def lengthening(history: History, at_limit: float) -> History:
    """Completions become four times as long. The share at the limit rises from 2 % to `at_limit`."""
    longer = altered("length/mean", lambda step, was: 15.0 + 0.75 * step, history)
    return altered("length/truncated_fraction", lambda step, was: 0.02 + at_limit * (step - 1) / 59, longer)


def sharing(history: History, overlap: float) -> History:
    """The probability mass on common tokens, rising from `overlap`."""
    series = Series.of((step, overlap + (1 - overlap) * (step - 1) / 60) for step in range(1, 61))
    return replace(history, series={**history.series, "kl/policy_ref/overlap": series})


def test_a_sound_run_gives_nothing() -> None:
    diagnosis = check_history(distilled())
    assert diagnosis.findings == ()
    assert "distillation" in diagnosis.sound
    assert "distillation" not in check_history(healthy()).sound


@pytest.mark.parametrize(
    ("history", "code", "severity", "figure"),
    [
        (distilled(3.0, 0.02), "teacher/far", "warning", "5 %"),  # e^-3
        (sharing(distilled(), 0.3), "teacher/far", "warning", "share 30 %"),
        (distilled(rate=0.0), "teacher/not-approached", "warning", "0.3"),
        (distilled(rate=-0.02), "teacher/not-approached", "error", "steps 51–60"),
        (distilled(last=0.1), "teacher/worse", "warning", "0.3 → 0.1"),
        (lengthening(distilled(), 0.9), "length/explosion", "warning", "88 %"),
    ],
)
def test_what_goes_wrong_is_named(history: History, code: str, severity: str, figure: str) -> None:
    (found,) = [finding for finding in check_history(history).findings if finding.code == code]
    assert found.severity == severity
    assert figure in found.evidence


@pytest.mark.parametrize(
    "history",
    [
        distilled(1.0),
        sharing(distilled(), 0.8),
        distilled(rate=0.01),  # slow, and clear
        distilled(0.004, 0.0),  # the student is the teacher already
        distilled(rate=0.0, loss__policy_weight=1),  # the reward pulls too
        lengthening(distilled(), 0.0),  # the teacher writes longer
    ],
)
def test_the_sound_twin_is_silent(history: History) -> None:
    codes_of_teacher = [code for code in codes(history) if code.startswith(("teacher/", "length/"))]
    assert codes_of_teacher == []


def test_accuracy_that_falls_away_from_the_teacher_is_not_the_teachers_fault() -> None:
    assert "teacher/worse" not in codes(distilled(rate=-0.02, last=0.1))


def test_a_form_without_a_gradient_explains_it_and_the_exact_one_is_advised() -> None:
    history = distilled(rate=-0.02, kl__estimator="k1", kl__gradient="plain", kl__allow_biased=True)
    assert codes(history)[0] == "kl/no-gradient"
    (found,) = [finding for finding in check_history(history).findings if finding.code == "teacher/not-approached"]
    assert "kl.allow_biased" in found.cause
    assert found.severity == "note"
    assert "kl.estimator=exact" in found.options[0]


def test_few_steps_decide_nothing() -> None:
    short = distilled(rate=0.0)
    short = replace(short, series={name: series.head(20) for name, series in short.series.items()})
    diagnosis = check_history(short)
    assert diagnosis.findings == ()
    assert any(line.startswith("teacher/not-approached: ") for line in diagnosis.unchecked)
