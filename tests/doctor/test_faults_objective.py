"""Each fault of losses, controllers, turn endings, prompts and tasks is the preflight's first finding."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from doctor.followed import check_named_first, repeated
from doctor.schooled import schooled_config
from doctor.test_faults_reference import FAULTS as OF_REFERENCE
from doctor.test_faults_scoring import FAULTS as OF_SCORING
from doctor.test_travel import FAULTS as OF_TRAVEL
from keel.doctor.keel_subject import build_subject
from keel.doctor.preflight import preflight
from keel.doctor.probes.limits import clip_findings, probe_limits
from keel.doctor.probes.objective import left_out, probe_objective
from keel.doctor.probes.sampler import probe_sampler
from keel.doctor.probes.update import probe_update

pytestmark = pytest.mark.doctor


HERE = "doctor.faults_objective"
BIASED = "kl.allow_biased=true"


def loss(name: str) -> str:
    return f"loss.loss_type={HERE}:{name}"


def controller(name: str) -> str:
    return f"kl.controller={{name: '{HERE}:{name}'}}"


def engine(name: str) -> str:
    return f"rollout.engine={HERE}:{name}"


def task(name: str) -> str:
    return f"task={{name: '{HERE}:{name}'}}"


FAULTS = {
    "an average that follows at once": ("reference/follows", ["reference={kind: ema, every: 1, alpha: 0.99}"]),
    "a reward of −1e30": ("reward/cliff", [f"rewards=[{{name: '{HERE}:abyss'}}]"]),
    "the same problems at every step": ("task/repeats", [task("same_every_step"), "run.max_steps=100"]),
    "the same problems for steps on end": ("task/repeats", [task("same_for_steps_on_end")]),
    "a task of one problem": ("task/repeats", [task("one_problem")]),
    "spaces at the prompt's end": ("prompt/format", [task("spaces_at_the_end")]),
    "a shifted vocabulary": ("model/tokenizer", [f"model.name={HERE}:shifted_vocabulary"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_is_named_first(fault: str) -> None:
    whole = not repeated(FAULTS, fault, OF_REFERENCE, OF_SCORING, OF_TRAVEL)
    diagnosis = check_named_first(*FAULTS[fault], whole=whole)
    assert not [line for line in diagnosis.unchecked if "Error" in line], diagnosis.unchecked


@pytest.mark.parametrize(
    "name",
    ["grpo", "bnpo", "dr_grpo", "dapo", "gspo", "cispo", "gmpo", "sapo", "policy_gradient", f"{HERE}:right_loss"],
)
def test_every_loss_is_minus_advantage_times_its_weight_at_ratio_one(name: str) -> None:
    outcome = probe_objective(build_subject(schooled_config(f"loss.loss_type={name}", "kl.beta=0")))
    assert not outcome.findings
    assert outcome.figures["factor"] == pytest.approx(1.0, abs=1e-5)
    assert outcome.figures["pushed"] == 1.0


@pytest.mark.parametrize(
    ("wrong", "severity", "because"),
    [
        ("clipped_on_the_wrong_side", "error", "clips the wrong side"),
        ("clipped_on_both_sides", "warning", "cannot move back"),
        ("not_clipped", "warning", "not limited"),
        ("ratio_to_itself", "warning", "ignores the ratio"),
    ],
)
def test_a_clip_that_is_none_or_cuts_the_wrong_side_is_named(wrong: str, severity: str, because: str) -> None:
    setup = build_subject(schooled_config(loss(wrong), "loss.num_iterations=2"))
    (finding,) = clip_findings(setup, {})
    assert (finding.code, finding.severity) == ("loss/clip", severity)
    assert because in finding.cause


@pytest.mark.parametrize(
    ("name", "passes", "named"),
    [
        ("range_of_sequences", 2, True),
        ("range_of_sequences", 1, False),  # nothing is ever cut
        ("range_for_sequences", 2, False),
        ("right_loss", 2, False),
    ],
)
def test_a_range_of_ones_own_that_one_update_leaves_is_named(name: str, passes: int, named: bool) -> None:
    setup = build_subject(schooled_config(loss(name), f"loss.num_iterations={passes}", "rollout.max_staleness=0"))
    found = [*clip_findings(setup, {})]
    assert [(f.code, f.severity) for f in found] == [("loss/clip", "error")] * named


@pytest.mark.parametrize(("limits", "side"), [((0.2, 0.0), "up"), ((0.0, 0.28), "down"), ((0.2, 0.28), "")])
def test_a_range_that_one_side_lacks_is_named(limits: tuple[float, float], side: str) -> None:
    options = [f"{name}={value}" for name, value in zip(("loss.epsilon", "loss.epsilon_high"), limits, strict=True)]
    setup = build_subject(schooled_config("loss.num_iterations=4", *options))
    probe_update(setup)
    named = [f"{f.code}: {f.evidence}" for f in probe_limits(setup).findings]
    assert [f"moved {side} by" in line for line in named if line.startswith("loss/clip")] == [True] * bool(side)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("loss.epsilon=0.0", "loss.epsilon_high=0.2"), True),
        (("loss.importance_sampling_level=sequence", "loss.epsilon=0.0003", "loss.epsilon_high=0.0004"), False),
        (("loss.epsilon=0.005", "optim.learning_rate=1e-6"), False),
    ],
    ids=["no room below", "a range of sequences", "a narrow range that no update leaves"],
)
def test_a_side_without_room_is_named_whatever_an_update_moves(options: tuple[str, ...], named: bool) -> None:
    setup = build_subject(schooled_config("loss.num_iterations=4", "optim.learning_rate=1e-6", *options))
    probe_update(setup)
    found = [f for f in probe_limits(setup).findings if f.code == "loss/clip"]
    assert len(found) == named


def test_every_clip_of_keels_own_cuts_its_side() -> None:
    setup = build_subject(schooled_config(loss("right_loss"), "loss.num_iterations=2"))
    for name in (f"{HERE}:right_loss", "grpo", "dapo", "gspo", "cispo", "gmpo", "sapo"):
        run = replace(setup.run, loss=setup.run.loss.model_copy(update={"loss_type": name}))
        assert not [*clip_findings(replace(setup, built=replace(setup.built, run=run)), {})], name


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        (["+-", "+---"], True),
        (["+-", "+++-"], True),
        (["++", "--"], True),
        (["+++", "+"], False),
        (["-", "-", "+"], False),
    ],
    ids=["all but the first token", "the last token", "a whole completion", "nothing", "completions of one token"],
)
def test_tokens_that_are_never_trained_are_named(rows: list[str], named: bool) -> None:
    mask = torch.arange(4)[None] < torch.tensor([len(row) for row in rows])[:, None]
    completions = [SimpleNamespace(stop_reason="eos")] * len(rows)
    setup: Any = SimpleNamespace(mask=mask, batch=SimpleNamespace(completions=completions))
    assert bool(left_out(setup, torch.tensor([sign == "+" for row in rows for sign in row]))) == named


def test_rows_that_are_left_out_for_their_advantage_are_no_fault() -> None:
    findings = probe_objective(build_subject(schooled_config(loss("weak_ones_left_out")))).findings
    assert "loss/no-gradient" not in [finding.code for finding in findings]


@pytest.mark.parametrize("tokens", [8, 4096])
def test_a_range_of_tokens_is_told_from_one_of_sequences_however_long_they_are(tokens: int) -> None:
    """Two losses with one clip range, on tokens and on sequences; only the first is reported."""
    setup = build_subject(schooled_config(loss("range_of_sequences"), "loss.num_iterations=2"))
    mask = torch.ones(2, tokens, dtype=torch.bool)
    rows = replace(setup.batch.rows, group=torch.zeros(2, dtype=torch.long))
    batch = replace(setup.batch, rows=rows)
    for name, expected in (("range_of_sequences", True), ("range_for_sequences", False)):
        run = replace(setup.run, loss=setup.run.loss.model_copy(update={"loss_type": f"{HERE}:{name}"}))
        long = SimpleNamespace(
            thresholds=setup.thresholds,
            mask=mask,
            batch=batch,
            run=run,
            config=setup.config,
            of_batch={"logp": torch.full((2, tokens), -1.0)},
            loss_length=tokens,
        )
        assert bool([*clip_findings(long, {})]) == expected, name


def test_weights_of_ones_own_are_noted_and_not_judged() -> None:
    diagnosis = preflight(schooled_config(loss("own_weights")))
    assert diagnosis.healthy
    assert "loss/scale" in [finding.code for finding in diagnosis.findings]


@pytest.mark.parametrize(
    "controller",
    [
        "{name: fixed, warmup_steps: 5}",
        "{name: warmup, steps: 10}",
        "{name: linear, end: 0.0, steps: 10}",
        "{name: cosine, end: 0.1, steps: 10}",
        "{name: step, target: 0.05}",
        "{name: ziegler}",
        "{name: dual, target: 0.05}",
        "{name: pid, target: 0.05}",
    ],
)
def test_keels_own_controllers_stay_within_bounds(controller: str) -> None:
    assert not probe_objective(build_subject(schooled_config(f"kl.controller={controller}"))).findings


def test_a_filter_that_cuts_off_next_to_nothing_is_a_note() -> None:
    outcome = probe_sampler(build_subject(schooled_config("rollout.top_k=100")))
    assert [(finding.code, finding.severity) for finding in outcome.findings] == [("sampler/filter", "note")]
