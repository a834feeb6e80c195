"""Sentences and tables on made-up figures: significant ones, and ones that are not."""

import csv
import io
from dataclasses import replace

import pytest

from keel.eval.statistics import estimate, holm
from keel.lab.studies.grid import Axis, Value
from keel.lab.studies.report import verdict
from keel.lab.studies.results import FIGURES, RunResult, SkillResult
from keel.lab.studies.table import points_csv, summarise, table_csv


def row(point, seed, accuracy, forgotten=0.0, kl=0.1, reward=0.5, state="done", axis="kl.beta", **options):
    figures = dict.fromkeys(FIGURES)
    figures.update(
        accuracy_before=0.3,
        accuracy_after=accuracy,
        reward=reward,
        kl_policy_ref=kl,
        kl_ref_policy=1.2 * kl,
        retention_before=0.8,
        retention_after=0.8 - forgotten,
        forgetting=forgotten,
    )
    values = options or {axis: point.rpartition("=")[2]}
    skill = SkillResult(0.8, 0.8 - forgotten, kl / 2, kl / 3)
    return RunResult(point, seed, state, "", values, figures, {"copy": skill}, wall_s=12.5)


def beta_study(**accuracies):
    """Five β: little KL and little learning at the top, forgetting at the bottom."""
    rows = []
    table = {
        "0": ((0.90, 0.91, 0.92), (0.30, 0.31, 0.33), 0.9),
        "0.01": ((0.905, 0.90, 0.93), (0.20, 0.22, 0.21), 0.5),
        "0.1": ((0.61, 0.60, 0.62), (0.01, -0.02, 0.015), 0.1),
        "1": ((0.35, 0.36, 0.35), (0.0, 0.01, -0.01), 0.01),
    }
    for beta, (right, forgotten, kl) in table.items():
        for seed in range(3):
            rows.append(row(f"beta={beta}", seed, right[seed], forgotten[seed], kl * (1 + 0.1 * seed), right[seed]))
    return rows


def texts_of(rows, baseline, metric="accuracy_after", axes=()):
    return [text for _, text in verdict(summarise(rows, baseline), baseline, metric, axes)]


def test_no_winner_where_two_overlap():
    texts = texts_of(beta_study(), "beta=0")
    assert texts[0].startswith("No winner in accuracy: beta=0.01 has the highest mean, 91.2 %")
    assert "not significantly different from beta=0 (" in texts[0]
    assert "beta=0.1" not in texts[0].partition("from")[2]


def test_a_winner_is_named_with_its_evidence():
    rows = [r for r in beta_study() if r.point != "beta=0.01"]
    assert texts_of(rows, "beta=0")[0].startswith("beta=0 has the best accuracy, 91.0 % ± 2.5, significantly")


def test_differences_from_the_baseline():
    start = "Against beta=0 in accuracy (paired over seeds, Holm): beta=0.1 -30.0 ± "
    (texts,) = [text for text in texts_of(beta_study(), "beta=0") if text.startswith(start)]
    assert "beta=1" in texts
    assert "beta=0.01 " not in texts


def test_forgetting_goes_with_kl():
    texts = [text for text in texts_of(beta_study(), "beta=0") if "Spearman" in text]
    assert len(texts) == 2
    assert all(text.startswith("Forgetting grows with KL(") for text in texts)


def test_nothing_is_claimed_of_noise():
    """Every point has the same three values in another order."""
    noise = {"a=1": (0.5, 0.6, 0.4), "a=2": (0.6, 0.4, 0.5), "a=3": (0.4, 0.5, 0.6)}
    rows = [
        row(point, seed, value, forgotten=value - 0.5, kl=0.1 + 0.01 * ((seed * 7 + len(point)) % 3), axis="a")
        for point, right in noise.items()
        for seed, value in enumerate(right)
    ]
    texts = texts_of(rows, "a=1")
    assert texts[0].startswith("No winner in accuracy")
    assert all("none significant" in text for text in texts if "the start" in text)
    assert "Against a=1, none of 2 points differs significantly in accuracy (paired over seeds, Holm)." in texts
    assert all("is not significantly correlated with" in text for text in texts if "Spearman" in text)


def test_a_perfect_rank_correlation_is_a_tie():
    rows = [row("a=1", seed, 0.5, forgotten=0.1 * seed**2, kl=0.1 * (seed + 1), axis="a") for seed in range(5)]
    texts = next(text for text in texts_of(rows, "a=1") if "Spearman" in text)
    assert texts.startswith("Forgetting grows with KL(policy‖start) over 5 runs: Spearman 1.00 (exact p 0.017)")
    texts = next(text for text in texts_of(rows[:3], "a=1") if "Spearman" in text)
    assert texts.startswith(
        "Forgetting is not significantly correlated with KL(policy‖start) over 3 runs: Spearman 1.00 (exact p"
    )


