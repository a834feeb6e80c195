"""The eight suspects of the multi-hop run: `configs/musique.yaml` with a stand-in model, with and without faults."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from doctor.followed import preflight_of
from doctor.worlds import musique_config
from keel.doctor.findings import Diagnosis, SuspectVerdict
from keel.doctor.preflight import preflight

pytestmark = pytest.mark.doctor


EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = tuple(f"H0{number}" for number in range(1, 9))


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


def suspects(diagnosis: Diagnosis) -> dict[str, SuspectVerdict]:
    return {row.name: row for row in diagnosis.hypotheses if row.name in NAMES}


def test_each_suspect_is_decided_by_a_figure() -> None:
    rows = suspects(preflight(musique_config()))
    assert tuple(rows) == NAMES
    for row in rows.values():
        assert row.verdict in ("confirmed", "ruled out") or row.name == "H05", row
        assert any(sign.isdigit() for sign in row.figure), row
    # What a model that answers by guessing earns hardly differs within a group, and a few groups that differ neither
    # confirm nor rule out that the reward is weak; nothing else is wrong with it.
    assert {name for name, row in rows.items() if row.verdict == "confirmed"} <= {"H05"}
    assert rows["H01"].figure == "differences of reward are multiplied by at most 1"  # dr_grpo divides by nothing
    assert "tokens of the environment" in rows["H07"].figure


def test_the_loss_mask_as_attention_mask_is_the_first_finding() -> None:
    diagnosis = preflight(musique_config("model.scorer=one_mask:score", "kl.exact=false"))
    first, rows = diagnosis.findings[0], suspects(diagnosis)
    assert first.code == "mask/attention"
    assert "attention_mask" in first.advice
    assert rows["H02"].verdict == rows["H07"].verdict == "confirmed"
    assert rows["H06"].verdict == "ruled out"  # the defect looked like weights that are not synced


def test_dropout_of_the_adapter_is_named() -> None:
    first = preflight_of(musique_config("model.lora.dropout=0.05"), "scoring", "reference").findings[0]
    assert first.code == "scoring/dropout"
    assert "model.lora.dropout=0" in first.advice


def test_dividing_by_a_small_deviation_is_told_by_how_much() -> None:
    diagnosis = preflight_of(musique_config("loss.scale_rewards=group"), "advantage")
    assert suspects(diagnosis)["H01"].verdict != "ruled out"
    (amplified,) = [finding for finding in diagnosis.findings if finding.code == "advantage/amplified"]
    (times,) = re.findall(r"multiplied by ([0-9.]+)", amplified.evidence) or re.findall(
        r"([0-9.]+) ?×", amplified.evidence
    )
    assert float(times) > 5.0
