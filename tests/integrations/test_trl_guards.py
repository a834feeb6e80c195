"""Updates that are skipped inside TRL, and runs that are stopped: NaNs, spikes, constant rewards, KL budgets."""

import json
import math

import pytest
import torch
from trl import GRPOTrainer

from integrations.small_trl import build, gap, keel_trainer, lines, weights
from keel.integrations.trl import KeelGRPOTrainer
from keel.kl import KLOptions
from keel.trainer.options import GuardOptions


def with_nan_at(step, cls):
    class Poisoned(cls):
        def _compute_loss(self, model, inputs):
            bad = {"advantages": inputs["advantages"] * math.nan} if self.state.global_step == step - 1 else {}
            return super()._compute_loss(model, {**inputs, **bad})

    return Poisoned


def test_a_nan_poisons_trl_and_not_keel(tmp_path):
    theirs = build(with_nan_at(3, GRPOTrainer), tmp_path / "trl", max_steps=3)
    theirs.train()
    assert not all(tensor.isfinite().all() for tensor in weights(theirs).values())

    ours = keel_trainer(
        tmp_path / "keel",
        cls=with_nan_at(3, KeelGRPOTrainer),
        max_steps=4,
        lr_scheduler_type="linear",
        optim="adamw_torch",
    )
    ours.train()
    assert ours.state.global_step == 4
    assert all(tensor.isfinite().all() for tensor in weights(ours).values())
    log = lines(tmp_path / "keel")
    assert [line["guard/skipped"] for line in log] == [0, 0, 1, 0]
    rates = [line["optim/learning_rate"] for line in log]
    assert rates[3] == rates[2] < rates[1]  # the schedule waits for an update that is made
    (skip,) = [event for event in lines(tmp_path / "keel", "events.jsonl") if event["kind"] == "guard/skipped"]
    record = json.loads((tmp_path / "keel" / skip["batch"]).read_text())
    assert skip["nonfinite"] == record["first_nonfinite"] == "advantage"
    assert len(record["completions"]) == 8
    assert all(len(row["logp"]) == len(row["tokens"]) > 0 for row in record["completions"])


def test_a_skipped_update_changes_no_weight(tmp_path):
    poisoned = keel_trainer(
        tmp_path / "keel", cls=with_nan_at(2, KeelGRPOTrainer), max_steps=2, optim="adamw_torch", weight_decay=0.1
    )
    poisoned.train()
    short = keel_trainer(tmp_path / "short", max_steps=1, optim="adamw_torch", weight_decay=0.1)
    short.train()
    assert gap(weights(poisoned), weights(short)) == 0


def test_nans_in_a_row_stop_the_run(tmp_path):
    class Broken(KeelGRPOTrainer):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs) * math.inf

    trainer = keel_trainer(tmp_path, cls=Broken, max_steps=5, more={"guards": GuardOptions(max_consecutive_nans=2)})
    trainer.train()
    assert trainer.state.global_step == 2
    assert "2 steps in a row" in trainer.keel_stopped


def test_a_spike_is_skipped(tmp_path):
    class Spiking(KeelGRPOTrainer):
        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            return loss * 1e4 if self.state.global_step == 11 else loss

    more = {"guards": GuardOptions(on_spike="skip")}
    trainer = keel_trainer(tmp_path, cls=Spiking, max_steps=12, max_completion_length=2, learning_rate=1e-3, more=more)
    trainer.train()
    log = lines(tmp_path)
    assert [line["guard/skipped"] for line in log] == [0] * 11 + [1]
    assert log[-1]["guard/spike"] == 1
    assert log[-1]["guard/nonfinite"] == 0
    kinds = [event["kind"] for event in lines(tmp_path, "events.jsonl")]
    assert "guard/spike" in kinds
    assert (tmp_path / "skipped" / "step-12.json").is_file()


def test_rewards_that_are_all_alike_are_said_once(tmp_path):
    """Two updates a batch: the third batch is the first of step 5."""
    more = {"guards": GuardOptions(constant_steps=3)}
    keel_trainer(
        tmp_path, more=more, num_iterations=2, max_steps=6, reward=lambda completions, **_: [1.0] * len(completions)
    ).train()
    steps = [event["step"] for event in lines(tmp_path, "events.jsonl") if event["kind"] == "reward/constant"]
    assert steps == [5]


