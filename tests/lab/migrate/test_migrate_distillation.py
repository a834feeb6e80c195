"""`keel migrate` of TRL's and verl's distillation: which divergence a file computes, and what it is here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from keel.config import load_config
from keel.lab.migrate import Migration, migrate

TRL = {
    "model_name_or_path": "a/student",
    "teacher_model_name_or_path": "a/teacher",
    "dataset_name": "a/prompts",
    "max_steps": 10,
}
VERL: dict[str, Any] = {
    "algorithm": {"adv_estimator": "grpo"},
    "data": {"train_files": "train.parquet", "train_batch_size": 256},
    "actor_rollout_ref": {"model": {"path": "a/student"}, "rollout": {"name": "hf", "n": 4}},
    "trainer": {"total_training_steps": 10},
}


def of_trl(tmp_path: Path, **options: Any) -> Migration:
    (tmp_path / "trl.yaml").write_text(yaml.safe_dump(TRL | options))
    return migrate(tmp_path / "trl.yaml")


def of_verl(tmp_path: Path, **loss: Any) -> Migration:
    distillation = {"enabled": True, "teacher_models": {"teacher_model": {"model_path": "a/teacher"}}}
    (tmp_path / "verl.yaml").write_text(
        yaml.safe_dump(VERL | {"distillation": distillation | {"distillation_loss": loss}})
    )
    return migrate(tmp_path / "verl.yaml")


def of_python(tmp_path: Path, source: str) -> Migration:
    (tmp_path / "job.py").write_text(source)
    return migrate(tmp_path / "job.py")


@pytest.mark.parametrize(
    ("beta", "estimator", "gradient"),
    [
        (0.0, "exact_reverse", "KL(ref‖policy)"),
        (0.25, "jsd", "JSD"),
        (1.0, "exact", "KL(policy‖ref)"),
        (None, "exact", "KL(policy‖ref)"),
    ],
)
def test_trls_beta_is_a_divergence(tmp_path: Path, beta: float | None, estimator: str, gradient: str) -> None:
    """TRL 1.16: 0 is the forward KL, 1, the default, the reverse KL, between them the JSD of that weight."""
    result = of_trl(tmp_path, **({} if beta is None else {"beta": beta}))
    assert result.refused is None
    assert result.computes is not None
    assert gradient in result.computes
    config = load_config(dict(result.tree))
    assert (config.kl.beta, config.kl.estimator, config.loss.policy_weight) == (1.0, estimator, 0.0)
    assert config.reference.params["model"] == "a/teacher"
    assert estimator != "jsd" or config.kl.jsd_weight == beta
    assert (config.rollout.num_generations, config.rollout.prompts_per_step) == (1, 8)


def test_beta_is_a_coefficient_without_a_teacher(tmp_path: Path) -> None:
    result = of_trl(tmp_path, teacher_model_name_or_path=None, beta=0.04, num_generations=8)
    assert result.tree["kl"]["beta"] == 1.0  # null names the trainer all the same
    (tmp_path / "grpo.yaml").write_text("model_name_or_path: a/b\nbeta: 0.04\n")
    assert migrate(tmp_path / "grpo.yaml").tree["kl"]["beta"] == 0.04
    assert load_config({"beta": 0.04}).kl.beta == 0.04


def test_gkd_has_its_own_defaults(tmp_path: Path) -> None:
    call = 'GKDTrainer(model="a/b", teacher_model="a/c", args=GKDConfig("out", {}max_steps=3), train_dataset="d")'
    result = of_python(tmp_path, call.format("lmbda=1.0, "))
    config = load_config(dict(result.tree))
    assert result.refused is None
    assert (config.kl.estimator, config.kl.jsd_weight) == ("jsd", 0.5)
    assert (config.rollout.temperature, config.rollout.max_completion_length) == (0.9, 128)
    assert (config.optim.learning_rate, config.reference.params["model"]) == (2e-5, "a/c")
    assert "at 1" in next(row.note for row in result.rows if row.name == "temperature")
    for half, name in (("", "lmbda=0.5"), ("lmbda=1.0, seq_kd=True, ", "seq_kd=true")):
        refused = of_python(tmp_path, call.format(half)).refused
        assert refused is not None
        assert refused.startswith(name)


def test_a_teacher_that_is_an_object_is_left_to_the_user(tmp_path: Path) -> None:
    call = 'DistillationTrainer("a/b", teacher, DistillationConfig("out", max_steps=3, beta=1.0), train_dataset="d")'
    result = of_python(tmp_path, call)
    row = next(row for row in result.rows if row.name == "teacher_model")
    assert row.by_hand
    assert "reference.model" in row.reason
    assert result.tree["kl"]["estimator"] == "exact"


@pytest.mark.parametrize(
    ("loss", "kl", "gradient"),
    [
        ({}, {"estimator": "k3", "gradient": "plain", "placement": "loss"}, "KL(ref‖policy)"),
        ({"loss_mode": "k2"}, {"estimator": "k2", "gradient": "plain", "placement": "loss"}, "KL(policy‖ref)"),
        ({"loss_mode": "kl", "use_policy_gradient": True}, {"estimator": "k1", "placement": "advantage"}, "policy‖ref"),
    ],
)
def test_verls_loss_mode_is_translated_as_it_is(
    tmp_path: Path, loss: dict[str, Any], kl: dict[str, Any], gradient: str
) -> None:
    """verl 0.9: the default is k3 in the loss, whose gradient is the forward KL's."""
    result = of_verl(tmp_path, distillation_loss_coef=0.3, **loss)
    assert result.refused is None
    assert result.computes is not None
    assert gradient in result.computes
    config = load_config(dict(result.tree))
    assert (config.kl.beta, config.loss.policy_weight) == (0.3, 1.0)
    assert {name: getattr(config.kl, name) for name in kl} == kl


