"""The pieces of a report by hand values: axes, thinning, verdicts, samples, reading a large file."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from keel.doctor import runs as reading
from keel.doctor.judge import Accuracy, describe_state, guard_stop, state
from keel.doctor.runs import RunRecord, read_run
from keel.doctor.thresholds import load_thresholds
from keel.envs.toolbox import KINDS
from keel.kl import KLState
from keel.lab.plots.charts import (
    BOTTOM,
    HEIGHT,
    TOP,
    Curve,
    Panel,
    Scale,
    log_ticks,
    svg,
    thin,
    tick_text,
    ticks,
    wants_log,
)
from keel.lab.report import html
from keel.lab.report.html import charts
from keel.lab.report.panels import PANELS, panels
from keel.lab.report.rollouts import colour_scale, facts, readable
from keel.lab.report.samples import all_completions, completion, pick, section, span
from keel.lab.report.sections import flatten, retention_table, seconds, since
from keel.lab.report.verdict import accuracy, kl_figures, labels, sentences
from keel.loggers import RunDirectory
from keel.loggers.rundir import JsonlLogger
from keel.run.result import EndHooks
from keel.run.train import collect_findings
from keel.trainer.state import State
from keel.trainer.summary import summarise

RUN = RunRecord(path=Path("r"), name="r")
THRESHOLDS = load_thresholds()


def test_ticks_are_round_and_inside():
    assert ticks(0, 100) == [0, 50, 100]
    assert ticks(1, 100) == [20, 40, 60, 80, 100]
    assert ticks(0.13, 0.17) == [0.13, 0.14, 0.15, 0.16, 0.17]
    assert ticks(-0.03, 0.02) == [-0.02, 0, 0.02]
    assert ticks(3, 3) == [3]
    assert log_ticks(0.5, 2000) == [1, 10, 100, 1000]
    assert [tick_text(value) for value in (0, 0.05, 25000, 2e-6, 3e7)] == ["0", "0.05", "25k", "2e-6", "3e7"]
    assert [tick_text(value) for value in (4.4575, 1.5e-8, -2e6)] == ["4.4575", "1.5e-8", "-2e6"]


def test_axis_maps_ends_to_ends():
    axis = Scale(0, 10, 100, 0)
    assert (axis.at(0), axis.at(10), axis.at(2.5)) == (100, 0, 75)
    log = Scale(1, 100, 0, 50, log=True)
    assert (log.at(1), log.at(10), log.at(100)) == (0, 25, 50)
    assert Scale(3, 3, 0, 50).at(3) == 25


def test_beyond_a_given_range_a_chart_goes_on_at_its_edge():
    assert Scale(0, 10, 100, 0).at(12) == 0
    series = Curve("a", [(0.0, 0.5), (1.0, 0.6)], error=[(-5.0, 6.0), (0.5, 0.7)], dots=True)
    heights = [float(y) for y in re.findall(r' y[12]="([\d.-]+)"', svg(Panel("t", "", [series], y_range=(0.0, 1.0))))]
    assert min(heights) == TOP
    assert max(heights) == HEIGHT - BOTTOM


def test_thinning_keeps_spikes_gaps_and_ends():
    points: list[tuple[float, float | None]] = [(float(x), 0.0) for x in range(10_000)]
    points[5_003] = (5003.0, 99.0)
    series = thin(Curve("a", points, error=[(0.0, 1.0)] * 10_000))
    assert len(series.points) <= 500
    assert (5003.0, 99.0) in series.points
    assert (series.points[0], series.points[-1]) == (points[0], points[-1])
    assert len(series.error) == len(series.points)


def test_log_scale_only_where_a_linear_one_hides_the_rest():
    assert wants_log([0.1] * 20 + [100.0])
    assert not wants_log([0.1, 0.2, 0.3, 0.4, 0.5, 0.9])
    assert not wants_log([0.0] * 20 + [100.0])
    picture = svg(Panel("t", "", [Curve("a", [(float(i), 0.1) for i in range(9)] + [(9.0, 100.0)])]))
    assert "data-log" in picture


def test_a_chart_without_a_number_is_not_drawn_and_one_point_is_a_dot():
    assert svg(Panel("t", "", [Curve("a", [(1.0, None)])])) == ""
    assert svg(Panel("t", "", [Curve("a", [(1.0, 5.0)])])).count("<circle") == 1


def both(before: float, after: float, low: tuple[float, float], high: tuple[float, float]) -> Accuracy:
    return Accuracy("s", before, after, low, high)


def test_change_is_judged_by_the_intervals():
    assert both(0.5, 0.4, (0.45, 0.55), (0.35, 0.45)).change(THRESHOLDS) == "held"  # they touch
    assert both(0.5, 0.3, (0.45, 0.55), (0.25, 0.35)).change(THRESHOLDS) == "dropped"
    assert both(0.3, 0.5, (0.25, 0.35), (0.45, 0.55)).change(THRESHOLDS) == "improved"
    assert Accuracy("s", 0.5, 0.46, None, None).change(THRESHOLDS) == "held"
    assert Accuracy("s", 0.5, 0.44, None, None).change(THRESHOLDS) == "dropped"
    assert Accuracy("s", 0.5, None, None, None).change(THRESHOLDS) == "not measured"


def test_accuracy_falls_back_on_the_evaluations():
    lines = [
        {"step": step, "task": task, "pass@1": value, "ci95": [value - 0.1, value + 0.1], "split": split}
        for step, task, value, split in (
            (0, "add", 0.3, "trained"),
            (0, "copy", 0.9, "retention"),
            (9, "add", 0.7, "trained"),
        )
    ]
    run = replace(RUN, evaluations=tuple(lines))
    trained = accuracy(run)
    assert trained is not None
    assert (trained.before, trained.after, trained.overlap) == (0.3, 0.7, False)
    run = replace(RUN, evaluations=tuple(lines[:2]))
    assert ("plain", "add: 30.0 % before training (95 % interval 20–40 %); not measured since.") in sentences(run)


@pytest.mark.parametrize(
    ("run", "kind"),
    [
        (RUN, "interrupted"),
        (replace(RUN, running=True), "running"),
        (replace(RUN, summary={}), "completed"),
        (replace(RUN, summary={}, config={"run": {"max_steps": 5}}, metrics=({"step": 3},)), "stopped"),
        (replace(RUN, events=({"kind": "abort"},)), "aborted"),
        (replace(RUN, summary={"status": "aborted"}), "aborted"),
    ],
)
def test_state(run, kind):
    assert state(run)[0] == kind


def found(*severities: str) -> tuple[dict[str, str], ...]:
    return tuple({"code": f"a/{severity}", "severity": severity, "evidence": "x is 3"} for severity in severities)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (
            replace(RUN, summary={}, findings=found("note", "warning", "error")),
            [("bad", "error"), ("plain", "completed")],
        ),
        (replace(RUN, summary={}, findings=found("note", "warning")), [("warn", "warning"), ("plain", "completed")]),
        (replace(RUN, summary={}, findings=found("note")), [("good", "completed")]),
        (replace(RUN, summary={}, findings=()), [("good", "completed")]),
        (replace(RUN, summary={}), [("plain", "completed")]),  # nobody has judged it
        (replace(RUN, running=True, findings=found("error")), [("bad", "error"), ("plain", "running")]),
        (replace(RUN, running=True, findings=()), [("plain", "running")]),
        (
            replace(RUN, events=({"kind": "abort"},), findings=found("warning")),
            [("warn", "warning"), ("bad", "aborted")],
        ),
    ],
)
def test_the_verdict_is_that_of_the_worst_finding(run, expected):
    shown = labels(run)
    assert [(tone, word.split()[0]) for tone, word in shown] == expected
    worst = expected[0][1]
    if worst in ("error", "warning"):
        assert shown[0][1] == f"{worst} a/{worst}"
        tone, first = sentences(run)[0]
        assert tone == expected[0][0]
        assert f"a/{worst}" in first
        assert "x is 3" in first
        assert describe_state(run).startswith(f"{worst} a/{worst}")
        assert not any(tone == "good" and "completed" in text for tone, text in sentences(run))


def test_a_chart_without_variation_is_a_line_with_its_value():
    """Beside one that is drawn; a metric that was never finite is neither."""
    lines = tuple(
        {"step": step, "kl/beta": 0.25, "ratio/clip_low_fraction": 0.0, "ratio/clip_high_fraction": 0.5,
         "mismatch/ess": 1.0 - 1e-9 * step, "reward/mean": step / 10, "grad/norm": math.nan}
        for step in range(1, 6)
    )  # fmt: skip
    html, data = charts([replace(RUN, metrics=lines)])
    assert [chart["title"] for chart in json.loads(data)["charts"]] == ["Reward"]
    assert html.count("<svg") == html.count("<figure") == 1
    assert re.findall("<li>(.*?)</li>", html) == [
        "KL penalty weight: 0.25 (β)",
        "Clipped ratios: low 0; high 0.5 (fraction of tokens)",
        "Effective sample size: 1 (share)",
    ]
    pair = [tuple({"step": step, "kl/beta": beta} for step in (1, 2)) for _, beta in PAIR]
    several, _ = charts([replace(RUN, name=name, metrics=lines) for (name, _), lines in zip(PAIR, pair, strict=True)])
    assert "<svg" not in several
    assert "KL penalty weight: one 0.1; two 0.2 (β)" in several
    assert "No steps" in charts([RUN])[0]


PAIR = (("one", 0.1), ("two", 0.2))


@pytest.mark.parametrize(
    "lines",
    [
        [{"kl/beta": 0.1}],
        [{"grad/norm": 1.0}, {"grad/norm": math.nan}],
        [{"loss/policy": 0.0}, {"loss/policy": math.inf}],
        [{"kl/policy_ref/k3/mean": 0.1, "kl/policy_ref/k3/se": 0.01}] * 2,
    ],
)
def test_what_is_one_point_or_diverges_or_has_intervals_is_drawn(lines):
    html, _ = charts([replace(RUN, metrics=tuple({"step": step, **line} for step, line in enumerate(lines)))])
    assert html.count("<svg") == 1
    assert "k1 may be negative" not in html
    assert "Constant values" not in html


def test_a_run_that_nobody_judged_is_not_a_good_one(tmp_path):
    run, events = RunDirectory.create(tmp_path / "run"), []

    def fail(folder):
        raise ValueError

    loggers = SimpleNamespace(event=lambda kind, **fields: events.append(kind))
    found = collect_findings(run, loggers, EndHooks(findings=fail))
    assert (found, events) == (None, ["doctor/failed"])
    run.write_json("findings.json", found)
    run.write_json("summary.json", summarise("sort", State(kl=KLState(0.1, 0.1)), found))
    run.close()
    record = read_run(run.path)
    assert labels(record)[-1] == ("plain", "completed")
    assert ("plain", "Findings: not examined yet.") in sentences(record)


def test_kl_over_budget_is_said():
    run = replace(RUN, summary={"kl": {"k3": {"mean": 0.25, "se": 0.01}}})
    assert kl_figures(run) == {"k3": (0.25, 0.01)}
    tone, text = next((tone, text) for tone, text in sentences(run) if text.startswith("KL"))
    assert tone == "warn"
    assert "0.25 ± 0.01 nats per token (k3)" in text
    assert "limit is 0.2 nats per token" in text


def test_no_change_and_no_kl_are_said_plainly():
    summary = {"task": "t", "accuracy": {"before": 0.5, "after": 0.5}, "kl": {"k3": {"mean": -0.0, "se": 0.0}}}
    texts = [text for _, text in sentences(replace(RUN, summary=summary))]
    assert "t: 50.0 % on held-out problems, unchanged." in texts
    assert "KL(policy‖reference) at the end: 0 ± 0 nats per token (k3)." in texts


def test_overlapping_intervals_are_not_called_a_gain():
    summary = {
        "task": "t",
        "accuracy": {"before": 0.5, "after": 0.55, "ci95_before": [0.4, 0.6], "ci95_after": [0.45, 0.65]},
    }
    assert any("overlap" in text for _, text in sentences(replace(RUN, summary=summary)))


def test_samples_prefer_problems_seen_twice():
    def record(step: int, problem: str) -> dict:
        return {"step": step, "problem": problem}

    pairs = pick([record(1, "a"), record(1, "b"), record(5, "b"), record(9, "c"), record(3, "b")])
    assert pairs == [([record(1, "b")], [record(5, "b")])]
    assert pick([record(1, "a"), record(9, "c")]) == [([record(1, "a")], [record(9, "c")])]
    assert pick([record(1, "a")]) == [([record(1, "a")], [])]
    assert pick([{"problem": "no step"}]) == []


def test_token_spans():
    assert (
        span("a<b", 0.5, False, 1.0)
        == "<span class='t p' style='--a:0.50' title='log-ratio +0.5000 nats'>a&lt;b</span>"
    )
    assert "class='t n'" in span("a", -3.0, False, 1.0)
    assert "--a:1.00" in span("a", -3.0, False, 1.0)
    assert span("tool", None, True, 1.0) == "<span class='t x'>tool</span>"
    assert readable("Ġthe", "in the") == " the"
    assert readable("Ġ", "a Ġ of its own") == "Ġ"
    assert colour_scale([{"kl": [0.001, None]}, {}]) == 0.05
    assert colour_scale([{"kl": [2.0] * 200}]) == 2.0


def test_small_things():
    assert flatten({"a": {"b": 1, "c": {}}, "d": [1]}) == {"a.b": 1, "a.c": {}, "d": [1]}
    assert seconds("1970-01-01T00:01:00+00:00") == 60.0
    assert seconds("never") is None
    assert since(3725.0, 0.0) == "+1:02:05"
    assert since(65.0, 0.0) == "+1:05"


def test_of_a_large_rollout_file_only_the_ends_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "ROLLOUT_BYTES", 1000)
    lines = [json.dumps({"step": step, "completion": "x" * 50}) for step in range(500)]
    (tmp_path / "rollouts.jsonl").write_text("\n".join(lines) + "\n")
    run = read_run(tmp_path)
    steps = [record["step"] for record in run.rollouts]
    assert steps[0] == 0
    assert steps[-1] == 499
    assert 10 < len(steps) < 40
    assert any("only its first and last" in note for note in run.missing)


def test_guards_rollbacks_and_abandoned_attempts_are_told(tmp_path):
    """A run that went back from step 6 to step 3: what it gave up is dashed, checkpoints are ticks, words say why."""
    with RunDirectory.create(tmp_path / "run") as directory:
        log = JsonlLogger(directory)
        for step in range(1, 7):
            log.step(step, {"reward/mean": 0.1 * step, "grad/norm": 1.0, "kl/policy_ref/k3/mean": 0.01 * step})
        log.event("checkpoint", step=3, time=1.0)
        log.event("guard/skipped", step=6, time=2.0, message="an update was skipped: the loss/policy is not finite")
        directory.set_aside(3, 0)
        message = "1 updates in a row were skipped up to step 6: back to checkpoint step-3"
        log.event("rollback", step=6, time=3.0, to=3, message=message)
        for step in range(4, 9):
            log.step(step, {"reward/mean": 0.2 * step, "grad/norm": 1.0, "kl/policy_ref/k3/mean": 0.02})
    run = read_run(tmp_path / "run")
    assert [(name, [line["step"] for line in lines]) for name, lines in run.abandoned] == [("attempt 0", [4, 5, 6])]
    drawn = {panel.title: panel for panel in panels([run])}
    for title in ("Reward", "Gradient norm", "KL(policy‖reference)"):
        last = drawn[title].series[-1]
        assert (last.label, last.dashed, [x for x, _ in last.points]) == ("abandoned attempt 0", True, [4, 5, 6])
        assert drawn[title].checkpoints == [3]
        assert drawn[title].events == [6]
    assert 'class="save"' in svg(drawn["Reward"])
    texts = [text for _, text in sentences(run)]
    assert "Guards: 1 step with a skipped update, 1 rollback." in texts
    assert f"At step 6: {message}." in texts
    page = html.page([run])
    for text in ("Dashed: steps that a rollback discarded.", "Ticks at the bottom: checkpoints.", "rollback"):
        assert text in page
    assert [panel.title for panel in panels([run, run])]  # several runs: no attempts, no ticks
    assert not any(panel.checkpoints for panel in panels([run, run]))


def test_the_samplers_gap_is_drawn_by_depth(tmp_path):
    """The mean of the last ten steps in each stretch of the context, deepest last; nothing where none was measured."""
    with RunDirectory.create(tmp_path / "run") as directory:
        log = JsonlLogger(directory)
        for step in range(1, 21):
            deep = {"kl/sampler_policy/depth_128/mean": 0.1 * (step > 10), "kl/sampler_policy/depth_128/se": 0.02}
            log.step(step, {"kl/sampler_policy/depth_64/mean": 0.01, "kl/sampler_policy/depth_64/se": 0.001, **deep})
    drawn = {panel.title: panel for panel in panels([read_run(tmp_path / "run")])}
    panel = drawn["KL(sampler‖policy) by depth"]
    (curve,) = panel.series
    assert curve.points == [(64.0, pytest.approx(0.01)), (128.0, pytest.approx(0.1))]
    assert curve.error[1] == pytest.approx((0.08, 0.12))
    assert panel.x_label == "token of the context"
    assert "by depth" in svg(panel)


def test_a_stop_is_said_where_it_ended_the_run():
    events = ({"kind": "stop", "step": 9, "message": "too far: back to checkpoint step-6, the run stops"},)
    config = {"run": {"max_steps": 20}}
    stopped = RunRecord(Path("x"), "x", metrics=({"step": 6},), events=events, config=config, summary={"steps": 6})
    assert ("bad", "Stopped by a guard: too far: back to checkpoint step-6, the run stops.") in sentences(stopped)
    gone_on = RunRecord(Path("x"), "x", metrics=({"step": 20},), events=events, config=config, summary={"steps": 20})
    assert not any("Stopped by a guard" in text for _, text in sentences(gone_on))


@pytest.mark.parametrize("config", [{}, {"run": {"max_steps": 20}}])
@pytest.mark.parametrize(("steps", "stopped"), [(6, True), (9, True), (10, False)])
def test_a_stop_is_reported_with_and_without_a_known_number_of_steps(config, steps, stopped):
    warned = {"kind": "kl/over-budget", "step": steps, "message": "KL is 2"}  # a budget with `action: warn`
    events = (warned, {"kind": "stop", "step": 9, "message": "KL is 3"})
    run = RunRecord(Path("x"), "x", metrics=({"step": steps},), events=events, config=config, summary={"steps": steps})
    assert guard_stop(run) == ("KL is 3" if stopped else None)
    assert (("bad", "Stopped by a guard: KL is 3.") in sentences(run)) == stopped
    assert (state(run)[0] == "completed") == (not stopped and not config)
    assert guard_stop(replace(run, events=(warned,))) is None


def test_parts_of_the_reward_are_drawn_and_the_tasks_own_figures_stand_before_and_after():
    metrics = tuple(
        {"step": step, "reward/mean": 0.5, "reward/part/exact_match": 0.1 * step, "reward/part/format": 1.0}
        for step in (1, 2, 3)
    )
    lines = [
        {"step": step, "task": "hop", "split": "trained", "pass@1": 0.5, "ci95": [0.4, 0.6], "extra": extra}
        for step, extra in (
            (0, {"retrieval_recall": 0.25, "tool_calls": 1.5}),
            (2, {"retrieval_recall": 0.5, "tool_calls": 1.75}),
            (3, {"retrieval_recall": 0.75, "tool_calls": 2.0, "new": 0.1}),
        )
    ]
    run = replace(RUN, metrics=metrics, evaluations=tuple(lines))
    titles = [panel.title for panel in panels([run])]
    assert titles[titles.index("Reward") + 1] == "Reward parts"
    drawn = next(panel for panel in panels([run]) if panel.title == "Reward parts")
    assert [series.label for series in drawn.series] == ["exact_match", "format"]
    assert [y for _, y in drawn.series[0].points] == pytest.approx([0.1, 0.2, 0.3])
    several = {panel.title: [series.label for series in panel.series] for panel in panels([run, run])}
    assert several["Reward part: exact_match"] == ["r", "r"]
    shown = retention_table(run)
    for name, before, after, change in (
        ("retrieval_recall", "0.25", "0.75", "+0.500"),
        ("tool_calls", "1.5", "2", "+0.500"),
        ("new", "–", "0.1", "–"),
    ):
        assert f"<td>{name}</td><td>{before}</td><td>{after}</td><td>{change}</td>" in shown
    once = retention_table(replace(run, evaluations=tuple(lines[:1])))
    assert "<td>tool_calls</td><td>1.5</td><td>–</td><td>–</td>" in once
    assert "of its own" not in retention_table(replace(run, evaluations=({**lines[0], "extra": None},)))


def episode(step: int = 1, kl: list[float] | None = None, **changes: object) -> dict:
    """Two turns of the policy with a tool's answer between them."""
    return {
        "step": step,
        "problem": f"p{step}",
        "prompt": "Who?",
        "completion": "<find> x\nfound x\nx it is",
        "tokens": ["<find>", " x", " found", " x", " x", " it", " is"],
        "action": [True, True, False, False, True, True, True],
        "kl": kl,
        "reward": 0.5,
        "counts": {"turn/count": 2.0, "tool/calls": 1.0},
        **changes,
    }


