"""`configs/chess_step0_kl.yaml`: a model that was trained without dropout and is run with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from doctor.followed import preflight_of
from doctor.worlds import CONFIGS
from keel.api import supervise, train
from keel.config import Config, load_config
from keel.doctor.examine import examine
from keel.doctor.preflight import preflight

pytestmark = pytest.mark.doctor


QUIET = ("model.device=cpu", "log={console: none, tensorboard: false}", "eval.samples=2")


@pytest.fixture(scope="module")
def schooled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The SFT warm start in the configuration, with a few steps."""
    shape = (
        "model.name=keel.recipes.chess.models:chess_gpt2_3x64",
        "task.plies=[0,0]",
        "rollout.max_completion_length=32",
    )
    short = ("warmstart.steps=40", "warmstart.warmup_steps=5", f"run.dir={tmp_path_factory.mktemp('chess')}")
    run = supervise(load_config(CONFIGS / "chess_warmstart.yaml", [*shape, *short, *QUIET])).directory
    return run / "checkpoints" / "step-40"


def configured(model: Path, *overrides: str) -> Config:
    return load_config(CONFIGS / "chess_step0_kl.yaml", [f"model.name={model}", *QUIET, *overrides])


def test_dropout_is_named_first_and_explains_the_kl(schooled: Path) -> None:
    findings = preflight(configured(schooled)).findings
    assert findings[0].code == "scoring/dropout"
    assert "model.dropout=false" in findings[0].advice
    at_start = next(finding for finding in findings if finding.code == "kl/at-start")
    assert at_start.cause.startswith("dropout: with the policy in evaluation mode the KL is 0")


def test_the_finished_run_says_the_same(schooled: Path, tmp_path: Path) -> None:
    """A KL at the start and a gap to the sampler are symptoms, so the cause must come first."""
    run = train(configured(schooled, f"run.dir={tmp_path}", "run.max_steps=1")).directory
    first, *others = examine(run).findings
    assert (first.code, first.advice) == ("scoring/dropout", "set model.dropout=false")
    assert "kl/at-start" in [finding.code for finding in others]


def test_its_remedy_is_the_whole_remedy(schooled: Path) -> None:
    remedied = preflight_of(configured(schooled, "model.dropout=false"), "scoring", "reference", "kl")
    codes = {finding.code for finding in remedied.findings}
    assert {"scoring", "reference"} <= set(remedied.sound)
    assert not codes & {"scoring/dropout", "kl/at-start"}
