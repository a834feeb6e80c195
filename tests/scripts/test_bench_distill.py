"""bench/distill.py: every arm has a prediction, and a short study tells a right form from one without a gradient."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import distill
from keel.config import text
from keel.lab.studies.results import jobs
from keel.models.tiny import tiny_model
from keel.run.train import run_training


def test_every_arm_was_predicted() -> None:
    arms = [point["name"] for point in text.read(distill.STUDY)["points"]]
    assert set(distill.PREDICTIONS) == {*arms, distill.SFT}
    assert {prediction.outcome for prediction in distill.PREDICTIONS.values()} <= {"near", "still", "away"}


def test_the_wrong_forms_by_hand() -> None:
    d = torch.tensor([-1.0, 0.0, 2.0, 5.0])
    assert distill.clamped_k3(d).tolist() == pytest.approx([0.36788, 0.0, 4.38906, 10.0], abs=1e-5)
    assert distill.one(d).tolist() == [1.0] * 4


@pytest.mark.slow
def test_the_exact_form_approaches_the_teacher_and_k1_in_the_loss_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two random models, the teacher's logits six times as large."""
    student, teacher = tmp_path / "student", tmp_path / "teacher"
    for seed, folder in enumerate((student, teacher)):
        model, tokenizer = tiny_model(seed)
        with torch.no_grad():
            model.model.norm.weight.mul_(1 + 5 * seed)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv(distill.TEACHER, "")
    monkeypatch.syspath_prepend(str(distill.HERE))
    monkeypatch.setattr(distill, "PROMPTS", 16)
    arms = ["exact reverse KL", "k1 in the loss"]
    sizes = ["run.max_steps=20", "rollout.prompts_per_step=8", "optim.learning_rate=1e-3", "eval.samples=4"]
    study = distill.study_of(student, teacher, 1, arms, [*sizes, "eval.every=0", "checkpoint.every=20"])
    start = distill.kl_between(student, teacher)["kl_student_teacher"]
    exact, k1 = (
        distill.kl_between(run_training(job.config).directory, teacher)["kl_student_teacher"]
        for job in jobs(tmp_path / "study", study)
    )
    assert exact < 0.5 * start
    assert k1 > 0.9 * start