def test_turns_and_untrained_tokens_are_marked_without_any_kl():
    shown = completion(episode(), 1.0)
    assert [part.split("</p><pre>")[1].split("</pre>")[0] for part in shown.split("<div class='turn")[1:]] == [
        "<span class='t'>&lt;find&gt; x</span>",
        "<span class='t x'> found x</span>",
        "<span class='t'> x it is</span>",
    ]
    assert "KL was not measured" in section(replace(RUN, rollouts=(episode(),)))
    coloured = completion(episode(kl=[0.5, 0.1, 0.0, 0.0, 0.2, 0.2, 0.2]), 1.0)
    assert coloured.count("title=") == 5
    assert coloured.count("<b>") == 3


def test_all_recorded_completions_are_there_a_step_at_a_time():
    records = tuple(
        episode(step, problem=f"p{step}-{group}", reward=float(sample), completion=f"said-{step}-{group}-{sample}",
                tokens=None)
        for step in range(1, 10) for group in range(3) for sample in range(4)
    )  # fmt: skip
    shown = section(replace(RUN, rollouts=records))
    assert shown.count("<details>") == 9
    assert "Step 4: 12 completions, mean reward 1.5" in shown
    assert all(record["completion"] in shown for record in records)
    assert shown.index("Step 3: ") < shown.index("Step 4: ")
    each = len(all_completions(replace(RUN, rollouts=records[:12])))
    few = all_completions(replace(RUN, rollouts=records), limit=int(3.5 * each))
    assert [int(step) for step in re.findall(r"Step (\d+): ", few)] == [1, 5, 9]  # spread over the run
    assert "3 steps of 9 recorded; keel show RUN --step N prints the others" in few
    assert all_completions(replace(RUN, rollouts=records), limit=1).count("<details>") == 1


