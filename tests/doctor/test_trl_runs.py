"""Diagnoses of logs that TRL's own trainer wrote (bench/trl_runs.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from keel.doctor.examine import examine
from keel.doctor.findings import Diagnosis

RUNS = Path(__file__).parent / "trl_runs"
BROKEN = {
    "rate-0": "optim/no-update",
    "rate-too-high": "optim/lr-too-high",
    "form-never-asked-for": "reward/constant",
    "cut-after-one-token": "output/truncated",
    "length-paid": "reward/part-falling",
    "beta-5": "kl/too-strong",
    "dropout-on": "kl/at-start",
    "reference-of-another-checkpoint": "kl/at-start",
    "reward-by-chance": "kl/not-learning",
    "clipped-to-nothing": "optim/no-update",
    "temperature-0.05": "rollout/temperature",
    "reference-synced": "reference/follows",
    "weight-decay-10": "optim/weight-decay",
    "temperature-4": "rollout/temperature",
    "epsilon-of-adam": "optim/no-update",
    "reward-of-thousands": "reward/scale",
}
HEALTHY = sorted(path.name for path in RUNS.glob("good-*"))


def verdict(name: str) -> Diagnosis:
    return examine(RUNS / name)


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_is_left_alone(name):
    diagnosis = verdict(name)
    assert diagnosis.healthy, diagnosis.findings


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_named_first(name):
    first = verdict(name).findings[0]
    assert (first.code, first.severity == "note") == (BROKEN[name], False)


def test_every_run_has_its_verdict():
    assert {path.name for path in RUNS.iterdir()} == {*HEALTHY, *BROKEN}


def test_what_is_paid_for_instead_explains_what_it_did_to_the_completions():
    first, *others = verdict("length-paid").findings
    assert "accuracy falls from 0.219 to 0 while the reward rises from 0.537 to 3" in first.evidence
    assert {(other.code, other.severity) for other in others} == {
        ("output/truncated", "note"),
        ("reward/constant", "note"),
    }
    assert all(other.evidence.startswith("explained by reward/part-falling") for other in others)


def test_a_reward_by_chance_is_drift_without_gain():
    (finding,) = verdict("reward-by-chance").findings
    assert finding.severity == "warning"
    assert "from 0 to 0.104 nats per token" in finding.evidence


def test_a_log_is_read_without_torch():
    code = f"""
import sys
from keel.doctor.examine import examine
assert examine({str(RUNS / "rate-too-high")!r}).findings
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
