"""The table of hypotheses: each row is decided by a finding, by a figure, or not at all."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from doctor.histories import altered, healthy
from keel.doctor.checks import check_history
from keel.doctor.findings import CODES, SuspectVerdict, finding
from keel.doctor.history import History, Series
from keel.doctor.measure import Outcome
from keel.doctor.suspects import SUSPECTS, RuleOut, Suspect, history_figures, judge_suspects, preflight_figures
from keel.doctor.thresholds import load_thresholds

LIMITS = load_thresholds()
NAMES = [*(f"H0{i}" for i in range(1, 9)), *(f"E0{i}" for i in range(1, 7))]


def weighed(
    *codes: str, severity: str | None = None, unchecked: tuple[str, ...] = (), **figures: float
) -> dict[str, SuspectVerdict]:
    findings = [finding(code, "evidence 7", "cause", "advice", severity=severity) for code in codes]  # type: ignore[arg-type]
    named = {name.replace("__", "/").replace("_S_", " "): value for name, value in figures.items()}
    return {hypothesis.name: hypothesis for hypothesis in judge_suspects(findings, named, LIMITS, unchecked)}


def test_without_figures_nothing_can_be_said() -> None:
    table = weighed()
    assert list(table) == NAMES
    assert {hypothesis.verdict for hypothesis in table.values()} == {"not testable here"}
    assert all(hypothesis.action != "none" for hypothesis in table.values())


@pytest.mark.parametrize("row", [row for row in SUSPECTS if row.codes], ids=lambda row: row.name)
def test_a_finding_confirms_and_brings_its_figure(row: object) -> None:
    for code in row.codes:  # type: ignore[attr-defined]
        assert code in CODES
        hypothesis = weighed(code)[row.name]  # type: ignore[attr-defined]
        assert hypothesis.verdict == "confirmed"
        assert hypothesis.figure == f"{code}: evidence 7"


def test_a_note_confirms_nothing() -> None:
    assert weighed("advantage/amplified", severity="note")["H01"].verdict == "not testable here"


def test_a_figure_on_the_safe_side_rules_out() -> None:
    table = weighed(advantage__amplification_max=2.0, kl_term__cosine=1.0, reference__kl_at_start=0.0)
    assert table["H01"].verdict == table["H03"].verdict == "ruled out"
    assert table["H01"].figure == "differences of reward are multiplied by at most 2"
    assert table["H02"].verdict == "not testable here"


RULE_OUTS = [(row, rule_out) for row in SUSPECTS for rule_out in row.ruled_out_by]


@pytest.mark.parametrize(
    ("row", "rule_out"), RULE_OUTS, ids=[f"{row.name} {rule_out.figures[0][0]}" for row, rule_out in RULE_OUTS]
)
def test_only_the_safe_side_of_every_threshold_rules_out(row: Suspect, rule_out: RuleOut) -> None:
    def verdict(figures: dict[str, float]) -> str:
        return {hypothesis.name: hypothesis.verdict for hypothesis in judge_suspects((), figures, LIMITS)}[row.name]

    edges = {name: LIMITS[limit] if isinstance(limit, str) else limit for name, _, limit in rule_out.figures}
    assert verdict(edges) == "ruled out"
    for name, side, _ in rule_out.figures:
        beyond = edges[name] - 1e-3 if side == "at least" else edges[name] + 1e-3
        assert verdict({**edges, name: beyond}) != "ruled out", name
        without = {other: value for other, value in edges.items() if other != name}
        assert verdict(without) == "not testable here", name
        assert verdict({**edges, name: math.nan}) == "not testable here", name


def test_what_does_not_clear_a_row_is_said() -> None:
    table = weighed(reward__within_group_std=0.0104, collection__entropy_share=0.98)
    for name in ("H01", "H05", "E04", "E01"):
        assert table[name].verdict == "not testable here", name
    assert table["H05"].figure == "reward/within_group_std is 0.0104: at least 0.1 would rule it out"
    assert table["E01"].figure == "collection/entropy_share is 0.98: at most 0.8 would rule it out"


def test_a_gradient_norm_or_a_gain_in_accuracy_clears_nothing() -> None:
    table = weighed(grad__norm=0.18, eval__gain=-0.25, collection__reward_mean=0.1, logp__sampler_gap_max=2.0)
    assert {table[name].verdict for name in ("E05", "H08", "E03", "H06")} == {"not testable here"}


def test_a_row_none_of_whose_codes_was_checked_is_not_ruled_out() -> None:
    why = "output/random-weights: the log does not show the size of the vocabulary"
    row = weighed(unchecked=(why,), entropy__share=0.2)["E01"]
    assert (row.verdict, row.figure) == ("not testable here", why)
    assert weighed(entropy__share=0.2)["E01"].verdict == "ruled out"
    both = {"kl_term__cosine": 1.0, "reference__kl_at_start": 0.0}
    assert weighed(**both)["H03"].verdict == "ruled out"
    assert weighed(unchecked=("kl/no-gradient, kl/reversed: unknown estimator",), **both)["H03"].verdict != "ruled out"
    assert weighed(unchecked=("reward/weak: 8 steps are too few",), reward__within_group_std=0.3)["H05"].verdict == (
        "ruled out"
    )


def masks(trained: float, total: float, left_out: float) -> Outcome:
    figures = {"trained_tokens": trained, "completion_tokens": total, "left_out_of_turns": left_out}
    return Outcome("masks", figures=figures)


def test_sampled_tokens_that_are_not_trained_keep_masking_a_suspect() -> None:
    def verdicts(outcome: Outcome, multi_turn: bool) -> tuple[str, str]:
        figures = preflight_figures([outcome], multi_turn=multi_turn)
        table = {hypothesis.name: hypothesis.verdict for hypothesis in judge_suspects((), figures, LIMITS)}
        return table["H02"], table["H07"]

    assert verdicts(masks(40, 40, 0), multi_turn=False) == ("ruled out", "not testable here")
    assert verdicts(masks(30, 40, 10), multi_turn=False) == ("not testable here", "not testable here")
    assert verdicts(masks(30, 40, 0), multi_turn=True) == ("ruled out", "ruled out")
    assert verdicts(masks(25, 40, 5), multi_turn=True) == ("not testable here", "ruled out")
    assert verdicts(masks(0, 0, 0), multi_turn=False) == ("not testable here", "not testable here")


def test_a_healthy_run_rules_out_what_its_log_can() -> None:
    table = {hypothesis.name: hypothesis for hypothesis in check_history(healthy()).hypotheses}
    untestable = {name for name, hypothesis in table.items() if hypothesis.verdict == "not testable here"}
    assert untestable == {"H02", "H07", "H08"}
    assert "confirmed" not in {hypothesis.verdict for hypothesis in table.values()}


def test_weight_sync_is_ruled_out_only_where_the_policy_has_moved_and_the_sampler_with_it() -> None:
    def verdict(gap: float, moved: float) -> str:
        history = altered("kl/policy_ref/k3/mean", lambda step, was: moved * (step > 1))
        history = altered("kl/sampler_policy/k3/mean", lambda step, was: gap * (step > 1), history)
        return {hypothesis.name: hypothesis.verdict for hypothesis in check_history(history).hypotheses}["H06"]

    assert verdict(gap=1e-7, moved=0.04) == "ruled out"
    assert verdict(gap=4e-4, moved=1e-3) == "not testable here"
    assert verdict(gap=1e-3, moved=1e-3) == "confirmed"
    assert verdict(gap=0.04, moved=0.04) == "confirmed"
    assert verdict(gap=0.0, moved=0.0) == "not testable here"


def test_over_a_fifth_near_the_limit_confirms_truncation() -> None:
    assert weighed(length__truncated_fraction=0.2)["H04"].verdict == "ruled out"
    beyond = weighed(truncation__completions_cut=0.21)["H04"]
    assert beyond.verdict == "confirmed"
    assert "0.21" in beyond.figure


def test_several_turns_are_judged_only_where_there_are_some() -> None:
    assert weighed("mask/not-actions")["H07"].verdict == "not testable here"
    assert weighed(masks__tool_tokens=12.0)["H07"].verdict == "ruled out"
    assert weighed("mask/not-actions", masks__tool_tokens=12.0)["H07"].verdict == "confirmed"


def test_a_figure_that_is_not_finite_decides_nothing() -> None:
    assert weighed(advantage__amplification_max=math.nan)["H01"].verdict == "not testable here"


def test_the_figures_of_a_history() -> None:
    series = {
        "kl/policy_ref/k3/mean": Series.of([(1, 0.1), (2, 3.0), (3, 0.2)]),
        "entropy/mean": Series.of([(1, math.log(100.0)), (2, 1.0)]),
        "reward/within_group_std": Series.of([(1, 0.2), (2, 0.4)]),
        "parse/ok_fraction": Series.of([(1, 0.0), (2, 0.0), (3, 0.03), (4, 0.9)]),
    }
    final = {"kind": "kl/final", "step": 4, "metrics": {"kl/policy_ref/k3/mean": 5.0}}
    drawn = ({"reward": -0.5}, {"reward": 0.5}, {"reward": -9.0, "tracked": True})
    history = History("keel", Path("run"), series, rollouts=drawn, vocabulary=10_000)
    figures = history_figures(history)
    assert figures["kl/policy_ref/k3/max"] == 3.0
    assert history_figures(replace(history, events=(final,)))["kl/policy_ref/k3/max"] == 5.0
    assert figures["kl/at_start"] == 0.1
    assert figures["update/largest_move"] == pytest.approx(0.1)  # a step that is gone with the next does not count
    assert figures["reward/lowest"] == -0.5
    assert figures["entropy/share"] == pytest.approx(0.5)
    assert figures["reward/within_group_std"] == pytest.approx(0.3)
    assert figures["parse/first_steps"] == pytest.approx(0.01)


def test_output_that_could_not_be_read_at_first_confirms_its_link_of_the_chain() -> None:
    assert weighed(parse__first_steps=0.01)["E02"].verdict == "confirmed"
    assert weighed(parse__first_steps=0.9)["E02"].verdict == "ruled out"
