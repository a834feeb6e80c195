"""Each fault of reference, KL term, advantage and update is the first thing that the preflight names."""

from __future__ import annotations

import pytest

from doctor.followed import check_named_first, repeated

pytestmark = pytest.mark.doctor


HERE = "doctor.faults_reference"
LORA = "model.lora={r: 4}"

FAULTS = {
    "a reference of another checkpoint": ("reference/wrong", [f"reference.kind={HERE}:other_checkpoint"]),
    "a reference a few steps off": ("reference/wrong", [f"reference.kind={HERE}:nearly_the_checkpoint"]),
    "a reference of another size": ("reference/wrong", [f"reference.kind={HERE}:another_size"]),
    "an adapter that is not disabled": ("reference/adapter-on", [LORA, f"reference.kind={HERE}:adapter_still_on"]),
    "a reference that is the policy": ("reference/moving", [f"reference.kind={HERE}:shared_weights"]),
    "a reference silently moving": ("reference/moving", [f"reference.kind={HERE}:silently_moving"]),
    "a reference slowly moving": ("reference/moving", [f"reference.kind={HERE}:slowly_moving"]),
    "a reference moving when scored": ("reference/moving", [f"reference.kind={HERE}:moving_when_scored"]),
    "a snapshot that never moves": ("reference/moving", [f"reference.kind={HERE}:never_moving_snapshot"]),
    "dropout in the reference's pass": ("kl/at-start", [f"reference.kind={HERE}:dropout_in_the_reference"]),
    "another temperature": ("kl/at-start", [f"reference.kind={HERE}:reference_at_another_temperature"]),
    "reversed k3": ("kl/reversed", ["kl.allow_biased=true", f"kl.estimator={HERE}:reversed_k3"]),
    "a penalty with its sign flipped": (
        "kl/reversed",
        ["kl.allow_biased=true", f"kl.estimator={HERE}:sign_flipped_k2"],
    ),
    "k3 in the reward": ("kl/reversed", ["kl.allow_biased=true", "kl.estimator=k3", "kl.placement=reward"]),
    "k1 in the loss": ("kl/no-gradient", ["kl.allow_biased=true", "kl.estimator=k1", "kl.gradient=plain"]),
    "a term without its graph": ("kl/no-gradient", ["kl.allow_biased=true", f"kl.estimator={HERE}:detached_k2"]),
    "twice the size": ("kl/scale", ["kl.allow_biased=true", f"kl.estimator={HERE}:doubled_k2"]),
    "std of hardly any spread": ("advantage/amplified", [f"rewards=[{{name: {HERE}:hardly_differing}}]"]),
    "a learning rate a hundred times too high": ("optim/lr-too-high", ["optim.learning_rate=0.01"]),
    "the same under LoRA": ("optim/lr-too-high", [LORA, "optim.learning_rate=0.03"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_is_named_first(fault: str) -> None:
    diagnosis = check_named_first(*FAULTS[fault], whole=not repeated(FAULTS, fault))
    assert not [line for line in diagnosis.unchecked if "Error" in line]
