"""The table of hypotheses: each row decided by a finding, by a figure, or by neither."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from keel.doctor.diagnosis import Hypothesis
from keel.doctor.findings import CODES, found
from keel.doctor.history import History, Series
from keel.doctor.hypotheses import ROWS, history_figures, weigh
from keel.doctor.thresholds import load_thresholds

LIMITS = load_thresholds()
NAMES = [*(f"H0{i}" for i in range(1, 9)), *(f"E0{i}" for i in range(1, 7))]


def weighed(*codes: str, severity: str | None = None, **figures: float) -> dict[str, Hypothesis]:
    findings = [found(code, "evidence 7", "cause", "advice", severity=severity) for code in codes]  # type: ignore[arg-type]
    named = {name.replace("__", "/").replace("_S_", " "): value for name, value in figures.items()}
    return {hypothesis.name: hypothesis for hypothesis in weigh(findings, named, LIMITS)}


def test_without_figures_nothing_can_be_said() -> None:
    table = weighed()
    assert list(table) == NAMES
    assert {hypothesis.verdict for hypothesis in table.values()} == {"not testable here"}
    assert all(hypothesis.action != "none" for hypothesis in table.values())


@pytest.mark.parametrize("row", [row for row in ROWS if row.codes], ids=lambda row: row.name)
def test_a_finding_confirms_and_brings_its_figure(row: object) -> None:
    for code in row.codes:  # type: ignore[attr-defined]
        assert code in CODES
        hypothesis = weighed(code)[row.name]  # type: ignore[attr-defined]
        assert hypothesis.verdict == "confirmed"
        assert hypothesis.figure == f"{code}: evidence 7"


def test_a_note_confirms_nothing() -> None:
    assert weighed("advantage/amplified", severity="note")["H01"].verdict == "not testable here"


def test_a_figure_without_a_finding_rules_out() -> None:
    table = weighed(advantage__amplification=2.0, kl_term__cosine=1.0)
    assert table["H01"].verdict == table["H03"].verdict == "ruled out"
    assert table["H01"].figure == "differences of reward are multiplied by 2"
    assert table["H02"].verdict == "not testable here"


def test_over_a_fifth_near_the_limit_confirms_truncation() -> None:
    assert weighed(truncation__completions_cut=0.2)["H04"].verdict == "ruled out"
    beyond = weighed(truncation__completions_cut=0.21)["H04"]
    assert beyond.verdict == "confirmed"
    assert "0.21" in beyond.figure


def test_several_turns_are_judged_only_where_there_are_some() -> None:
    assert weighed("mask/not-actions")["H07"].verdict == "not testable here"
    assert weighed(masks__tool_tokens=12.0)["H07"].verdict == "ruled out"
    assert weighed("mask/not-actions", masks__tool_tokens=12.0)["H07"].verdict == "confirmed"


def test_a_figure_that_is_not_finite_decides_nothing() -> None:
    assert weighed(advantage__amplification=math.nan)["H01"].verdict == "not testable here"


def test_the_figures_of_a_history() -> None:
    series = {
        "kl/policy_ref/k3/mean": Series.of([(1, 0.1), (2, 3.0), (3, 0.2)]),
        "entropy/mean": Series.of([(1, math.log(100.0)), (2, 1.0)]),
        "reward/within_group_std": Series.of([(1, 0.2), (2, 0.4)]),
        "parse/ok_fraction": Series.of([(1, 0.0), (2, 0.0), (3, 0.03), (4, 0.9)]),
    }
    scores = tuple({"split": "trained", "pass@1": value} for value in (0.2, 0.5))
    figures = history_figures(History("keel", Path("run"), series, evaluations=scores, vocabulary=10_000))
    assert figures["kl/policy_ref/k3/max"] == 3.0
    assert figures["entropy/share"] == pytest.approx(0.5)
    assert figures["reward/within_group_std"] == pytest.approx(0.3)
    assert figures["eval/gain"] == pytest.approx(0.3)
    assert figures["parse/first_steps"] == pytest.approx(0.01)
    assert "kl/configured" not in figures


def test_output_that_could_not_be_read_at_first_confirms_its_link_of_the_chain() -> None:
    assert weighed(parse__first_steps=0.01)["E02"].verdict == "confirmed"
    assert weighed(parse__first_steps=0.9)["E02"].verdict == "ruled out"
