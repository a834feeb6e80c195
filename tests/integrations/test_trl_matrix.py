"""With TRL's own formula chosen, Keel inside TRL is TRL, however a batch of rollouts is cut into updates."""

import pytest
from trl import GRPOTrainer

from integrations.small_trl import TRLS_OWN, build, gap, small_model, weights
from keel.integrations.trl import KeelGRPOTrainer, KeelRunCallback
from keel.integrations.trl.settings import REDUCTIONS

pytestmark = pytest.mark.peers


SHAPES = {
    "one update a batch": {},
    "accumulated": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    "minibatches": {"steps_per_generation": 2, "per_device_train_batch_size": 4},
    "minibatches, twice": {"steps_per_generation": 2, "per_device_train_batch_size": 4, "num_iterations": 2},
    "plain k3": {"use_bias_correction_kl": False, "num_iterations": 2},
    "tempered": {"temperature": 0.7, "max_grad_norm": 0.3},
}
# What a mean is taken over depends on the loss; the other options are held against one loss of two reductions.
EVERY_LOSS = ("accumulated", "minibatches, twice")
CASES = [(loss, shape) for shape in SHAPES for loss in (REDUCTIONS if shape in EVERY_LOSS else ("grpo", "dapo"))]


@pytest.mark.parametrize(("loss_type", "shape"), CASES)
def test_the_weights_are_trls(tmp_path, loss_type, shape):
    changes = {"loss_type": loss_type, "learning_rate": 0.01, **SHAPES[shape]}
    gradient = "rho" if changes.get("use_bias_correction_kl", True) else "plain"
    kl = TRLS_OWN.model_copy(update={"gradient": gradient, "allow_biased": gradient == "plain"})
    start = {name: tensor.clone() for name, tensor in small_model().state_dict().items()}
    theirs = build(GRPOTrainer, tmp_path / "trl", **changes)
    theirs.train()
    keel = {"kl": kl, "callbacks": [KeelRunCallback(report=False)]}
    ours = build(KeelGRPOTrainer, tmp_path / "keel", keel=keel, **changes)
    ours.train()
    assert gap(weights(theirs), start) > 3e-4
    assert gap(weights(theirs), weights(ours)) < 1e-6
