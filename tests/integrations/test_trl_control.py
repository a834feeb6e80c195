"""β by Keel's controllers inside TRL, and the KL that is measured without one."""

import pytest

from integrations.small_trl import keel_trainer, lines
from keel.kl import KLOptions, controller_from_options


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
