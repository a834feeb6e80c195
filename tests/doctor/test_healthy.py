"""Healthy configurations that differ in seed, loss, weights, placement, estimator, controller and reference.

None of them may have an error or a warning: users ignore an alarm with false positives.
"""

from __future__ import annotations

import pytest

from doctor.followed import check_advice
from doctor.schooled import counted, schooled_config
from keel.config import load_config
from keel.doctor.preflight import preflight

pytestmark = pytest.mark.doctor


LORA = "model.lora={r: 4}"
EXACT = ["rewards=[{name: task}]"]

# Options of different parts share a preflight; each stands in one at least.
HEALTHY: dict[str, list[str]] = {
    "LoRA": [LORA],
    "another seed, right or wrong only": ["run.seed=5", *EXACT],
    "LoRA and the exact KL, another seed": [LORA, "kl.estimator=exact", "run.seed=1"],
    "no reference at all": ["kl.beta=0", "kl.measure_every=0"],
    "dr_grpo, no penalty, measured": ["loss.loss_type=dr_grpo", "kl.beta=0"],
    "dapo, another temperature, a reference that waits for KL": [
        *("loss.loss_type=dapo", "run.seed=2", "rollout.temperature=0.7"),
        "reference={kind: kl_triggered, threshold: 0.05}",
    ],
    "gspo, sampled ahead": ["loss.loss_type=gspo", "rollout.max_staleness=1"],
    "cispo, leave-one-out, a reference of one's own": [
        *("loss.loss_type=cispo", "loss.baseline=leave_one_out"),
        "reference.kind=doctor.faults_reference:right_reference",
    ],
    "bnpo with k2 in the loss, warm-ups and a schedule, an average as the reference": [
        *("loss.loss_type=bnpo", "kl.estimator=k2", "reference={kind: ema, every: 4, alpha: 0.5}"),
        *("optim.warmup_steps=5", "optim.schedule=cosine", "reward.warmup_steps=10"),
    ],
    "k3 with its own gradient, filters": ["kl.estimator=k3", "kl.gradient=plain", "rollout.top_p=0.999"],
    "k1 in the reward, no division": ["kl.placement=reward", "kl.estimator=k1", "loss.scale_rewards=none"],
    "k1 in the advantage": ["kl.placement=advantage", "kl.estimator=k1", "run.seed=3"],
    "exact, for the sequence, several updates a batch": [
        *("kl.estimator=exact", "kl.level=sequence"),
        *("loss.num_iterations=2", "optim.minibatches=2"),
    ],
    "a dual controller, snapshots under LoRA": [
        *("kl.controller={name: dual, target: 0.05}", "run.seed=4"),
        *(LORA, "reference={kind: snapshot, every: 3}"),
    ],
    "an average under LoRA": [LORA, "reference={kind: ema, every: 4, alpha: 0.5}"],
}


def test_no_alarm_and_few_judgements_as_it_comes() -> None:
    asked: list[str] = []
    diagnosis = preflight(schooled_config(), reward=counted(asked))
    assert diagnosis.healthy, diagnosis.findings
    assert diagnosis.exit_status == 0
    assert not [line for line in diagnosis.unchecked if "Error" in line]
    assert not [hypothesis for hypothesis in diagnosis.hypotheses if hypothesis.verdict == "confirmed"]
    assert 16 < len(asked) <= 150


@pytest.mark.parametrize("name", HEALTHY)
def test_no_alarm_on_a_healthy_configuration(name: str) -> None:
    config = schooled_config(*HEALTHY[name])
    diagnosis = preflight(config)
    check_advice(config, diagnosis)
    assert diagnosis.healthy, [finding for finding in diagnosis.findings if finding.severity != "note"]
    assert diagnosis.exit_status == 0
    assert not [line for line in diagnosis.unchecked if "Error" in line]
    confirmed = {hypothesis.name for hypothesis in diagnosis.hypotheses if hypothesis.verdict == "confirmed"}
    forward = "kl.gradient=plain" in HEALTHY[name]  # k3's own gradient is a KL's, in the other direction
    assert confirmed == ({"H03"} if forward else set())


def test_a_policy_whose_warm_start_was_cut_is_not_blamed_for_what_it_does_not_know_yet():
    """A slow machine cuts the warm start of the default configuration. Its lack of skill is then only a note."""
    config = load_config({}, ["warmstart.steps=400", "task.skill=add", "rollout.max_completion_length=6"])
    diagnosis = preflight(config, warmstart_s=0.0)
    assert diagnosis.cut is not None
    assert "of 400 steps" in diagnosis.cut
    assert not [finding for finding in diagnosis.findings if finding.severity != "note"]
    assert any("of 400 steps" in finding.evidence for finding in diagnosis.findings)
    verdicts = {row.name: row.verdict for row in diagnosis.hypotheses}
    assert {verdicts[name] for name in ("H05", "E01", "E05")} == {"not testable here"}
    assert verdicts["H06"] == "ruled out"