def test_too_few_seeds_and_failures_are_said_first():
    rows = [row("a=1", 0, 0.1, axis="a"), row("a=2", 0, 0.9, axis="a", state="stopped")]
    rows.append(row("a=3", 0, 0.99, axis="a", state="failed"))
    texts = texts_of(rows, "a=1")
    assert texts[0] == "1 of 3 runs failed: a=3."
    assert texts[1] == "1 of 3 runs stopped by a guard: a=2."
    assert texts[2].startswith("1 seed a point: too few to test differences")
    assert texts[3] == "Without a value for accuracy: a=3."
    assert texts[4] == "The highest mean in accuracy is that of a=2, 90.0 %."


def test_after_too_few_seeds_nothing_is_tested():
    """Differences that a t-test over two seeds would call significant, and two that have no spread."""
    for second in ((0.5, 0.5002), (0.5, 0.5)):
        rows = [row("a=1", seed, 0.1, forgotten=0.3 + 0.0001 * seed, axis="a") for seed in range(2)]
        rows += [row("a=2", seed, second[seed], forgotten=0.3, axis="a") for seed in range(2)]
        texts = texts_of(rows, "a=1")
        assert texts[0].startswith("2 seeds a point: too few to test")
        assert not any("significant" in text or "(p " in text or "Holm" in text for text in texts)


def test_a_difference_without_spread_is_told_without_a_test():
    rows = [row(point, seed, right, axis="a") for point, right in (("a=1", 0.5), ("a=2", 0.51)) for seed in range(3)]
    texts = texts_of(rows, "a=1")
    assert texts[0].startswith(
        "No winner in accuracy: a=2 has the highest mean, 51.0 %, not significantly different from a=1 ("
    )
    assert any(text.endswith("): a=2 +1.0 points at every seed (no variance, so no test).") for text in texts)


def test_failed_runs_are_no_seeds():
    rows = [row("a=1", seed, 0.1 + 0.01 * seed, axis="a") for seed in range(3)]
    rows += [row("a=2", seed, 0.9, axis="a", state="done" if seed < 2 else "failed") for seed in range(3)]
    assert "Not tested, because fewer than 3 seeds have a result: a=2 (2)." in texts_of(rows, "a=1")
    rows[0] = row("a=1", 0, 0.1, axis="a", state="failed")
    assert any(text.startswith("2 seeds a point: ") for text in texts_of(rows, "a=1"))


def test_equal_means_are_no_lead():
    same = {"a=1": (0.4, 0.5, 0.6), "a=2": (0.6, 0.5, 0.4), "a=3": (0.5, 0.4, 0.6)}
    rows = [row(point, seed, value, axis="a") for point, right in same.items() for seed, value in enumerate(right)]
    assert texts_of(rows, "a=1")[0] == "No winner in accuracy: all 3 points have the same mean, 50.0 %."
    rows += [row("a=4", seed, 0.1 + 0.05 * seed, axis="a") for seed in range(3)]
    assert texts_of(rows, "a=1")[0].startswith("No winner in accuracy: a=1, a=2, a=3 share the highest mean, 50.0 %")


def test_a_cell_without_results_is_named():
    """k3 fails at β = 1: the axis is compared over β = 0.1 alone, and that is said."""
    axes = [Axis("penalty", (Value("k1", {}), Value("k3", {}))), Axis("kl.beta", (Value("0.1", {}), Value("1", {})))]
    rows = [
        row(f"{penalty} {beta}", seed, 0.5 + 0.2 * (penalty == "k3") + 0.01 * seed * (beta + (penalty == "k3")),
            state="failed" if (penalty, beta) == ("k3", 1) else "done", **{"penalty": penalty, "kl.beta": str(beta)})
        for penalty in ("k1", "k3")
        for beta in (0.1, 1)
        for seed in range(3)
    ]  # fmt: skip
    texts = next(text for text in texts_of(rows, "k1 0.1", axes=axes) if text.startswith("penalty,"))
    assert "k3 +21.0 ± " in texts
    assert texts.endswith("Omitted, because a result is missing: k3 1.")


def test_an_axis_among_several():
    axes = [
        Axis("penalty", (Value("k1", {}), Value("k3", {}))),
        Axis("kl.beta", (Value("beta=0.1", {}), Value("beta=1", {}))),
    ]
    rows = [
        row(f"{penalty} beta={beta}", seed, 0.5 + 0.2 * (penalty == "k3") + 0.01 * seed + 0.001 * (seed == 1) * beta,
            **{"penalty": penalty, "kl.beta": str(beta)})
        for penalty in ("k1", "k3")
        for beta in (0.1, 1)
        for seed in range(3)
    ]  # fmt: skip
    texts = texts_of(rows, "k1 beta=0.1", axes=axes)
    assert any(
        text.startswith("penalty, averaged over the other axes and paired with k1: k3 +20.0 points") for text in texts
    )
    assert any(text.startswith("kl.beta, averaged over the other axes and paired with 0.1: no sig") for text in texts)


