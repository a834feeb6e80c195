"""Each fault of the reference, the KL term, advantages and updates is the preflight's first finding."""

from __future__ import annotations

import pytest

from doctor.followed import check_named_first, repeated

pytestmark = pytest.mark.doctor


HERE = "doctor.faults_reference"
LORA = "model.lora={r: 4}"

FAULTS = {
    "a reference a few steps off": ("reference/wrong", [f"reference.kind={HERE}:nearly_the_checkpoint"]),
    "dropout in the reference's pass": ("kl/at-start", [f"reference.kind={HERE}:dropout_in_the_reference"]),
    "k3 in the reward": ("kl/reversed", ["kl.allow_biased=true", "kl.estimator=k3", "kl.placement=reward"]),
    "k1 in the loss": ("kl/no-gradient", ["kl.allow_biased=true", "kl.estimator=k1", "kl.gradient=plain"]),
    "std of hardly any spread": ("advantage/amplified", [f"rewards=[{{name: {HERE}:hardly_differing}}]"]),
    "a learning rate a hundred times too high": ("optim/lr-too-high", ["optim.learning_rate=0.01"]),
    "the same under LoRA": ("optim/lr-too-high", [LORA, "optim.learning_rate=0.03"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_is_named_first(fault: str) -> None:
    diagnosis = check_named_first(*FAULTS[fault], whole=not repeated(FAULTS, fault))
    assert not [line for line in diagnosis.unchecked if "Error" in line]
