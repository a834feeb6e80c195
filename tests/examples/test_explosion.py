"""The configurations of docs/cases.md load, and the doctor finds in them what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from keel.base.types import Problem
from keel.config import load_config
from keel.config.schema import Config
from keel.doctor.keel_subject import build_subject
from keel.doctor.preflight import preflight
from keel.doctor.probes.reference import probe_reference

pytestmark = pytest.mark.doctor


EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def example(name: str, *overrides: str) -> Config:
    return load_config(EXAMPLES / name, overrides)


def test_the_chain_of_the_explosion_is_found_before_the_run() -> None:
    diagnosis = preflight(example("explosion.yaml"))
    codes = [finding.code for finding in diagnosis.findings if finding.severity != "note"]
    assert codes[:2] == ["output/random-weights", "reward/cliff"]
    assert "optim/lr-too-high" in codes
    (unparseable,) = [finding for finding in diagnosis.findings if finding.code == "output/unparseable"]
    assert unparseable.evidence.startswith("explained by output/random-weights: ")
    verdicts = {hypothesis.name: hypothesis.verdict for hypothesis in diagnosis.hypotheses}
    assert [verdicts[name] for name in ("E01", "E02", "E03", "E05")] == ["confirmed"] * 4


def test_the_cure_differs_in_what_the_page_names() -> None:
    cured = example("explosion_cured.yaml")
    assert cured.warmstart is not None
    assert cured.optim.learning_rate == 7e-5
    assert cured.loss.scale_rewards == "none"
    assert cured.kl.gradient == "auto"


@pytest.mark.parametrize(
    ("text", "cliff", "steps"), [("1234", 1.0, 1.0), ("1243", 0.01, 0.4), ("x", -1.0, 0.0), ("", -1.0, 0.0)]
)
def test_the_two_rewards_by_hand(text: str, cliff: float, steps: float) -> None:
    import explosion

    problem = Problem("sort", "sort 4321=", "1234")
    assert explosion.cliff(problem, text).total == pytest.approx(cliff)
    assert explosion.steps(problem, text).total == pytest.approx(steps)


def test_sums_against_means_are_explained() -> None:
    config = example("explosion_cured.yaml", "warmstart=null", "model.scorer=start_kl:sums_against_means")
    (finding,) = probe_reference(build_subject(config)).findings
    assert finding.code == "kl/at-start"
    assert finding.cause.startswith("sums against means")
