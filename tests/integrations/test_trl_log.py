"""What stands in TRL's log of Keel's metrics: over the batches of an evaluation, and over several steps."""

from __future__ import annotations

import math

import pytest
from datasets import Dataset

from integrations.small_trl import keel_trainer, lines
from keel.integrations.trl.steps import over_steps
from keel.integrations.trl.window import Pass
from keel.kl import KLOptions, controller_from_options


def trainer_of(out, **changes):
    rows = Dataset.from_dict({"prompt": [f"w{number} w3" for number in range(6)]})
    shape = {"max_completion_length": 3, "learning_rate": 0.1, "per_device_eval_batch_size": 4}
    return keel_trainer(out, more={"eval_dataset": rows}, **{**shape, **changes})


def test_an_evaluation_is_measured_as_one(tmp_path, monkeypatch):
    """The standard error of all rows together, not a mean of those of its batches; losses are the batches' mean."""
    passes = []

    def keep(*args):
        passes.append(Pass(*args))
        return passes[-1]

    trainer = trainer_of(tmp_path, max_steps=2)
    trainer.train()
    monkeypatch.setattr("keel.integrations.trl.trainer.Pass", keep)
    trainer.evaluate()
    assert len(passes) == 6
    logp = [row[mask] for part in passes for row, mask in zip(part.scores.logp, part.batch.action_mask, strict=True)]
    ref = [row[mask] for part in passes for row, mask in zip(part.batch.ref_logp, part.batch.action_mask, strict=True)]
    d = [[(b - a).item() for a, b in zip(x, y, strict=True)] for x, y in zip(logp, ref, strict=True)]
    k3 = [[math.expm1(value) - value for value in row] for row in d]
    count, rows = sum(map(len, k3)), len(k3)
    mean = sum(map(sum, k3)) / count
    by_row = sum(sum(value - mean for value in row) ** 2 for row in k3)
    log = trainer.state.log_history[-1]
    assert log["eval_kl/policy_ref/k3/mean"] == pytest.approx(mean, rel=1e-5)
    assert log["eval_kl/policy_ref/k3/se"] == pytest.approx(math.sqrt(rows / (rows - 1) * by_row) / count, rel=1e-4)
    assert log["eval_kl/policy_ref/k3/max"] == pytest.approx(max(map(max, k3)), rel=1e-5)
    losses = [float(part.policy_loss + part.kl_loss) for part in passes]
    assert log["eval_loss/total"] == pytest.approx(sum(losses) / 6, abs=1e-6)
    assert trainer._evaluated == []


def test_an_evaluation_leaves_training_as_it_is(tmp_path):
    timed = ("time/", "speed/", "memory/")

    def run(out, **changes):
        trainer_of(out, max_steps=3, **changes).train()
        return [{key: line[key] for key in line if not key.startswith(timed)} for line in lines(out)[:1]]

    assert run(tmp_path / "a", eval_strategy="steps", eval_steps=1) == run(tmp_path / "b")


def test_a_log_over_several_steps_has_the_standard_error_of_their_mean(tmp_path):
    trainer = trainer_of(tmp_path, max_steps=4, logging_steps=4)
    trainer.train()
    steps = lines(tmp_path)
    log = next(entry for entry in trainer.state.log_history if "loss" in entry)
    k3 = {part: [line[f"kl/policy_ref/k3/{part}"] for line in steps] for part in ("mean", "se", "min", "max")}
    assert log["kl/policy_ref/k3/mean"] == pytest.approx(sum(k3["mean"]) / 4)
    assert log["kl/policy_ref/k3/se"] == pytest.approx(math.sqrt(sum(se**2 for se in k3["se"])) / 4)
    assert log["kl/policy_ref/k3/max"] == max(k3["max"])
    assert log["kl/policy_ref/k3/min"] == min(k3["min"])
    assert log["reward"] == pytest.approx(sum(line["reward/mean"] for line in steps) / 4)


def test_over_steps():
    assert over_steps("kl/policy_ref/k3/se", [3.0, 4.0]) == 2.5
    assert over_steps("logp/sampler_gap_max", [1.0, 3.0, math.nan]) == 3.0
    assert over_steps("kl/policy_ref/k1/min", [1.0, 3.0]) == 1.0
    assert over_steps("kl/policy_ref/k3/mean", [1.0, 3.0]) == 2.0
    assert math.isnan(over_steps("kl/policy_ref/k3/mean", [math.nan]))


@pytest.mark.parametrize(
    "controller",
    [
        {"name": "step", "target": 0.01},
        {"name": "ziegler", "target": 0.05, "horizon": 100},
        {"name": "warmup", "steps": 3},
    ],
    ids=lambda controller: controller["name"],
)
def test_beta_is_what_keels_controller_makes_of_the_measured_kl(tmp_path, controller):
    kl = KLOptions(beta=0.2, controller=controller)
    keel_trainer(tmp_path, kl, learning_rate=0.1, gradient_accumulation_steps=2, per_device_train_batch_size=4).train()
    by_hand = controller_from_options(kl, episodes_per_step=8)
    state, name = by_hand.init(), "sequence" if by_hand.unit == "per_sequence" else "k3"
    for line in lines(tmp_path):
        assert line["kl/beta"] == pytest.approx(state.beta)
        state = by_hand.update(state, line[f"kl/policy_ref/{name}/mean"])
    assert len({line["kl/beta"] for line in lines(tmp_path)}) > 2


def test_the_kl_is_measured_without_a_penalty(tmp_path):
    keel_trainer(tmp_path, KLOptions(beta=0.0, measure_every=2), learning_rate=0.1).train()
    measured = [line.get("kl/policy_ref/k3/mean") for line in lines(tmp_path)]
    assert measured[1] is measured[3] is None
    assert measured[0] == 0.0
    assert measured[2] > 0
    assert all(line["kl/policy_ref/k3/se"] >= 0 for line in lines(tmp_path)[::2])