def test_a_failed_runs_figures_do_not_count():
    rows = [row("a=1", 0, 0.5, axis="a"), row("a=1", 1, 0.9, axis="a", state="failed")]
    assert summarise(rows, "a=1")[0].means["accuracy_after"] == estimate([0.5])


def test_tables_hold_what_was_measured():
    rows = beta_study()
    lines = list(csv.DictReader(io.StringIO(points_csv(rows))))
    assert len(lines) == 12
    assert lines[3]["kl.beta"] == "0.01"
    assert float(lines[3]["copy:after"]) == 0.6
    assert lines[3]["wall_s"] == "12.5"
    table = {line["point"]: line for line in csv.DictReader(io.StringIO(table_csv(summarise(rows, "beta=0"))))}
    expected = estimate([0.60, 0.61, 0.62])
    assert float(table["beta=0.1"]["accuracy_after_low"]) == float(f"{expected.low:.10g}")
    assert abs(float(table["beta=0.1"]["accuracy_after_vs_baseline_mean"]) + 0.3) < 1e-9
    assert table["beta=0"]["accuracy_after_vs_baseline_mean"] == ""
    assert not any("wall" in name for name in table["beta=0"])
    change = estimate([-0.30, -0.31, -0.33])
    assert float(lines[2]["copy:change"]) == pytest.approx(-0.33)
    for part in ("mean", "low", "high", "p"):
        assert float(table["beta=0"][f"copy:change_{part}"]) == pytest.approx(getattr(change, part))
    assert float(table["beta=0"]["accuracy_before_mean"]) == 0.3


# ---------------------------------------------------------------------------------------------- against the start


def harmed(*points, skills=("copy", "max"), seeds=3):
    """Points as (label, change in accuracy, change in each skill): seed s moves every change by s/1000."""
    rows = []
    for label, accuracy, *changes in points:
        for seed in range(seeds):
            noise = 0.001 * (seed - (seeds - 1) / 2)
            results = {
                name: SkillResult(0.8, 0.8 + change + noise, 0.1, 0.1)
                for name, change in zip(skills, changes, strict=True)
            }
            before, after = 0.8, 0.8 + sum(changes) / len(changes) + noise
            new = {"retention_before": before, "retention_after": after, "forgetting": before - after}
            base = row(label, seed, 0.3 + accuracy + noise, axis="a")
            rows.append(replace(base, figures={**base.figures, **new}, skills=results))
    return rows


def against_start(rows):
    """(tone, text) by what changed."""
    sentences = verdict(summarise(rows, "a=1"), "a=1", "accuracy_after")
    start = "Against the start in "
    return {t.removeprefix(start).split(" (paired")[0].split(",")[0]: (tone, t) for tone, t in sentences if start in t}


def test_changes_since_the_start_are_tested_over_seeds():
    """Accuracy by itself; both skills in one family, so four changes."""
    said = against_start(harmed(("a=1", 0.2, -0.1, 0.0), ("a=2", -0.1, -0.3, 0.0)))
    p = holm({label: estimate([c - 0.001, c, c + 0.001]).p for label, c in (("1", 0.2), ("2", -0.1))})
    tone, text = said["accuracy"]
    assert tone == "warn"
    assert f"better: a=1 +20.0 ± 0.2 points (p {p['1']:.2g}); worse: a=2 -10.0 ± 0.2 points (p {p['2']:.2g})." in text
    tone, text = said["copy"]
    assert tone == "bad"  # worse at every point
    assert "worse: a=1 -10.0 ± 0.2 points (p " in text
    assert said["max"][0] == "plain"
    assert "+0.0 ± 0.2 points at a=1" in said["max"][1]


def test_skills_share_one_correction():
    """Four changes with p about 0.02: each of two points alone would pass, of four none does."""
    noisy = estimate([-0.1, -0.16, -0.13])
    assert 2 * noisy.p < 0.05 < 4 * noisy.p
    rows = harmed(("a=1", 0.1, -0.13, -0.13), ("a=2", 0.1, -0.13, -0.13))
    wide = (0.03, -0.03, 0.0)
    rows = [
        replace(r, skills={n: replace(s, after=s.before - 0.13 + wide[r.seed]) for n, s in r.skills.items()})
        for r in rows
    ]
    said = against_start(rows)
    for skill in ("copy", "max"):
        assert said[skill][0] == "warn"  # red is for significant losses only
        assert "none significant: -13.0 ± " in said[skill][1]


@pytest.mark.parametrize("seeds", [1, 2])
def test_with_few_seeds_nothing_is_tested_against_the_start(seeds):
    said = against_start(harmed(("a=1", -0.05, -0.1, 0.2), ("a=2", -0.1, -0.3, 0.1), seeds=seeds))
    assert [tone for tone, _ in said.values()] == ["warn", "warn", "plain"]
    for _, text in said.values():
        assert "too few seeds to test: " in text
        assert "Holm" not in text
    assert " -10.0" in said["accuracy"][1]
    assert "-30.0" in said["copy"][1]
