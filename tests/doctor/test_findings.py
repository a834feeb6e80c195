"""Finding codes, their order, and the diagnosis as data."""

from __future__ import annotations

import random

import pytest

from keel.base.errors import KeelError
from keel.doctor import CODES, Diagnosis, Finding, finding, ranked

CONTRACT = [
    "kl/at-start",
    "kl/reversed",
    "kl/no-gradient",
    "kl/explosion",
    "kl/over-budget",
    "kl/not-learning",
    "kl/unneeded",
    "scoring/dropout",
    "scoring/nondeterministic",
    "scoring/positions",
    "mask/attention",
    "mask/not-actions",
    "sampler/temperature",
    "sampler/filter",
    "sampler/precision",
    "sampler/stale",
    "reference/wrong",
    "reference/adapter-on",
    "reference/moving",
    "advantage/amplified",
    "reward/cliff",
    "reward/constant",
    "reward/weak",
    "reward/non-finite",
    "output/random-weights",
    "output/unparseable",
    "output/truncated",
    "prompt/truncated",
    "optim/lr-too-high",
    "optim/non-finite",
    "optim/spike",
    "retention/dropping",
    "eval/train-gap",
    "device/placement",
]


def test_every_code_of_the_contract_is_there_and_explained():
    assert set(CONTRACT) <= set(CODES)
    for code in CODES.values():
        assert code.severity in ("error", "warning", "note")
        assert code.meaning.endswith(".")
        assert code.decided.endswith(".")


def test_worst_first_and_causes_before_symptoms():
    expected = ["scoring/dropout", "kl/at-start", "kl/explosion", "kl/over-budget", "kl/unneeded"]
    findings = [finding(code, "e", "c", "a") for code in expected]
    for seed in range(10):
        mixed = random.Random(seed).sample(findings, len(findings))
        assert [finding.code for finding in ranked(mixed)] == expected


def test_severity_beats_rank():
    low, high = (
        finding("scoring/dropout", "", "", "", severity="warning"),
        finding("kl/not-learning", "", "", "", "error"),
    )
    assert ranked([low, high]) == [high, low]


def test_an_unknown_code_is_refused_with_the_nearest():
    with pytest.raises(KeelError, match="kl/explosion"):
        finding("kl/explosions", "", "", "")


def test_a_diagnosis_is_healthy_with_notes_only():
    note, warning = finding("kl/unneeded", "e", "c", "a"), finding("kl/over-budget", "e", "c", "a")
    assert Diagnosis((note,)).exit_status == 0
    assert Diagnosis((note, warning)).exit_status == 1
    data = Diagnosis((note, warning), notes=("\x1b[32mgreen\x1b[0m",)).as_dict()
    assert data["findings"][0] == {
        "code": "kl/over-budget",
        "severity": "warning",
        "evidence": "e",
        "cause": "c",
        "advice": "a",
        "options": (),
    }
    assert data["notes"] == ["green"]
    assert isinstance(note, Finding)
