"""Two processes under accelerate (gloo): TRL's weights, one KL, one run directory, one mind about guards."""

import json
import math

import pytest
import torch

from integrations.small_trl import TRLS_OWN, build, gap, keel_trainer, lines, lora, scripted, weights
from keel.kl import KLOptions
from keel.trainer.options import GuardOptions
from ranks import run_ranks

pytestmark = pytest.mark.peers


SHAPE = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_iterations": 2}


def compare(folder, loss_type):
    from trl import GRPOTrainer

    from keel.integrations.trl import KeelGRPOTrainer

    theirs = build(GRPOTrainer, folder / "trl", loss_type=loss_type, **SHAPE)
    theirs.train()
    ours = build(KeelGRPOTrainer, folder / "keel", loss_type=loss_type, keel={"kl": TRLS_OWN}, **SHAPE)
    ours.train()
    assert theirs.accelerator.num_processes == 2
    assert gap(weights(theirs), weights(ours)) < 1e-6
    assert theirs.state.log_history[0]["reward"] == ours.state.log_history[0]["reward"]


EXACT = KLOptions(beta=0.3, estimator="exact", controller={"name": "step", "target": 1e-3})


def exactly(folder, rows):
    """The same completions whoever samples, so that processes can be held against one; the KL steers β."""
    changes = {"per_device_train_batch_size": rows, "learning_rate": 0.1, "max_grad_norm": 0.5, "loss_type": "grpo"}
    trainer = keel_trainer(folder, EXACT, more={"rollout_func": scripted}, **changes)
    trainer.train()
    if trainer.accelerator.process_index == 0:
        torch.save(weights(trainer), folder / "weights.pt")


def steered(folder):
    """A controller, a moving reference, a NaN on one rank alone, and a stop that both ranks make; then an adapter."""
    from keel.integrations.trl import KeelGRPOTrainer
    from keel.reference.options import ReferenceOptions

    class Poisoned(KeelGRPOTrainer):
        def _compute_loss(self, model, inputs):
            broken = self.state.global_step >= 2 and self.accelerator.process_index == 1
            bad = {"advantages": inputs["advantages"] * math.nan} if broken else {}
            return super()._compute_loss(model, {**inputs, **bad})

    kl = KLOptions(beta=0.1, estimator="exact", controller={"name": "step", "target": 1e-4})
    keel = {
        "kl": kl,
        "guards": GuardOptions(max_consecutive_nans=2),
        "reference": ReferenceOptions(kind="ema", alpha=0.5, every=1),
    }
    saves = {"save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 4}
    trainer = build(Poisoned, folder / "steered", beta=0.0, keel=keel, max_steps=6, **saves)
    trainer.train()
    state = trainer.keel_state
    print(json.dumps({"steps": state.step, "beta": state.beta, "stopped": trainer.keel_stopped}))
    torch.save(weights(trainer), folder / f"rank-{trainer.accelerator.process_index}.pt")

    keel = {"kl": KLOptions(beta=0.1), "peft_config": lora(), "reference": {"kind": "snapshot", "every": 2}}
    shape = {"learning_rate": 2.0, "per_device_train_batch_size": 4}
    build(KeelGRPOTrainer, folder / "lora", beta=0.0, keel=keel, max_steps=4, **shape).train()


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo"])  # one of each reduction; test_trl_matrix has all
def test_weights_after_several_steps_are_trls(tmp_path, loss_type):
    for ended in run_ranks(compare, tmp_path, loss_type):
        assert ended.status == 0, ended.err[-3000:]
    log = lines(tmp_path / "keel")
    assert [line["step"] for line in log] == [1, 2, 3, 4]
    assert log[0]["kl/policy_ref/k3/mean"] == 0.0
    assert log[-1]["kl/policy_ref/k3/mean"] > 0


def test_the_exact_kl_and_beta_are_those_of_one_process(tmp_path):
    """Rows 1 to 4 and 5 to 8 on two processes: weights, KL with its standard error, and β of one with all eight."""
    for ended in run_ranks(exactly, tmp_path / "two", 4):
        assert ended.status == 0, ended.err[-3000:]
    exactly(tmp_path / "one", 8)
    one, two = (torch.load(tmp_path / name / "weights.pt") for name in ("one", "two"))
    assert gap(one, two) < 1e-6
    names = ("kl/policy_ref/exact/mean", "kl/policy_ref/exact/se", "kl/policy_ref/k3/mean", "loss/kl", "kl/beta")
    for first, second in zip(lines(tmp_path / "one"), lines(tmp_path / "two"), strict=True):
        assert [first[name] for name in names] == pytest.approx([second[name] for name in names], abs=1e-6)
    last = lines(tmp_path / "two")[-1]
    assert last["kl/policy_ref/exact/mean"] > 1e-3
    assert last["kl/beta"] > 0.3


def test_both_processes_decide_alike(tmp_path):
    ended = run_ranks(steered, tmp_path)
    for rank in ended:
        assert rank.status == 0, rank.err[-3000:]
    outcomes = [json.loads(line) for rank in ended for line in rank.out.splitlines() if line.startswith('{"steps"')]
    assert outcomes[0] == outcomes[1]
    assert outcomes[0]["steps"] == 4
    assert "checkpoint-1" in outcomes[0]["stopped"]
    first, second = (torch.load(tmp_path / f"rank-{rank}.pt") for rank in (0, 1))
    assert gap(first, second) == 0
    record = json.loads((tmp_path / "steered" / "skipped" / "step-3.json").read_text())
    assert len(record["completions"]) == 8
    assert record["first_nonfinite"] == "advantage"
    moved = [line["kl/policy_ref/k2/mean"] > 1e-8 for line in lines(tmp_path / "lora")]
    assert moved == [False, True, False, True]
