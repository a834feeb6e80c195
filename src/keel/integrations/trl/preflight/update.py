"""Check the update: gradients summed over microbatches, one step of the optimizer, and a checkpoint."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import split_tensor_dict

from keel.doctor.findings import Finding, finding
from keel.doctor.verdict import Outcome
from keel.integrations.trl.preflight.subject import TrlSubject
from keel.integrations.trl.preflight.trainer import patched
from keel.integrations.trl.rundir import load_state, save_state
from keel.kl import k3
from keel.models.fingerprint import fingerprint
from keel.models.head import is_lora
from keel.reference.weights import unwrap


def measure_accumulation(subject: TrlSubject) -> Outcome:
    """Gradients of `training_step`, which is what an update sums: in parts they must be those of the whole.

    bnpo and the entropy bonus are means over each microbatch, so that only the division by their number is promised.
    """
    trainer, args = subject.trainer, subject.trainer.args
    rows = len(subject.groups)
    parts = args.steps_per_generation if args.steps_per_generation > 1 else args.gradient_accumulation_steps
    if parts == 1 or rows % parts:
        why = "one microbatch an update" if parts == 1 else f"{rows} completions do not split into {parts}"
        return Outcome("accumulation", unchecked=(f"loss/scale: {why}",))
    with subject.perturbed():  # at the start the KL term has no gradient
        batch = subject.rescored() | {"advantages": subject.advantages}
        micros = split_tensor_dict(batch, parts)
        summed = _gradient(subject, micros, parts, parts)
        local = args.loss_type == "bnpo" or trainer._entropy_bonus_enabled or trainer.aux_loss_enabled
        whole = _gradient(subject, micros, 1, parts) / parts if local else _gradient(subject, [batch], 1, 1)
    size = float(whole.norm())
    if size == 0:
        return Outcome("accumulation", unchecked=("loss/scale: the batch has no gradient",))
    error, factor = float((summed - whole).norm()) / size, float(summed @ whole) / size**2
    figures = {"error": error, "factor": factor, "parts": float(parts)}
    line = f"accumulation: {parts} microbatches give {factor:.4g} times the gradient of one, {100 * error:.2g} % apart"
    if error <= subject.thresholds["gradient_error_half" if subject.in_half_precision else "gradient_error"]:
        return Outcome("accumulation", (), figures, (line,))
    wrong = finding(
        "loss/scale",
        f"{parts} microbatches give {factor:.3g} times the gradient of all rows in one, {100 * error:.0f} % apart",
        f"the loss is not divided as loss_type={args.loss_type} says: by its own microbatch, twice, or not at all",
        "divide by current_gradient_accumulation_steps (or num_items_in_batch) once; loss_is_scaled_for_ga stays True",
    )
    return Outcome("accumulation", (wrong,), figures, (line,))


def _gradient(subject: TrlSubject, micros: list[dict[str, Any]], accumulated: int, generated: int) -> Tensor:
    """The gradient that `training_step` sums over microbatches, as one vector."""
    trainer, weights = subject.trainer, subject.weights
    passes = patched(trainer, current_gradient_accumulation_steps=accumulated, _prepare_inputs=lambda inputs: inputs)
    try:
        with passes, patched(trainer.args, steps_per_generation=generated):
            for micro in micros:
                trainer.training_step(trainer.model, micro, None)
        return torch.cat([(torch.zeros_like(w) if w.grad is None else w.grad).double().flatten() for w in weights])
    finally:
        trainer.model.zero_grad()


def measure_update(subject: TrlSubject) -> Outcome:
    """Trainable weights, the optimizer's own list of them, and one step at the full rate. Inside `untouched`."""
    trainer, weights, every = subject.trainer, subject.weights, list(subject.trainer.model.parameters())
    own = {id(weight) for weight in weights}
    for weight in every:  # the state in which training would build its optimizer
        weight.requires_grad_(id(weight) in own)
    if weights and trainer.optimizer is None:
        trainer.create_optimizer()
    held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]} if weights else set[int]()
    figures = {
        "trainable": float(sum(w.numel() for w in weights)),
        "weights": float(sum(w.numel() for w in every)),
        "not_held": float(sum(w.numel() for w in weights if id(w) not in held)),
    }
    if figures["not_held"] == figures["trainable"]:
        return Outcome("update", (_not_held(subject, figures),), figures)
    findings = [_not_held(subject, figures)] if figures["not_held"] else []
    before, prints = subject.forward_logp(), fingerprint(unwrap(trainer.model))
    figures["gradient_norm"] = norm = _step(subject)
    if not math.isfinite(norm):
        broken = finding(
            "optim/non-finite",
            f"the gradient norm of the first batch is {norm}",
            "TRL in fp32 and bf16 applies such an update, and every weight is NaN after it",
            "find what is not finite first (rewards, log-probabilities, loss); KeelGRPOTrainer skips such updates",
        )
        return Outcome("update", (*findings, broken), figures)
    moved = (subject.forward_logp() - before)[subject.sampled].double()
    figures |= {"kl_after_peak": float(k3(moved).mean()), "largest_logp_change": float(moved.abs().max())}
    findings += _judged(subject, figures, same=fingerprint(unwrap(trainer.model)) == prints)
    line = (
        f"update: {figures['trainable']:.0f} of {figures['weights']:.0f} weights are trainable; one update moves the "
        f"policy by {figures['kl_after_peak']:.2g} nats per token"
    )
    return Outcome("update", tuple(findings), figures, (line,))


