"""The reference's probe: what it compares, how it explains a KL at step 0, and that it leaves all as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from doctor.schooled import schooled_config, schooled_model
from keel.base.errors import KeelError
from keel.doctor.keel_subject import build_subject
from keel.doctor.measure import Outcome
from keel.doctor.probes.reference import devices, probe_reference, reference_fingerprint
from keel.doctor.probes.start import WeightDifference, compare_weights, explain_start, sums_against_means
from keel.doctor.thresholds import load_thresholds
from keel.models.fingerprint import fingerprint
from keel.models.lora import add_lora
from keel.models.options import LoraOptions

pytestmark = pytest.mark.doctor


LIMITS = load_thresholds()
LORA = "model.lora={r: 4}"


def probed(*overrides: str) -> Outcome:
    return probe_reference(build_subject(schooled_config(*overrides)))


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        [LORA],
        ["reference={kind: ema, every: 2}"],
        [LORA, "reference={kind: ema, every: 2}"],
        [LORA, "reference={kind: snapshot, every: 2}"],
        ["reference={kind: kl_triggered, threshold: 0.5}"],
        ["reference.kind=doctor.faults_reference:silently_moving"],
    ],
    ids=" ".join,
)
def test_policy_and_reference_are_afterwards_what_they_were(overrides: list[str]) -> None:
    setup = build_subject(schooled_config(*overrides))
    policy, reference, logp = fingerprint(setup.policy.model), reference_fingerprint(setup), setup.ref_logp()
    probe_reference(setup)
    assert fingerprint(setup.policy.model) == policy
    assert reference_fingerprint(setup) == reference
    torch.testing.assert_close(setup.ref_logp(), logp, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["{kind: ema, every: 3}", "{kind: snapshot, every: 3}"])
def test_moving_kinds_are_seen_to_move_at_their_step(kind: str) -> None:
    outcome = probed(f"reference={kind}")
    assert not outcome.findings
    assert outcome.figures["reference_moved_at_step"] == 3
    assert outcome.figures["reference_moved"] > 0


def test_a_frozen_reference_does_not_move() -> None:
    figures = probed().figures
    assert figures["reference_moved"] == 0.0
    assert figures["policy_moved"] > 0.01
    assert figures["kl_perturbed"] > 0.0
    assert figures["kl_at_start"] == 0.0
    assert figures["parameters_policy"] == figures["parameters_reference"] == 13_344


def test_the_base_is_no_reference_for_an_adapter_with_a_past(tmp_path: Path) -> None:
    """Its start is the adapter as it was loaded: switching it off measures from another model."""
    model, _ = schooled_model()
    adapted = add_lora(model, LoraOptions(r=4))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(0))
    adapted.save_pretrained(tmp_path)  # type: ignore[operator]
    continued = f"model.lora={{r: 4, adapter: {tmp_path}}}"
    assert not probed(continued).findings
    wrong = probed(continued, "reference.kind=doctor.faults_reference:adapter_switched_off")
    assert [finding.code for finding in wrong.findings] == ["reference/wrong"]


def test_dropout_in_the_policys_pass_explains_a_kl_at_the_start() -> None:
    torch.manual_seed(0)
    outcome = probed("model.name=doctor.faults_reference:dropout_model", "model.dropout=true")
    (finding,) = [finding for finding in outcome.findings if finding.code == "kl/at-start"]
    assert finding.cause.startswith("dropout")
    assert outcome.figures["kl_at_start"] > LIMITS["kl_at_start"]
    assert outcome.figures["kl_at_start_evaluation_mode"] == 0.0


def difference(dtypes: tuple[str, str] = ("float32", "float32")) -> WeightDifference:
    return WeightDifference(1, 1, 1, (), 0.0, dtypes)


@pytest.mark.parametrize(
    ("figures", "dtypes", "scale", "phrase"),
    [
        ((0.0, 0.0, 0.0), ("float32", "float32"), 1.0, "dropout"),
        ((1.0, 0.3, 0.0), ("float32", "float32"), 1.0, "training mode"),
        ((1.0, 0.0, 1.0), ("float32", "float32"), 1.0, "sums against means"),
        ((1.0, 0.0, 0.0), ("float32", "bfloat16"), 1.0, "bfloat16"),
        ((1.0, 0.0, 0.0), ("float32", "float32"), 2.0, "temperatures"),
        ((1.0, 0.0, 0.0), ("float32", "float32"), 1.0, "different tokens or positions"),
    ],
)
def test_the_explanation_is_the_first_hypothesis_that_fits(
    figures: tuple[float, float, float], dtypes: tuple[str, str], scale: float, phrase: str
) -> None:
    names = ("kl_at_start_evaluation_mode", "reference_repeats_to", "sums_against_means")
    measured = dict(zip(names, figures, strict=True))
    cause, advice = explain_start(measured, 1e-3, difference(dtypes), False, scale, schooled_config())
    assert phrase in cause
    assert advice


def test_sums_against_means_by_hand() -> None:
    mask = torch.tensor([[True, True, False], [True, True, True]])
    mean = torch.tensor([[-1.0, -1.0, 0.0], [-2.0, -2.0, -2.0]])
    total = torch.tensor([[-2.0, -2.0, 0.0], [-6.0, -6.0, -6.0]])
    assert sums_against_means(mean, total, mask)
    assert sums_against_means(total, mean, mask)
    assert not sums_against_means(mean, mean, mask)


def test_a_scorer_that_sums_in_one_pass_and_not_in_the_other_is_explained() -> None:
    outcome = probed("model.scorer=doctor.faults_reference:sums_in_one_pass")
    assert [finding.code for finding in outcome.findings] == ["kl/at-start"]
    assert outcome.findings[0].cause.startswith("sums against means")


def test_weights_are_compared_by_name_shape_and_value() -> None:
    mine = {"a": torch.ones(2), "b": torch.zeros(3)}
    assert compare_weights(mine, dict(mine)).same
    other = compare_weights(mine, {"a": torch.ones(2), "b": torch.tensor([0.0, 0.0, 0.5])})
    assert other.differing == ("b",)
    assert other.largest == 0.5
    assert compare_weights(mine, {"a": torch.ones(2)}).differing == ("b",)
    assert not compare_weights(mine, {"c": torch.ones(2)}).same
    adapted = {**mine, "layer.lora_A.*.weight": torch.ones(1)}
    assert compare_weights(adapted, mine).same
    assert not compare_weights(adapted, mine, fresh=False).same


def test_devices_are_counted() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, device="meta"))
    assert devices(model) == {"cpu": 9, "meta": 4}


def test_a_part_left_on_another_device_is_found_before_anything_is_scored() -> None:
    outcome = probed("reference.kind=doctor.faults_reference:left_on_another_device")
    assert [finding.code for finding in outcome.findings] == ["device/placement"]
    assert "meta" in outcome.findings[0].evidence


def test_without_a_reference_the_probe_says_so() -> None:
    outcome = probed("kl.beta=0", "kl.measure_every=0")
    assert not outcome.findings
    assert outcome.unchecked


def test_an_unproven_estimator_is_refused_until_it_is_allowed() -> None:
    with pytest.raises(KeelError, match="allow_biased"):
        schooled_config("kl.estimator=doctor.faults_reference:reversed_k3")
    with pytest.raises(KeelError, match="cannot import"):
        schooled_config("kl.estimator=doctor.faults_reference:no_such_thing")
