"""The reduced batch of a large model: its tokens are the policy's own, and its rewards are kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from doctor.schooled import counted, schooled_config
from keel.base.types import Problem, Reward
from keel.doctor import preflight as module
from keel.doctor import subject as doctor_subject
from keel.doctor.keel_subject import KeelSubject, build_subject
from keel.doctor.measure import Measure
from keel.doctor.preflight import LEAST_TOKENS, MEASURES, budget_note, preflight, token_budget, within_budget
from keel.doctor.probes.balance import probe_balance
from keel.doctor.probes.collection import probe_collection
from keel.doctor.probes.reach import probe_reach
from keel.doctor.probes.update import probe_update, scored
from keel.doctor.subject import Budget

LONG = ("model.name=doctor.schooled:fresh_model", "rollout.max_completion_length=40")  # noise seldom ends


@pytest.fixture(scope="module")
def setup() -> Iterator[KeelSubject]:
    built = build_subject(schooled_config(*LONG))
    with closing(built.run):
        yield built


def test_a_small_model_has_the_whole_batch(setup):
    assert within_budget(setup) is setup
    assert token_budget(setup, quick=True) < token_budget(setup, quick=False)


def test_a_large_one_has_fewer_and_shorter_completions_with_their_rewards(setup, monkeypatch):
    size = sum(p.numel() for p in setup.policy.model.parameters())
    monkeypatch.setattr(module, "PASS_FLOP", 2 * size * 250)  # a batch of 250 tokens
    less = within_budget(setup)
    assert less.sampled == setup.groups
    assert less.shared is setup.shared
    assert less.of_batch is not setup.of_batch
    assert 2 <= len(less.groups) < len(setup.groups)
    whole = {group.problem.key: group for group in setup.groups}
    longest = max(len(c.tokens) for group in less.groups for c in group.completions)
    assert LEAST_TOKENS <= longest < 40
    assert less.sampling.max_completion_length == longest
    for group in less.groups:
        before = whole[group.problem.key]
        assert group.rewards == before.rewards
        for cut, completion in zip(group.completions, before.completions, strict=True):
            length = len(cut.tokens)
            assert cut.tokens == completion.tokens[:length]
            assert cut.sample_logp == completion.sample_logp[:length]
            assert cut.stop_reason == completion.stop_reason  # loss.mask_truncated_completions goes by it
    assert budget_note(less, setup).startswith(f"passes over the model were tried on {4 * len(less.groups)} of 16 comp")


@pytest.mark.slow
def test_a_healthy_configuration_is_healthy_on_less(monkeypatch):
    monkeypatch.setattr(module, "PASS_FLOP", 1.0)
    diagnosis = preflight(schooled_config())
    assert diagnosis.healthy, diagnosis.findings
    assert any(note.startswith("passes over the model") for note in diagnosis.notes)


def measures(*names: str) -> list[Measure]:
    chosen = [measure for measure in MEASURES if measure.name in names]
    assert len(chosen) == len(names)
    return chosen


def test_quick_leaves_experiments_out_and_says_so_and_asks_for_fewer_judgements():
    tried: list[str] = []
    asked: list[str] = []
    diagnosis = preflight(
        schooled_config(), on_probe=lambda outcome, _: tried.append(outcome.name), reward=counted(asked), quick=True
    )
    assert 16 < len(asked) <= 70
    left_out = [measure.name for measure in MEASURES if not measure.quick]
    assert tried == [measure.name for measure in MEASURES if measure.quick]
    assert diagnosis.healthy
    for name in left_out:
        assert any(name in line and "--quick" in line for line in diagnosis.unchecked)
        assert name not in diagnosis.sound
    (stale,) = [row for row in diagnosis.hypotheses if row.name == "H06"]
    assert stale.verdict == "not testable here"


@pytest.mark.parametrize("loss", ["dr_grpo", "grpo", "dapo"])
def test_a_cut_batch_has_the_figures_of_a_whole_one(loss, monkeypatch):
    """Loss weights and nats per completion must equal those of full completions, whatever is cut."""
    config = schooled_config(*LONG, f"loss.loss_type={loss}", "kl.reduction=loss", "kl.estimator=exact")
    whole = build_subject(config, reward=lambda problem, text: Reward(float(len(text) % 5)))
    monkeypatch.setattr(module, "PASS_FLOP", 1.0)
    with closing(whole.run):
        cut = within_budget(whole)
        assert max(len(c.tokens) for c in cut.batch.completions) == LEAST_TOKENS
        figures = []
        for setup in (whole, cut):
            probe_update(setup)
            figures.append({**probe_reach(setup).figures, **probe_balance(setup).figures})
    assert figures[1]["advantage_weight"] == pytest.approx(figures[0]["advantage_weight"], rel=0.05)
    assert figures[1]["advantage"] == figures[0]["advantage"]
    assert figures[1]["kl_weight"] == pytest.approx(figures[0]["kl_weight"], rel=0.3)
    assert figures[1]["reach"] == pytest.approx(figures[0]["reach"], rel=0.5)


def test_truncated_completions_are_those_that_were_sampled_so(monkeypatch):
    config = schooled_config("loss.mask_truncated_completions=true", "kl.collect_max=0.5")
    monkeypatch.setattr(module, "PASS_FLOP", 1.0)
    monkeypatch.setattr(module, "LEAST_TOKENS", 1)
    whole = build_subject(config)
    with closing(whole.run):
        cut = within_budget(whole)
        mask = scored(cut).rows.policy_mask
        assert mask is not None
        ended = [c.stop_reason != "length" for c in cut.batch.completions]
        assert any(ended)
        assert mask.any(-1).tolist() == ended
    monkeypatch.setattr("keel.doctor.preflight.MEASURES", measures("update", "reach", "balance", "limits"))
    diagnosis = preflight(config)
    assert not {"optim/no-update", "kl/rejects-all", "kl/too-strong"} & {f.code for f in diagnosis.findings}


def test_memory_that_runs_out_in_a_probe_is_no_finding(monkeypatch):
    def full(subject):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("keel.doctor.preflight.MEASURES", [Measure("reach", full, "")])
    diagnosis = preflight(schooled_config())
    assert not diagnosis.findings
    assert any(line.startswith("reach: ") and "memory" in line for line in diagnosis.unchecked)
    assert "reach" not in diagnosis.sound


def test_what_a_slow_model_leaves_undecided_is_said_and_not_called_sound(monkeypatch):
    """With a time limit below the time for one group, the test gets one more look and stays undecided."""
    seconds = count(0, 1000)
    monkeypatch.setattr(doctor_subject, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    monkeypatch.setattr("keel.doctor.preflight.MEASURES", measures("collection"))
    seen = {}
    config = schooled_config("model.name=doctor.schooled:fresh_model")
    diagnosis = preflight(config, on_probe=lambda outcome, _: seen.setdefault(outcome.name, outcome))
    assert "collection" not in diagnosis.sound
    (line,) = [line for line in diagnosis.unchecked if line.startswith("output/unparseable: ")]
    assert "limit of 120 s" in line
    (finding,) = [f for f in seen["collection"].findings if f.code == "output/unparseable"]
    assert finding.severity == "warning"
    assert finding.evidence.startswith("none of ")


def test_a_judge_elsewhere_is_not_asked_for_more_where_a_test_is_in_doubt() -> None:
    asked = []

    async def always_the_same(problem: Problem, text: str) -> Reward:
        asked.append(text)
        return Reward(0.5)

    setup = build_subject(schooled_config(), reward=always_the_same)
    with closing(setup.run):
        bounded = replace(setup, budget=Budget(judgements=60))
        outcome = probe_collection(bounded)
    assert len(asked) <= 60 + len(setup.batch.completions)  # the last test judges what it has once more
    (constant,) = [finding for finding in outcome.findings if finding.code == "reward/constant"]
    assert constant.severity == "warning"
    assert "reward/constant: undecided after" in " ".join(bounded.budget.take_undecided())


def test_where_only_tokens_are_looked_at_no_reward_is_asked(setup: KeelSubject) -> None:
    before = setup.built.judge.asked.total()
    groups = setup.collect(step=7)
    assert setup.built.judge.asked.total() == before
    assert {reward.total for group in groups for reward in group.rewards} == {0.0}
    assert [c.tokens for g in setup.collect(step=7, judged=True) for c in g.completions] == [
        c.tokens for g in groups for c in g.completions
    ]
    assert setup.built.judge.asked.total() == before + len(setup.batch.completions)


def test_time_before_an_error_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = count(0, 100)
    monkeypatch.setattr(doctor_subject, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    budget = Budget()
    with pytest.raises(RuntimeError), budget.spending():
        raise RuntimeError("the reward's server is gone")
    assert budget.spent_s == 100
