"""`keel doctor --trl` on every kind of trainer: faults are named first, healthy ones are left in peace."""

import pytest

from integrations.trl_subjects import FAULTS, HEALTHY, codes, of_keel, trainer_of
from keel.integrations.trl.preflight import preflight
from keel.integrations.trl.settings import REDUCTIONS

pytestmark = pytest.mark.peers


SHAPES = {
    "several updates": {"steps_per_generation": 2, "num_iterations": 2, "gradient_accumulation_steps": 1},
    "accumulated": {"gradient_accumulation_steps": 2},
    "sequence": {"importance_sampling_level": "sequence"},
}
ONE_OF_EACH = ("grpo", "dapo", "dr_grpo")  # reductions
CASES = [(loss, shape) for shape in SHAPES for loss in (REDUCTIONS if shape == "several updates" else ONE_OF_EACH)]
OPTIONS = {  # options of different parts share a preflight
    "entropy, not divided": {"entropy_coef": 0.01, "gradient_accumulation_steps": 2, "scale_rewards": "none"},
    "chosen tokens, padded": {"top_entropy_quantile": 0.5, "pad_to_multiple_of": 8},
    "off-policy, several filters": {"off_policy_mask_threshold": 0.5, "top_p": 0.9, "top_k": 10},
    "bf16, checkpointing": {"bf16": True, "learning_rate": 0.01, "gradient_checkpointing": True},
    "fp32 head, plain k3": {"cast_lm_head_to_fp32": True, "use_bias_correction_kl": False},
    "every microbatch": {"steps_per_generation": 1, "gradient_accumulation_steps": 2},
}
KL = {
    "in the advantage": {"estimator": "k1", "placement": "advantage"},
    "of sequences": {"level": "sequence"},
    "warming up": {"controller": {"name": "warmup", "steps": 10}},
}


def test_each_reduction_has_a_loss():
    assert {REDUCTIONS[loss] for loss in ONE_OF_EACH} == set(REDUCTIONS.values())


@pytest.mark.parametrize(("loss_type", "shape"), CASES)
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
    diagnosis = preflight(HEALTHY[name](tmp_path))
    assert codes(diagnosis) == []
    assert {"collection", "masks", "scoring", "sampler", "weight sync", "update"} <= set(diagnosis.sound)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_first(name, tmp_path):
    code, faulty = FAULTS[name]
    diagnosis = preflight(faulty(tmp_path))
    assert codes(diagnosis)[:1] == [code], [(f.code, f.evidence) for f in diagnosis.findings]
    first = diagnosis.findings[0]
    assert any(character.isdigit() for character in first.evidence)
    assert first.cause
    assert first.advice
    assert diagnosis.exit_status == 1