def _not_held(subject: TrlSubject, figures: Mapping[str, float]) -> Finding:
    """The finding that the optimizer has no tensors, or other tensors than the model's, so that updates do nothing."""
    if not subject.weights:
        lora = is_lora(unwrap(subject.trainer.model))
        return finding(
            "optim/no-update",
            f"none of the model's {figures['weights']:.0f} weights is trainable",
            "the adapter was loaded for inference" if lora else "every parameter has requires_grad=False",
            "load it with PeftModel.from_pretrained(…, is_trainable=True)"
            if lora
            else "call model.requires_grad_(True) before the trainer is built, or give a peft_config",
        )
    missing, total = figures["not_held"], figures["trainable"]
    return finding(
        "optim/no-update",
        f"the optimizer holds {total - missing:.0f} of the model's {total:.0f} trainable weights",
        "it was built for other tensors: before the model was wrapped or loaded again, or for a copy",
        "build the optimizer from the parameters of the model that the trainer is given, or leave optimizers out",
        severity="error" if missing == total else "warning",
    )


def _step(subject: TrlSubject) -> float:
    """Make one step at the full learning rate on the batch's gradient, clipped as in training; return its norm."""
    trainer, weights, limit = subject.trainer, subject.weights, subject.trainer.args.max_grad_norm
    batch = subject.batch | {"advantages": subject.advantages}
    for micro in split_tensor_dict(batch, trainer.args.steps_per_generation):
        for weight, gradient in zip(weights, subject.gradients(micro), strict=True):
            weight.grad = gradient if weight.grad is None else weight.grad + gradient
    norm = float(torch.nn.utils.clip_grad_norm_(weights, limit if limit and limit > 0 else math.inf))
    for group in trainer.optimizer.param_groups:  # with a warm-up the first rate may be 0
        group["lr"] = group.get("initial_lr", group["lr"])
    if math.isfinite(norm):
        trainer.optimizer.step()
    trainer.model.zero_grad()
    return norm


def _judged(subject: TrlSubject, figures: dict[str, float], *, same: bool) -> Iterator[Finding]:
    """Check that one update changes the policy, but not too much, and that the whole run changes it enough."""
    limits, norm, kl = subject.thresholds, figures["gradient_norm"], figures["kl_after_peak"]
    rate = max(group["lr"] for group in subject.trainer.optimizer.param_groups)
    steps = max(_steps(subject.trainer), limits["steps_to_judge"])
    figures["reach"] = kl * float(subject.sampled.sum()) / len(subject.sampled) * steps**2
    if same or figures["reach"] < limits["reach_least"]:
        done = "leaves every bit of the weights as it was" if same else f"moves the policy by {kl:.1g} nats per token"
        reason = "the steps are smaller than the weights' type can hold, or than anything that shows"
        yield finding(
            "optim/no-update",
            f"one update at a rate of {rate:g} with a gradient of norm {norm:.2g} {done}; {steps:.0f} of them reach "
            f"{figures['reach']:.1g} nats per completion at most",
            "the gradient is 0" if norm == 0 else "the learning rate is 0" if rate == 0 else reason,
            "raise learning_rate, train in float32 (or LoRA, whose adapters are), and look at what is detached",
        )
    elif kl > limits["kl_per_update_peak"]:
        yield finding(
            "optim/lr-too-high",
            f"one update at a rate of {rate:g} moves the policy by {kl:.2g} nats per token",
            "an update that leaves the region it was estimated in destroys the policy",
            f"lower learning_rate, as to {rate / math.sqrt(kl / limits['kl_per_update']):.1g}",
        )


def _steps(trainer: Any) -> float:
    """The number of updates in the run; 0 if it is not known."""
    args = trainer.args
    if args.max_steps > 0:
        return float(args.max_steps)
    try:
        rows = len(trainer.train_dataset) * trainer.num_generations * trainer.num_iterations
    except TypeError:  # a streamed dataset has no length
        return 0.0
    return float(args.num_train_epochs * rows / (args.per_device_train_batch_size * args.gradient_accumulation_steps))


def measure_resume(subject: TrlSubject) -> Outcome:
    """Save controller, guards and reference of `KeelGRPOTrainer` into a folder and load them again."""
    trls = ("resume: TRL's own part of a checkpoint (weights, optimizer, schedule, order of the data) is not tried",)
    if not subject.keel:
        return Outcome("resume", unchecked=trls)
    trainer = subject.trainer
    state, batches, reference = trainer.keel_state, trainer._batches, trainer.keel_reference
    before = reference.fingerprint()
    with tempfile.TemporaryDirectory(prefix="keel-doctor-") as folder:
        save_state(Path(folder), state, batches, reference, trainer._start)
        loaded = load_state(Path(folder), reference, trainer._start)
    same = {
        "state": loaded is not None and (asdict(loaded[0]), loaded[1]) == (asdict(state), batches),
        "reference": reference.fingerprint() == before,
    }
    figures = {f"{name}_equal": float(equal) for name, equal in same.items()}
    if all(same.values()):
        return Outcome("resume", (), figures, ("resume: controller and reference come back equal",), trls)
    lost = finding(
        "reference/not-saved",
        f"after saving and loading, {' and '.join(name for name, equal in same.items() if not equal)} are others",
        "a controller or reference of one's own does not save all that it has",
        "let state_dict and load_state_dict hold everything that moves",
    )
    return Outcome("resume", (lost,), figures, unchecked=trls)


__all__ = ["measure_accumulation", "measure_resume", "measure_update"]
