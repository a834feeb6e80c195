"""Figures that were measured but not judged before: unread weights, inactive controllers, noise, hot evaluations."""

from __future__ import annotations

import math
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from doctor.schooled import schooled_config
from keel.base.types import Reward
from keel.doctor import keel_subject as doctor_setup
from keel.doctor import preflight as preflight_module
from keel.doctor.keel_subject import build_subject
from keel.doctor.measure import Measure
from keel.doctor.preflight import preflight
from keel.doctor.probes import misfit
from keel.doctor.probes.controller import steered as steered_findings
from keel.doctor.probes.exploration import probe_evaluation
from keel.doctor.probes.misfit import foreign_findings
from keel.doctor.probes.model import _rows_alike, damaged_weights, unread
from keel.doctor.probes.objective import _amplified, amplification
from keel.doctor.subject import Budget
from keel.doctor.thresholds import load_thresholds
from keel.envs.calls import TooManyHungCalls
from keel.kl.controllers import RuleController
from keel.run.build import build_policy

THRESHOLDS = load_thresholds()


def test_weights_of_a_kind_that_the_model_has_are_missed() -> None:
    layered = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(2)])})
    layers = ["layers.2.weight", "layers.0.bias"]
    others = ["score.weight", "layers.0.rotary.inv_freq", "head.bias"]
    assert unread(layered, [*layers, *others]) == layers


def steered(controller: RuleController) -> list[str]:
    setup: Any = SimpleNamespace(
        config=schooled_config("kl.beta=0.04", "run.max_steps=400"),
        run=SimpleNamespace(controller=controller),
        thresholds=THRESHOLDS,
    )
    return [finding.code for finding in steered_findings(setup, {})]


def test_a_coefficient_that_falls_silent_at_once() -> None:
    assert steered(RuleController(0.04, schedule=lambda step: 0.04 if step < 3 else 0.0)) == ["kl/controller"]
    assert steered(RuleController(0.04, schedule=lambda step: 0.04 * max(0.0, 1 - step / 100))) == []


def test_a_floor_is_no_growth() -> None:
    assert steered(RuleController(500.0, bounds=(500.0, 1e9))) == []
    growing = RuleController(0.04, schedule=lambda step: 0.04 * 2**step)
    assert steered(growing) == ["kl/controller"]


@pytest.mark.parametrize(
    ("base", "unit", "gold", "codes"),
    [
        (0.5, 1e-3, 1.0, ["advantage/amplified"]),
        (0.5, 1e-3, 0.501, ["advantage/amplified"]),
        (0.0, 1e-3, 1.0, ["advantage/amplified"]),
        (0.0, 0.01, 0.01, []),
    ],
    ids=["noise beside its size", "gold as well", "noise where nothing is right", "a reward in hundredths"],
)
def test_a_reward_in_small_units_is_no_noise(base: float, unit: float, gold: float, codes: list[str]) -> None:
    groups = [SimpleNamespace(rewards=[Reward(base + unit * i / 3) for i in range(4)]) for _ in range(16)]
    built = SimpleNamespace(judge=SimpleNamespace(remote=False), sampling=SimpleNamespace(num_generations=4))
    setup: Any = SimpleNamespace(
        thresholds=THRESHOLDS, groups=groups, shared={"gold size": gold}, built=built, budget=Budget(0.0)
    )
    spread = torch.tensor([unit * 0.43] * 16, dtype=torch.float64)
    figures = amplification(spread, spread, "group")
    assert [finding.code for finding in _amplified(setup, figures, "group")] == codes


