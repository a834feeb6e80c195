"""Faults that no single step shows: controllers, references, limits and warm-ups over the steps of a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from doctor.schooled import schooled_config
from keel.doctor.findings import Finding
from keel.doctor.keel_subject import build_subject
from keel.doctor.probes.controller import over_the_run, steered
from keel.doctor.probes.limits import probe_limits
from keel.doctor.probes.objective import probe_advantage
from keel.doctor.probes.reach import probe_reach
from keel.doctor.probes.reference import probe_reference
from keel.doctor.probes.update import probe_update
from keel.doctor.thresholds import load_thresholds
from keel.run.build import controller_from_options

pytestmark = pytest.mark.doctor


LIMITS = load_thresholds()


def controlled(text: str, steps: int = 100, *more: str) -> list[Finding]:
    config = schooled_config(f"kl.controller={text}", f"run.max_steps={steps}", *more)
    run = SimpleNamespace(controller=controller_from_options(config.kl, config.episodes_per_step))
    setup: Any = SimpleNamespace(config=config, run=run, thresholds=LIMITS)
    return [*steered(setup, {})] or [*over_the_run(setup, {})]


@pytest.mark.parametrize(
    ("controller", "words"),
    [
        ("{name: fixed, warmup_steps: 1000}", "longer than the run"),
        ("{name: warmup, steps: 1000}", "longer than the run"),
        ("{name: linear, end: 0, steps: 2}", "almost no effect"),
        ("{name: pid, target: 0.05, proportional: 100}", "reacts to noise"),
        ("{name: dual, target: 0.05, learning_rate: 50, smoothing: 0}", "reacts to noise"),
        ("{name: ziegler, target: 0.5, horizon: 10000000}", "too slow"),
        ("{name: ziegler, target: 0.5, horizon: 1}", "reacts to noise"),
    ],
)
def test_controllers_that_do_not_fit_the_run(controller: str, words: str) -> None:
    (found,) = controlled(controller)
    assert (found.code, found.severity) == ("kl/controller", "warning")
    assert words in found.cause


@pytest.mark.parametrize("beta", [1e-4, 3e-4, 1e-3, 0.04])
def test_a_small_beta_that_a_controller_multiplies_rules_nothing(beta: float) -> None:
    assert controlled("{name: pid, target: 0.05}", 100, f"kl.beta={beta}") == []


@pytest.mark.parametrize(
    "controller",
    [
        "{name: fixed, warmup_steps: 50}",
        "{name: linear, end: 0, steps: 50}",
        "{name: dual, target: 0.05}",
        "{name: pid, target: 0.05}",
        "{name: step, target: 0.05, preset: ppo}",
        "{name: ziegler, target: 0.5}",
    ],
)
def test_controllers_that_do(controller: str) -> None:
    assert controlled(controller) == []


def probed(probe: Any, *overrides: str) -> list[str]:
    setup = build_subject(schooled_config(*overrides))
    if probe in (probe_limits, probe_reach):
        probe_update(setup)
    return [finding.code for finding in probe(setup).findings]


@pytest.mark.parametrize(
    ("code", "probe", "overrides"),
    [
        ("reference/follows", probe_reference, ["reference={kind: snapshot, every: 2}"]),
        ("reference/follows", probe_reference, ["reference={kind: ema, alpha: 0.6, every: 1}"]),
        ("reference/follows", probe_limits, ["reference={kind: kl_triggered, threshold: 1.0e-9}"]),
        ("loss/clip", probe_limits, ["loss.loss_type=cispo", "loss.epsilon_high=1000", "loss.num_iterations=4"]),
        ("loss/clip", probe_limits, ["loss.loss_type=sapo", "loss.sapo_temperature_pos=1e9", "loss.num_iterations=4"]),
        ("loss/clip", probe_limits, ["loss.epsilon=3e-4", "loss.num_iterations=4"]),
        ("loss/no-gradient", probe_limits, ["loss.mismatch={kind: mask, cap: 1.0}", "rollout.dtype=bfloat16"]),
        ("kl/rejects-all", probe_limits, ["kl.collect_max=1e-6"]),
        ("sampler/too-old", probe_limits, ["rollout.max_staleness=60", "run.max_steps=100"]),
        ("optim/no-update", probe_reach, ["reward.warmup_steps=1000"]),
        ("reward/gold", probe_advantage, ["reward.shuffle=1"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_named(code: str, probe: Any, overrides: list[str]) -> None:
    assert probed(probe, *overrides) == [code]


@pytest.mark.parametrize(
    ("probe", "overrides"),
    [
        (probe_limits, ["reference={kind: kl_triggered, threshold: 0.1}", "rollout.max_staleness=4"]),
        (probe_limits, ["loss.loss_type=cispo", "loss.epsilon_high=8", "loss.num_iterations=4"]),
        (probe_limits, ["loss.loss_type=sapo", "loss.sapo_temperature_pos=2", "loss.num_iterations=4"]),
        (probe_limits, ["loss.loss_type=gspo", "loss.epsilon=3e-4", "loss.num_iterations=4"]),
        (probe_limits, ["loss.epsilon=0.1", "loss.num_iterations=4"]),
        (probe_limits, ["loss.mismatch={kind: icepop, floor: 0.5, cap: 2.0}", "rollout.dtype=bfloat16"]),
        (probe_reach, ["reward.warmup_steps=10"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_silent(probe: Any, overrides: list[str]) -> None:
    assert probed(probe, *overrides) == []
