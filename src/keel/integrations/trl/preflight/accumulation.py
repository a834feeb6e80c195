"""Check gradient accumulation: compare a batch in one microbatch with the same batch in several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import split_tensor_dict

from keel.doctor.findings import finding
from keel.doctor.thresholds import Thresholds
from keel.doctor.verdict import Outcome
from keel.integrations.trl.preflight.batch import Subject
from keel.integrations.trl.preflight.subject import patched


def probe_accumulation(subject: Subject, thresholds: Thresholds) -> Outcome:
    """Gradients of `training_step`, which is what an update sums: in parts they must be those of the whole.

    bnpo and the entropy bonus are means over each microbatch, so that only the division by their number is promised.
    """
    trainer = subject.trainer
    args = trainer.args
    rows = len(subject.batch["completion_ids"])
    parts = args.steps_per_generation if args.steps_per_generation > 1 else args.gradient_accumulation_steps
    if parts == 1 or not subject.weights:
        why = "one microbatch an update" if parts == 1 else "no weight is trainable"
        return Outcome("accumulation", unchecked=(f"loss/scale: {why}",))
    if subject.noisy:
        return Outcome("accumulation", unchecked=("loss/scale: two passes over the same tokens differ",))
    if rows % parts:
        return Outcome("accumulation", unchecked=(f"loss/scale: {rows} completions do not split into {parts}",))
    with subject.perturbed():  # at the start the KL term has no gradient
        batch = subject.rescored() | {"advantages": subject.advantages}
        micros = split_tensor_dict(batch, parts)
        summed = _gradient(subject, micros, parts)
        local = args.loss_type == "bnpo" or trainer._entropy_bonus_enabled or trainer.aux_loss_enabled
        expected = _gradient(subject, micros, 1, generated=parts) / parts if local else _gradient(subject, [batch], 1)
    size = float(expected.norm())
    if size == 0:
        return Outcome("accumulation", unchecked=("loss/scale: the batch has no gradient",))
    error = float((summed - expected).norm()) / size
    factor = float(summed @ expected) / size**2
    figures = {"error": error, "factor": factor, "parts": float(parts)}
    line = f"accumulation: {parts} microbatches give {factor:.4g} times the gradient of one, {100 * error:.2g} % apart"
    if error <= thresholds["gradient_error_half" if subject.half else "gradient_error"]:
        return Outcome("accumulation", (), figures, (line,))
    wrong = finding(
        "loss/scale",
        f"{parts} microbatches give {factor:.3g} times the gradient of all rows in one, {100 * error:.0f} % apart",
        f"the loss is not divided as loss_type={args.loss_type} says: by its own microbatch, twice, or not at all",
        "divide by current_gradient_accumulation_steps (or num_items_in_batch) once; loss_is_scaled_for_ga stays True",
    )
    return Outcome("accumulation", (wrong,), figures, (line,))


def _gradient(subject: Subject, micros: list[dict[str, Any]], accumulated: int, generated: int | None = None) -> Tensor:
    """The gradient that `training_step` sums over microbatches, as one vector."""
    trainer, weights = subject.trainer, subject.weights
    for weight in weights:
        weight.grad = None
    steps = trainer.args.steps_per_generation

    def as_it_is(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
        return inputs

    try:
        trainer.args.steps_per_generation = len(micros) if generated is None else generated
        with patched(trainer, current_gradient_accumulation_steps=accumulated, _prepare_inputs=as_it_is):
            for micro in micros:
                trainer.training_step(trainer.model, micro, None)
        return torch.cat([(torch.zeros_like(w) if w.grad is None else w.grad).double().flatten() for w in weights])
    finally:
        trainer.args.steps_per_generation = steps
        for weight in weights:
            weight.grad = None


__all__ = ["probe_accumulation"]