def test_answers_of_another_column() -> None:
    reward, problem = Reward(0.0), SimpleNamespace(answer="1026", key="0")
    task = SimpleNamespace(multi_turn=False, gold_turns=lambda problem: [problem.answer])
    group = SimpleNamespace(rewards=[reward], problem=problem, completions=[SimpleNamespace(text="7")])
    config = SimpleNamespace(data=SimpleNamespace(path="rows.jsonl"))
    setup: Any = SimpleNamespace(
        thresholds=THRESHOLDS, config=config, failures=(), run=SimpleNamespace(task=task), shared={}, groups=[group]
    )
    sure = {"gold_share": 1.7, "entropy_share": 0.1, "parse_rate": 1.0}
    (finding,) = foreign_findings(setup, sure, [1.0])
    assert finding.code == "data/misaligned"
    for healthy in ({"gold_share": 0.5}, {"entropy_share": 0.9}, {"parse_rate": 0.1}):
        assert [*foreign_findings(setup, {**sure, **healthy}, [1.0])] == []
    group.rewards = [Reward(0.6)]
    assert [*foreign_findings(setup, sure, [1.0])] == []
    group.rewards, config.data.path = [reward], None  # answers that the task computes are only hard
    assert [*foreign_findings(setup, sure, [1.0])] == []


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ("rows", "same embedding"),
        ("bits", "different values"),
        ("cut", "largest magnitude"),
        ("pruned", "are zero"),
        ("half pruned", None),
        ("none", None),
    ],
)
def test_weights_that_cannot_be_what_was_trained(damage: str, named: str | None) -> None:
    setup = build_subject(schooled_config("rollout.max_staleness=1"))
    with closing(setup.run):
        tokenizer = setup.policy.tokenizer
        if damage == "rows":
            digits = [tokenizer.convert_tokens_to_ids(digit) for digit in "0123456789"]
            setup.policy.model.get_input_embeddings().weight.data[digits] = 0.0
        elif damage == "bits":
            for parameter in (p for p in setup.policy.model.parameters() if p.dim() == 2):
                step = parameter.abs().max()
                parameter.data = (parameter / step).round() * step
        layers = (p for name, p in setup.policy.model.named_parameters() if p.dim() == 2 and "proj" in name)
        for parameter in layers:
            if damage == "cut":
                parameter.data = parameter.clamp(-0.5 * parameter.std(), 0.5 * parameter.std())
            elif "pruned" in damage:
                left = 0.5 if damage == "half pruned" else 0.1
                parameter.data *= parameter.abs() >= parameter.abs().quantile(1 - left)
        found = _rows_alike(setup) or damaged_weights(setup)
        assert (found is None) == (named is None)
        assert found is None or str(named) in found[0]


@pytest.mark.parametrize(
    ("entropy", "gold", "parsed", "severity"),
    [
        (0.9, 0.9, 1.0, "error"),
        (0.6, 0.6, 0.2, "warning"),
        (0.6, 0.6, 0.9, None),
        (0.6, 0.3, 0.2, None),
        (math.nan, 0.9, 0.2, None),
    ],
)
def test_noise_is_random_weights_and_half_of_it_damage(
    entropy: float, gold: float, parsed: float, severity: str | None
) -> None:
    figures = {"entropy_share": entropy, "gold_share": gold, "parse_rate": parsed}
    assert [f.severity for f in misfit.random_findings(figures, 100, THRESHOLDS)] == [severity] * bool(severity)
    mild = severity == "warning"  # of sixteen tokens most may be answers
    assert [*misfit.random_findings(figures, 16, THRESHOLDS)] == [] or not mild


def test_weights_that_are_no_numbers_are_named_where_samples_may_be_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(config: Any, weights: Any = None) -> Any:
        loaded: Any = build_policy(config)
        loaded.model.model.layers[0].mlp.down_proj.weight.data[0, 0] = torch.nan
        return loaded, ()

    monkeypatch.setattr(doctor_setup, "_load", load)
    with pytest.warns(RuntimeWarning, match="not finite"):
        diagnosis = preflight(schooled_config("rollout.max_staleness=1"))
    assert diagnosis.findings[0].code == "scoring/non-finite"


def test_an_evaluation_of_noise() -> None:
    for temperature, codes in ((10.0, ["eval/train-gap"]), (0.6, []), (1.2, [])):
        setup = build_subject(schooled_config("eval.every=1", f"eval.temperature={temperature}"))
        assert [finding.code for finding in probe_evaluation(setup).findings] == codes
        setup.run.close()


def test_rewards_that_hang_while_a_probe_asks_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def asks(*_: Any) -> Any:
        raise TooManyHungCalls("reward slow: did not return within 0.01 s (reward.timeout_s)")

    monkeypatch.setattr(preflight_module, "MEASURES", [Measure("collection", asks, "")])
    (finding,) = preflight(schooled_config()).findings
    assert (finding.code, finding.severity) == ("reward/failed", "error")
    assert "reward.timeout_s" in finding.evidence