def test_a_budget_stops_at_the_last_good_checkpoint(tmp_path, capsys):
    """The numbers of step 3 are those of the weights after update 2: checkpoint 1 is the last that was seen fine."""

    class Drifting(KeelGRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            output["ref_per_token_logps"] -= self.state.global_step  # a nat further away every step
            return output

    def run(out, most, **changes):
        kl = KLOptions(beta=1e-3, budget={"max": most, "unit": "per_sequence"})
        return keel_trainer(
            out, kl, cls=Drifting, save_strategy="steps", save_steps=1, max_completion_length=2, **changes
        )

    held = run(tmp_path, 3.0)
    held.train()
    assert held.state.global_step == 3
    assert [line["guard/over_budget"] for line in lines(tmp_path)] == [0, 0, 1]
    good = str(tmp_path / "checkpoint-1")
    assert f"trainer.train(resume_from_checkpoint={good!r})" in capsys.readouterr().out
    assert not (tmp_path / "checkpoint-3").exists()
    (stop,) = [event for event in lines(tmp_path, "events.jsonl") if event["kind"] == "stop"]
    assert stop["code"] == "kl/over-budget"
    saved = run(tmp_path / "other", 3.0)
    saved._load_from_checkpoint(good)
    assert gap(weights(held), weights(saved)) == 0

    further = run(tmp_path, 100.0)
    further.train(resume_from_checkpoint=good)
    assert further.keel_stopped is None
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]
    assert len(lines(tmp_path / "abandoned" / "attempt-0")) == 2


def test_what_a_budget_has_stopped_is_not_saved_at_the_end_of_the_epoch(tmp_path):
    kl = KLOptions(beta=0.1, budget={"max": 1e-9})
    trainer = keel_trainer(tmp_path, kl, save_strategy="epoch")
    trainer.train()
    assert trainer.keel_stopped is not None
    assert not list(tmp_path.glob("checkpoint-*"))
    assert "checkpoint" not in [event["kind"] for event in lines(tmp_path, "events.jsonl")]


def test_a_budget_that_breaks_before_the_first_checkpoint(tmp_path):
    kl = KLOptions(beta=0.1, budget={"max": 1e-9})
    trainer = keel_trainer(tmp_path, kl)
    trainer.train()
    assert trainer.state.global_step == 2
    assert "to go back to: set save_strategy='steps' and save_steps" in trainer.keel_stopped


@pytest.mark.parametrize("action", ["stop", "warn"])
def test_a_reference_that_is_not_the_start_is_seen_at_the_first_update(tmp_path, action):
    trainer = keel_trainer(tmp_path, max_steps=2, more={"guards": {"on_step0_kl": action}})
    with trainer.keel_reference.model() as reference, torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    trainer.train()
    assert trainer.state.global_step == (1 if action == "stop" else 2)
    assert (trainer.keel_stopped is not None) == (action == "stop")
    (event,) = [e for e in lines(tmp_path, "events.jsonl") if e["kind"] == "kl/at-start"]
    for part in ("kl/policy_ref/k3/mean", "keel doctor --trl", "on_step0_kl"):
        assert part in event["message"]


def test_a_policy_that_was_trained_since_its_reference_was_made_is_not_at_its_start(tmp_path):
    trainer = keel_trainer(tmp_path / "first", max_steps=3, save_strategy="steps", save_steps=2)
    trainer.train()
    saved = next((tmp_path / "first").rglob("checkpoint-2"))
    assert trainer.keel_stopped is None
    trainer.keel_run.if_exists = "replace"
    trainer.train()
    assert trainer.keel_stopped is None
    (saved / "keel.json").unlink()  # as TRL itself saves one
    other = keel_trainer(tmp_path / "other", max_steps=4)
    other.train(resume_from_checkpoint=str(saved))
    assert (other.keel_stopped, other.state.global_step) == (None, 4)