def test_counts_of_an_end_stand_with_a_completion():
    counts = {"turn/count": 2.0, "tool/calls": 3.0, "tool/errors": 1.0, "tool/too_many": 1.0, "answer/missing": 1.0}
    lines = facts(episode(counts={**counts, "answer/list": 0.0, "answer/unknown_document": 2.0}))
    assert "3 tool calls (1 too many)" in lines
    assert "answer: missing" in lines
    assert "answer: unknown document (2)" in lines
    assert not any("list" in fact for fact in lines)


@pytest.mark.parametrize("staleness", [0.0, 1.0])
def test_waits_and_staleness_are_drawn_of_a_run_that_samples_ahead(tmp_path, staleness):
    line = {"time/trainer_wait_s": 0.2, "time/sampler_wait_s": 0.1, "staleness/mean": staleness / 2}
    lines = [{"step": step, "reward/mean": 0.5, **line, "staleness/max": staleness} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    drawn = {panel.title: [curve.label for curve in panel.series] for panel in panels([read_run(tmp_path)])}
    ahead = {title: labels for title, labels in drawn.items() if title in ("Idle time", "Staleness")}
    assert ahead == ({"Idle time": ["trainer", "sampler"], "Staleness": ["mean", "largest"]} if staleness else {})


def test_every_kind_of_a_wrong_call_is_drawn():
    drawn = {metric for _, _, _, names in PANELS for metric, _ in names}
    assert {f"tool/{kind}" for kind in KINDS} <= drawn
