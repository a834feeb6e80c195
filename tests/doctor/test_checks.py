"""Each check finds its fault first and finds nothing in healthy histories."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doctor.histories import altered, configured, evaluation, healthy
from keel.doctor.checks import CHECKS, check_history
from keel.doctor.history import History, Series
from keel.doctor.thresholds import load_thresholds

KL, ENTROPY = "kl/policy_ref/k3/mean", "entropy/mean"


def codes(history: History) -> list[str]:
    return [finding.code for finding in check_history(history).findings]


def flat(history: History | None = None) -> History:
    return altered("reward/mean", lambda step, was: 0.3 + 0.02 * math.sin(7.3 * step), history)


def without(history: History, *names: str) -> History:
    fields = {field: getattr(history, field) for field in history.__dataclass_fields__}
    series = {name: values for name, values in history.series.items() if name not in names}
    return History(**{**fields, "series": series})


def with_series(name: str, value: float, **options: Any) -> History:
    history = configured(**options)
    return replace(history, series={**history.series, name: Series.of((step, value) for step in range(1, 61))})


FAULTS = {
    "kl/at-start": altered(KL, lambda step, was: 15.0 if step < 3 else 0.1),
    "kl/explosion": altered(KL, lambda step, was: was * 1.5 ** (step - 40) if step > 40 else was),
    "kl/over-budget": altered(KL, lambda step, was: min(0.5, 0.02 * (step - 1))),
    "kl/not-learning": flat(altered(KL, lambda step, was: 1e-5 * step)),
    "kl/unneeded": configured(loss__loss_type="dr_grpo", loss__scale_rewards=None),
    "kl/no-gradient": configured(kl__estimator="k1", kl__gradient="plain"),
    "kl/reversed": configured(kl__estimator="k1", kl__gradient="plain", loss__num_iterations=4),
    "reward/non-finite": altered("reward/mean", lambda step, was: math.nan if step == 7 else was),
    "reward/constant": flat(altered("reward/zero_variance_fraction", lambda step, was: 1.0)),
    "reward/weak": altered(
        "reward/within_group_std", lambda step, was: 0.06, flat(configured(loss__scale_rewards="none"))
    ),
    "advantage/amplified": altered("reward/within_group_std", lambda step, was: 0.03),
    "reward/cliff": altered(
        "parse/ok_fraction",
        lambda step, was: 0.2,
        rollouts=tuple({"step": i, "reward": -1.0 if i % 8 else 0.1 * (i % 3), "tracked": False} for i in range(64)),
    ),
    "output/random-weights": altered(ENTROPY, lambda step, was: 0.97 * math.log(1000)),
    "output/truncated": altered("length/truncated_fraction", lambda step, was: 0.97),
    "output/unparseable": flat(altered("parse/ok_fraction", lambda step, was: 0.01)),
    "optim/lr-too-high": altered(KL, lambda step, was: 0.0 if step == 1 else 0.15),
    "optim/non-finite": altered("grad/norm", lambda step, was: math.nan if step > 50 else was),
    "optim/spike": altered("grad/norm", lambda step, was: 50.0 if step % 10 == 5 and step > 12 else was),
    "ratio/all-clipped": altered("ratio/clip_low_fraction", lambda step, was: 0.98),
    "length/explosion": flat(altered("length/mean", lambda step, was: 30.0 + 3 * step)),
    "entropy/collapse": flat(altered(ENTROPY, lambda step, was: 1.2 if step < 10 else 0.004)),
    "sampler/stale": altered("kl/sampler_policy/k3/mean", lambda step, was: 0.004 * (step - 1)),
    "sampler/temperature": altered("kl/sampler_policy/k3/mean", lambda s, w: 0.2, configured(rollout__temperature=0.6)),
    "sampler/filter": altered("kl/sampler_policy/k3/mean", lambda s, w: 0.2, configured(rollout__top_p=0.9)),
    "sampler/unreported": with_series("mismatch/unreported_fraction", 0.5),
    "sampler/precision": altered("kl/sampler_policy/k3/mean", lambda step, was: 0.02),
    "retention/dropping": healthy(
        evaluations=(evaluation("copy", "retention", 0, 0.9), evaluation("copy", "retention", 60, 0.5))
    ),
    "eval/train-gap": healthy(
        evaluations=(evaluation("sort", "trained", 0, 0.6), evaluation("sort", "trained", 60, 0.2))
    ),
    "guard/rolled-back": healthy(
        events=({"kind": "rollback", "step": 30, "code": "kl/over-budget", "message": "kl broken: back to step-20"},)
    ),
}


@pytest.mark.parametrize("code", FAULTS)
def test_the_fault_is_named_first(code):
    findings = check_history(FAULTS[code]).findings
    assert findings, "nothing was found"
    assert findings[0].code == code, [finding.code for finding in findings]
    assert any(character.isdigit() for character in findings[0].evidence), findings[0].evidence
    assert findings[0].cause
    assert findings[0].advice


def by_depth(*means: float, se: float = 1e-4) -> History:
    """A log with KL(sampler‖policy) for stretches of the context that start at tokens 0, 64, 128, …."""
    history, series = healthy(), {}
    for start, mean in zip((0, 64, 128, 256), means, strict=False):
        for name, value in (("mean", mean), ("se", se)):
            points = Series.of((step, value) for step in range(1, 61))
            series[f"kl/sampler_policy/depth_{start}/{name}"] = points
    return replace(history, series={**history.series, **series})


def test_a_gap_that_grows_with_depth():
    (finding,) = check_history(by_depth(2e-4, 2e-4, 5e-4, 6e-3)).findings
    assert finding.code == "sampler/depth"
    assert "from token 256 on 0.006" in finding.evidence
    assert codes(by_depth(2e-3, 2e-3, 2e-3, 3e-3)) == []  # hardly grows
    assert codes(by_depth(1e-6, 1e-5, 1e-4, 8e-4)) == []  # grows, and is rounding
    assert codes(by_depth(2e-4, 2e-4, 5e-4, 6e-3, se=1e-2)) == []  # chance
    assert codes(by_depth(6e-3)) == []


@given(st.integers(0, 10_000), st.integers(3, 150))
def test_a_healthy_history_gives_nothing(seed, steps):
    assert codes(healthy(seed, steps)) == []


@given(st.sets(st.sampled_from(sorted(healthy().series))))
def test_what_is_missing_is_said_and_never_a_finding(names):
    """A missing metric never makes a check fail, and never causes a finding."""
    diagnosis = check_history(without(healthy(), *names))
    assert diagnosis.findings == ()
    if KL in names:
        assert any(line.startswith("kl/explosion: ") for line in diagnosis.unchecked)


def test_an_empty_log_checks_nothing_and_says_so():
    diagnosis = check_history(History("table", healthy().path))
    assert diagnosis.findings == ()
    assert len(diagnosis.unchecked) >= len(CHECKS) / 2  # the others need what few logs hold, or a teacher


def test_the_figures_and_steps_are_in_the_evidence():
    history = altered(KL, lambda step, was: 1e5 if step > 40 else was)
    (finding,) = [f for f in check_history(history).findings if f.code == "kl/explosion"]
    assert "1e+05" in finding.evidence
    assert "step 41" in finding.evidence
    assert "11.5" in finding.cause  # e^11.5 = 1e5


@pytest.mark.parametrize(("gap", "code"), [(20.0, "sampler/temperature"), (30.0, "sampler/mismatch")])
def test_a_temperature_does_not_make_a_drawn_token_impossible(gap, code):
    history = FAULTS["sampler/temperature"]
    far = Series.of((step, gap) for step in range(1, 61))
    assert codes(replace(history, series={**history.series, "logp/sampler_gap_max": far}))[0] == code


def test_a_small_kl_to_a_reference_that_moves_is_no_standstill():
    diagnosis = check_history(configured(FAULTS["kl/not-learning"], reference__kind="ema"))
    assert diagnosis.findings == ()
    assert any(line.startswith("kl/not-learning: the reference moves") for line in diagnosis.unchecked)


def test_an_explosion_that_came_back_is_a_warning():
    history = altered(KL, lambda step, was: 50.0 if step == 30 else was)
    (finding,) = check_history(history).findings
    assert (finding.code, finding.severity) == ("kl/explosion", "warning")


def test_a_lone_step_of_a_heavy_tailed_estimate_is_a_note():
    lone = altered(KL, lambda step, was: 4.0 if step == 30 else was)
    (finding,) = check_history(lone).findings
    assert (finding.code, finding.severity) == ("kl/explosion", "note")
    lasting = altered(KL, lambda step, was: 4.0 if step >= 30 else was)
    assert check_history(lasting).findings[0].severity == "error"


def test_a_budget_is_broken_beyond_the_kls_own_noise():
    noisy = altered(KL, lambda step, was: 0.0 if step == 1 else 0.21 + 0.15 * (-1) ** step if step > 40 else was)
    assert codes(noisy) == []
    assert codes(altered(KL, lambda step, was: min(0.21, 0.01 * (step - 1)))) == ["kl/over-budget"]


def test_a_policy_without_differing_rewards_stands_still_for_that_reason():
    still = altered(KL, lambda step, was: 1e-9 * step, flat())
    entropy = altered(ENTROPY, lambda step, was: 1.0 + 0.01 * math.sin(7.3 * step), still)
    assert codes(entropy)[0] == "optim/no-update"
    alike = altered("reward/zero_variance_fraction", lambda step, was: 1.0, entropy)
    assert "optim/no-update" not in codes(alike)
    assert codes(alike)[0] == "reward/constant"


def reward_failures(message: str, steps: range) -> History:
    return healthy(events=tuple({"kind": "reward/failed", "step": step, "message": message} for step in steps))


def test_rewards_that_fail_are_named_by_what_they_gave():
    nan = check_history(reward_failures("exact on problem p1, sample 0: returned nan", range(3, 5))).findings
    assert [(f.code, f.severity) for f in nan] == [("reward/non-finite", "error")]
    once = check_history(reward_failures("exact on p1 sample 0: raised KeyError: 'nan'", range(3, 4))).findings
    assert [(f.code, f.severity) for f in once] == [("reward/failed", "warning")]
    often = check_history(reward_failures("exact on p1 sample 0: raised KeyError: 'a'", range(3, 40))).findings
    assert [(f.code, f.severity) for f in often] == [("reward/failed", "error")]
    assert "KeyError" in often[0].evidence


def test_a_solved_task_may_have_constant_rewards():
    history = altered("reward/zero_variance_fraction", lambda step, was: 1.0 if step > 40 else was)
    (finding,) = check_history(history).findings
    assert (finding.code, finding.severity) == ("reward/constant", "note")


def test_the_first_figure_of_a_log_that_begins_late_is_not_the_start():
    base = FAULTS["kl/at-start"]
    late = altered(KL, lambda step, was: 0.15, base)
    fields = {field: getattr(late, field) for field in late.__dataclass_fields__}
    series = {name: values.tail(50) for name, values in late.series.items()}
    diagnosis = check_history(History(**{**fields, "series": series}))
    assert "kl/at-start" not in [finding.code for finding in diagnosis.findings]
    assert any(line.startswith("kl/at-start: ") for line in diagnosis.unchecked)


def test_a_budget_of_the_configuration_takes_the_place_of_the_threshold():
    near = altered(
        KL, lambda step, was: min(0.12, 0.004 * (step - 1)), configured(kl__budget={"max": 0.1, "unit": "per_token"})
    )
    (finding,) = check_history(near).findings
    assert finding.code == "kl/over-budget"
    assert "kl.budget.max" in finding.evidence


def test_a_wide_budget_does_not_hide_the_distance():
    wide = altered(KL, lambda step, was: min(0.3, 0.01 * (step - 1)), configured(kl__budget={"max": 0.5}))
    (finding,) = check_history(wide).findings
    assert (finding.code, finding.severity) == ("kl/over-budget", "note")
    assert "kl.budget.max=0.5" in finding.evidence


def test_a_gap_that_was_not_there_at_the_first_step_is_stale_however_fast_it_came():
    """An engine that never syncs: exact at step 1, wrong at step 2, and constant afterwards."""
    history = altered("kl/sampler_policy/k3/mean", lambda step, was: 4e-7 if step == 1 else 0.02)
    finding = check_history(history).findings[0]
    assert finding.code == "sampler/stale"
    assert "was 4e-07 over step 1" in finding.evidence
    small = altered("kl/sampler_policy/k3/mean", lambda step, was: 4e-7 if step == 1 else 0.002)
    assert codes(small) == []


def test_a_small_gap_is_stale_too_if_it_is_all_that_the_policy_has_moved():
    def gap(first: float, share: float) -> History:
        moved = altered(KL, lambda step, was: 1e-5 * (step - 1), healthy())
        return altered("kl/sampler_policy/k3/mean", lambda s, w: first if s == 1 else share * 1e-5 * (s - 1), moved)

    (finding,) = check_history(gap(first=1e-14, share=0.98)).findings
    assert (finding.code, finding.severity) == ("sampler/stale", "error")
    assert "98 % of KL(policy‖reference)" in finding.evidence
    assert codes(gap(first=1e-14, share=0.3)) == []
    assert codes(gap(first=4e-4, share=0.98)) == []  # a constant gap is precision, and here a small one


def test_a_log_that_begins_late_does_not_clear_the_weights():
    history = altered("kl/sampler_policy/k3/mean", lambda step, was: 0.02)
    fields = {field: getattr(history, field) for field in history.__dataclass_fields__}
    late = History(**{**fields, "series": {name: values.tail(50) for name, values in history.series.items()}})
    (finding,) = [f for f in check_history(late).findings if f.code == "sampler/precision"]
    assert "at step 11, so stale weights may be the cause" in finding.cause


def spiking(*, skipped: bool) -> History:
    """From step 21 on, every step has a gradient norm of 50 instead of about 0.8."""

    def at(step: float) -> bool:
        return step > 20

    history = altered("grad/norm", lambda step, was: 50.0 if at(step) else was)
    if not skipped:
        return history
    history = altered("guard/skipped", lambda step, was: float(at(step)), history)
    history = altered("guard/nonfinite", lambda step, was: 0.0, history)
    return altered("guard/spike", lambda step, was: float(at(step)), history)


def test_skipped_spikes_are_spikes_and_never_become_the_usual():
    (not_skipped,) = check_history(spiking(skipped=False)).findings
    finding, symptom = check_history(spiking(skipped=True)).findings
    assert finding.code == not_skipped.code == "optim/spike"
    assert (symptom.code, symptom.severity) == ("guard/skips-all", "note")
    assert finding.evidence.startswith("40 of 60 steps spike")
    assert "40 of them were skipped" in finding.evidence
    assert "skipped" not in not_skipped.evidence
    assert int(not_skipped.evidence.split()[0]) < 40  # updates that were made move the median, and it calls them usual


def test_a_skip_is_judged_by_its_cause():
    def codes_of_skip(cause: str) -> list[str]:
        event = {"kind": "guard/skipped", "step": 5, "cause": cause, "message": "an update was skipped"}
        return codes(healthy(events=(event,)))

    assert codes_of_skip("spike") == []
    assert codes_of_skip("non-finite") == ["optim/non-finite"]


def overflowing(*, handled: bool) -> History:
    """An fp16 gradient overflows in the first 24 steps. If not `handled`, the guard counts it as non-finite."""
    history = altered("grad/norm", lambda step, was: math.inf if step <= 24 else was)
    history = altered("guard/skipped", lambda step, was: float(step <= 24), history)
    counts = {True: Series.of([(step, float(step <= 24)) for step in range(1, 61)])}
    counts[False] = Series.of([(step, 0.0) for step in range(1, 61)])
    series = {**history.series, "guard/overflow": counts[handled], "guard/nonfinite": counts[not handled]}
    return replace(history, series=series)


def test_an_overflow_that_lowers_the_loss_scale_is_not_a_non_finite_gradient():
    assert codes(overflowing(handled=True)) == []
    assert codes(overflowing(handled=False))[0] == "optim/non-finite"


def test_an_explosion_in_the_last_update_is_seen_although_no_step_shows_it():
    def final(kl: float, step: int = 60) -> History:
        event = {"kind": "kl/final", "step": step, "message": "", "metrics": {KL: kl}}
        return healthy(events=(event,))

    (finding,) = check_history(final(8.0)).findings
    assert (finding.code, finding.severity) == ("kl/explosion", "error")
    assert "reached 8 nats per token after the last update" in finding.evidence
    assert check_history(final(0.06)).findings == ()
    assert check_history(final(8.0, step=30)).findings == ()  # it went on from there
    for garbage in (None, 3, 0.5, "x", []):  # as a log that was made by hand may have
        assert check_history(healthy(events=({"kind": "kl/final", "step": 60, "metrics": garbage},))).findings == ()


def test_limits_of_a_solved_task_and_of_an_explosion_are_thresholds():
    solved = altered("reward/zero_variance_fraction", lambda step, was: 1.0, flat())
    scores = (evaluation("sort", "trained", 60, 0.7),)
    solved = replace(solved, evaluations=scores)
    assert check_history(solved).findings[0].severity == "error"
    lower = check_history(solved, load_thresholds({"solved_accuracy": 0.7}))
    assert {f.code: f.severity for f in lower.findings}["reward/constant"] == "warning"  # solved, but all along
    late = altered("reward/zero_variance_fraction", lambda step, was: 1.0 if step > 45 else 0.1, solved)
    assert {f.severity for f in check_history(late, load_thresholds({"solved_accuracy": 0.7})).findings} == {"note"}
    assert "solved_accuracy" in lower.raised_thresholds[0]
    jump = altered(KL, lambda step, was: 3.0 if step == 30 else was)
    assert codes(jump) == ["kl/explosion"]
    assert [f.code for f in check_history(jump, load_thresholds({"kl_explosion_floor": 4.0})).findings] == [
        "doctor/threshold-raised"
    ]


def test_a_stop_is_an_error_under_its_own_code():
    stop = {"kind": "stop", "step": 30, "code": "kl/over-budget", "message": "kl is 0.5 at step 30"}
    (finding,) = check_history(healthy(events=(stop,))).findings
    assert (finding.code, finding.severity) == ("kl/over-budget", "error")


def test_advice_names_the_option_of_the_runs_own_trainer():
    base = altered(KL, lambda step, was: min(0.5, 0.02 * (step - 1)), source="TRL")
    finding = next(f for f in check_history(base).findings if f.code == "kl/over-budget")
    assert "learning_rate" in finding.advice
    assert "optim.learning_rate" not in finding.advice


def with_tools(history: History | None = None, **values: float) -> History:
    """The healthy run with two tool calls per episode and metrics such as `tool__failed=2.0` for tool/failed."""
    base = healthy() if history is None else history
    steps = base.series["reward/mean"].steps
    figures = {"tool/calls_mean": 2.0, "tool/error_fraction": 0.05, "answer/missing": 0.1}
    figures |= {name.replace("__", "/"): value for name, value in values.items()}
    more = {name: Series.of((step, value) for step in steps) for name, value in figures.items()}
    return replace(base, series={**base.series, **more})


def test_calls_that_fail_are_found_with_their_kind_and_what_the_model_was_told():
    assert codes(with_tools()) == []
    event = {"kind": "tool/errors", "step": 3, "error": "error: search raised KeyError: 'x'"}
    all_fail = with_tools(tool__error_fraction=1.0, tool__failed=1.9, tool__malformed=0.1)
    (finding,) = check_history(replace(all_fail, events=(event,))).findings
    assert (finding.code, finding.severity) == ("tool/failing", "error")
    assert "100 % of the tool calls of steps 51–60" in finding.evidence
    assert "failed 1.9, malformed 0.1" in finding.evidence
    assert "search raised KeyError: 'x'" in finding.evidence
    assert "the tool's function raises" in finding.cause
    (finding,) = check_history(with_tools(tool__error_fraction=0.6, tool__malformed=1.2)).findings
    assert finding.severity == "warning"
    assert "max_turn_length" in finding.advice


def test_one_failed_call_among_thousands_is_no_alarm():
    history = with_tools(tool__error_fraction=0.0)
    rare = Series.of((step, 0.001 if step > 55 else 4.0) for step in history.series["reward/mean"].steps)
    wrong = Series.of((step, 1.0 if step > 55 else 0.0) for step in rare.steps)
    more = {"tool/calls_mean": rare, "tool/error_fraction": wrong}
    assert codes(replace(history, series={**history.series, **more})) == []


def test_ends_that_are_no_answer_are_found():
    (finding,) = check_history(with_tools(answer__unknown_document=1.5)).findings
    assert (finding.code, finding.severity) == ("answer/unusable", "warning")
    assert "1.5 per episode over steps 51–60" in finding.evidence
    assert codes(with_tools(answer__missing=0.7)) == ["answer/unusable"]
    unread = altered("parse/ok_fraction", lambda step, was: 0.01, flat())
    assert codes(with_tools(unread, answer__missing=0.99)) == ["output/unparseable"]


def test_a_run_without_tools_is_not_asked_about_them_and_a_log_of_others_is():
    assert not any("tool/" in line for line in check_history(healthy()).unchecked)
    assert any(line.startswith("tool/failing: ") for line in check_history(healthy(source="table")).unchecked)


def test_samples_that_are_meant_to_be_old_are_no_lost_sync():
    ahead, name = configured(rollout__max_staleness=2), "kl/sampler_policy/k3/mean"
    (finding,) = check_history(altered(name, lambda step, was: 0.004 * (step - 1), ahead)).findings
    assert (finding.code, finding.severity) == ("sampler/too-old", "warning")
    assert "rollout.max_staleness=1" in finding.advice
    assert codes(altered(name, lambda step, was: 1e-4 * (step > 1), ahead)) == []


@pytest.mark.parametrize(("mass", "expected"), [(0.95, []), (0.85, ["sampler/filter"])])
def test_the_mass_that_filters_cut_off_is_judged(mass, expected):
    assert codes(with_series("rollout/kept_mass/mean", mass, rollout__top_p=0.9)) == expected


@pytest.mark.parametrize(
    ("scale", "loss", "expected"),
    [
        (None, None, ["advantage/amplified"]),
        ("group", "dr_grpo", ["advantage/amplified"]),
        (True, "grpo", ["advantage/amplified"]),
        (False, "grpo", []),
        ("none", "grpo", []),
        (None, "dr_grpo", []),
    ],
)
def test_advantages_that_nothing_divides_are_not_amplified(scale, loss, expected):
    """verl, NeMo-RL and older TRL log a truth value."""
    log = configured(loss__scale_rewards=scale, loss__loss_type=loss)
    found = codes(altered("reward/within_group_std", lambda step, was: 0.03, log))
    assert [code for code in found if code == "advantage/amplified"] == expected
