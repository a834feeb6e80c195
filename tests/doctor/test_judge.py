"""Guards, doctor and report use the same thresholds, including those in `doctor.thresholds`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from keel.doctor.examine import examine
from keel.doctor.judge import accuracies
from keel.doctor.runs import read_run
from keel.doctor.thresholds import thresholds_of
from keel.lab.report.verdict import sentences
from keel.run.build import build_policy, build_run
from keel.trainer.guards import spike_limit, tool_error_event
from trainer.small import small_config


def recorded(folder: Path, overrides: list[str], metric: str, values: list[float], **files: Any) -> Path:
    """A finished run with these values of a metric."""
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(small_config(*overrides).to_dict()))
    more = {"tool/calls_mean": 1.0} if metric.startswith("tool/") else {}
    lines = [{"step": step, metric: value, **more} for step, value in enumerate(values, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, content in files.items():
        path = folder / f"{name}.{'json' if name == 'summary' else 'jsonl'}"
        path.write_text(json.dumps(content) if name == "summary" else "".join(json.dumps(c) + "\n" for c in content))
    return folder


def finding_codes(run: Path) -> set[str]:
    return {finding.code for finding in examine(run).findings}


def tones(run: Path, about: str) -> dict[str, str]:
    return {tone: sentence for tone, sentence in sentences(read_run(run)) if sentence.startswith(about)}


@pytest.mark.parametrize(
    ("overrides", "limit"),
    [([], 0.2), (["doctor.thresholds.kl_over_budget=0.4"], 0.4), (["kl.budget.max=0.5"], 0.5)],
)
def test_doctor_and_report_share_the_kl_limit(tmp_path: Path, overrides: list[str], limit: float) -> None:
    for kl, over in ((limit - 0.05, False), (limit + 0.05, True)):
        values = [kl * min(1.0, step / 40) * (1 + 0.02 * (-1) ** step) for step in range(61)]
        summary = {"steps": 61, "kl": {"k3": {"mean": kl, "se": 0.001}}}
        run = recorded(tmp_path / "run", overrides, "kl/policy_ref/k3/mean", values, summary=summary)
        warned = [f for f in examine(run).findings if f.code == "kl/over-budget" and f.severity != "note"]
        assert bool(warned) == over
        by_tone = tones(run, "KL(policy‖reference)")
        assert ("warn" in by_tone) == over
        assert not over or f"The limit is {limit:g} nats per token" in by_tone["warn"]


@pytest.mark.parametrize("override", ["guards.grad_spike=30", "doctor.thresholds.grad_spike=30"])
def test_guard_and_doctor_share_the_gradient_spike(tmp_path: Path, override: str) -> None:
    for overrides, factor in (([], 10.0), ([override], 30.0)):
        config = small_config(*overrides)
        run = build_run(config, build_policy(config)).run
        assert spike_limit((1.0,) * 10, run.limits) == factor
        for norm in (factor - 1, factor + 1):
            folder = recorded(tmp_path / "run", overrides, "grad/norm", [1.0] * 20 + [norm] + [1.0] * 4)
            assert ("optim/spike" in finding_codes(folder)) == (norm > factor)


def test_guard_and_doctor_share_the_share_of_failing_tool_calls(tmp_path: Path) -> None:
    for overrides, limit in (([], 0.5), (["doctor.thresholds.tool_errors=0.8"], 0.8)):
        config = small_config(*overrides)
        limits = build_run(config, build_policy(config)).run.limits
        for share in (limit - 0.05, limit + 0.05):
            assert (tool_error_event({"tool/error_fraction": share}, [], limits) is not None) == (share > limit)
            folder = recorded(tmp_path / "run", overrides, "tool/error_fraction", [share] * 12)
            assert ("tool/failing" in finding_codes(folder)) == (share > limit)


@pytest.mark.parametrize(("overrides", "dropped"), [([], True), (["doctor.thresholds.retention_drop=0.5"], False)])
def test_doctor_and_report_share_what_is_a_dropped_skill(tmp_path: Path, overrides: list[str], dropped: bool) -> None:
    lines = [
        {"step": step, "task": "copy", "split": "retention", "pass@1": value, "ci95": [value - 0.02, value + 0.02]}
        for step, value in ((0, 0.8), (12, 0.6))
    ]
    run = recorded(tmp_path / "run", overrides, "reward/mean", [0.5] * 12, eval=lines)
    assert ("retention/dropping" in finding_codes(run)) == dropped
    (row,) = accuracies(lines, retention=True).values()
    assert (row.change(thresholds_of(small_config(*overrides).to_dict())) == "dropped") == dropped
    (sentence,) = tones(run, "Retention").values()
    assert ("1 of 1 other skills dropped" in sentence) == dropped
    assert ("lost at most 50 %" in sentence) != dropped


@pytest.mark.parametrize(
    ("config", "wrong"),
    [
        ({"doctor": {"thresholds": {"gone_since": 1}}}, "gone_since"),
        ({"doctor": {"thresholds": {"kl_over_budget": "much"}}}, "kl_over_budget must be a finite number"),
        ({"guards": {"grad_spike": None}}, "grad_spike must be a finite number"),
    ],
)
def test_a_damaged_threshold_is_noted_and_the_shipped_ones_judge(tmp_path: Path, config: Any, wrong: str) -> None:
    run = recorded(tmp_path / "run", [], "kl/policy_ref/k3/mean", [0.3] * 3)
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    record = read_run(run)
    assert record.thresholds == thresholds_of({})
    (note,) = [note for note in record.missing if note.startswith("config.yaml")]
    assert wrong in note
    assert note.endswith("; using the default thresholds")
    assert "limit is 0.2 nats per token" in tones(run, "KL(policy‖reference)")["warn"]


def test_a_runs_own_spike_is_no_loosened_alarm() -> None:
    assert thresholds_of({"guards": {"grad_spike": 30.0}}).raised == ()
    (note,) = thresholds_of({"guards": {"grad_spike": 30.0}}, ["grad_spike=40"]).raised
    assert "from 30 to 40" in note