def test_verls_coefficient_is_read_beside_rewards_alone(tmp_path: Path) -> None:
    result = of_verl(tmp_path, distillation_loss_coef=0.3, use_task_rewards=False)
    config = load_config(dict(result.tree))
    assert (config.kl.beta, config.loss.policy_weight, config.loss.baseline) == (1.0, 0.0, "none")


@pytest.mark.parametrize(
    ("loss", "names"),
    [
        ({"loss_mode": "k3", "use_policy_gradient": True}, ("k3", "advantage")),
        ({"loss_mode": "k1"}, ("k1", "zero")),
        ({"loss_mode": "forward_kl_topk"}, ("forward_kl_topk", "exact_reverse")),
    ],
)
def test_verls_wrong_pairings_are_refused(tmp_path: Path, loss: dict[str, Any], names: tuple[str, ...]) -> None:
    result = of_verl(tmp_path, **loss)
    assert result.refused is not None
    assert all(name in result.refused for name in names)
    assert result.computes is None


def test_a_penalty_beside_verls_teacher_is_left_to_the_user(tmp_path: Path) -> None:
    actor = {"use_kl_loss": True, "kl_loss_coef": 0.01}
    with_penalty = {"model": {"path": "a/student"}, "rollout": {"name": "hf", "n": 4}, "actor": actor}
    (tmp_path / "both.yaml").write_text(
        yaml.safe_dump(VERL | {"actor_rollout_ref": with_penalty, "distillation": {"enabled": True}})
    )
    refused = migrate(tmp_path / "both.yaml").refused
    assert refused is not None
    assert "use_kl_loss" in refused


def test_verls_section_that_is_off_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "off.yaml").write_text(yaml.safe_dump(VERL | {"distillation": {"enabled": False}}))
    result = migrate(tmp_path / "off.yaml")
    assert "model" not in result.tree.get("reference", {})
    assert result.tree["kl"]["beta"] == 0.0
