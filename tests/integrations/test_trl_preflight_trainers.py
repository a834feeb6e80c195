"""`keel doctor --trl` on every kind of trainer: faults are named first, healthy ones are left in peace."""

import pytest

from integrations.trl_subjects import FAULTS, HEALTHY, codes, of_keel, trainer_of
from keel.integrations.trl.preflight import preflight
from keel.integrations.trl.settings import REDUCTIONS

pytestmark = pytest.mark.peers


SHAPES = {
    "accumulated": {"gradient_accumulation_steps": 2},
    "several updates": {"steps_per_generation": 2, "num_iterations": 2, "gradient_accumulation_steps": 1},
    "sequence": {"importance_sampling_level": "sequence"},
}
OPTIONS = {
    "entropy": {"entropy_coef": 0.01, "gradient_accumulation_steps": 2},
    "chosen tokens": {"top_entropy_quantile": 0.5},
    "off-policy": {"off_policy_mask_threshold": 0.5},
    "not divided": {"scale_rewards": "none"},
    "bf16": {"bf16": True, "learning_rate": 0.01},
    "checkpointing": {"gradient_checkpointing": True},
    "several filters": {"top_p": 0.9, "top_k": 10},
    "padded": {"pad_to_multiple_of": 8},
    "fp32 head": {"cast_lm_head_to_fp32": True},
    "plain k3": {"use_bias_correction_kl": False},
    "every microbatch": {"steps_per_generation": 1, "gradient_accumulation_steps": 2},
}
KL = {
    "in the advantage": {"estimator": "k1", "placement": "advantage"},
    "of sequences": {"level": "sequence"},
    "warming up": {"controller": {"name": "warmup", "steps": 10}},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("loss_type", REDUCTIONS)
def test_every_loss_is_left_in_peace(loss_type, shape, tmp_path):
    high = {"epsilon_high": 5.0} if loss_type == "cispo" else {}
    diagnosis = preflight(trainer_of(tmp_path, loss_type=loss_type, **SHAPES[shape], **high))
    assert codes(diagnosis) == []
    assert {"masks", "scoring", "sampler", "weight sync", "reference", "kl_term", "update"} <= set(diagnosis.sound)
    assert ("accumulation" in diagnosis.sound) == (shape != "sequence")


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_left_in_peace(name, tmp_path):
    assert codes(preflight(trainer_of(tmp_path, **OPTIONS[name]))) == []


@pytest.mark.parametrize("name", KL)
def test_keels_options_are_left_in_peace(name, tmp_path):
    assert codes(preflight(of_keel(tmp_path, **KL[name]))) == []


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_trainer_is_left_in_peace(name, tmp_path):
    assert codes(preflight(HEALTHY[name](tmp_path))) == []


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_first(name, tmp_path):
    code, faulty = FAULTS[name]
    diagnosis = preflight(faulty(tmp_path))
    assert codes(diagnosis)[:1] == [code], [(f.code, f.evidence) for f in diagnosis.findings]
