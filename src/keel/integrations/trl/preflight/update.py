"""Check one update of the trainer's own optimizer: its weights, and whether it changes the policy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import split_tensor_dict

from keel.doctor.findings import Finding, finding
from keel.doctor.thresholds import Thresholds
from keel.doctor.verdict import Outcome
from keel.integrations.trl.preflight.batch import Subject
from keel.kl import k3
from keel.models.adapters import is_lora
from keel.models.fingerprint import fingerprint
from keel.reference.weights import unwrap


def probe_update(subject: Subject, thresholds: Thresholds) -> Outcome:
    """Trainable weights, the optimizer's own list of them, and one step at the full rate. Inside `untouched`."""
    trainer = subject.trainer
    weights, every = subject.weights, list(trainer.model.parameters())
    figures = {"trainable": float(sum(w.numel() for w in weights)), "weights": float(sum(w.numel() for w in every))}
    if not weights:
        return Outcome("update", (_frozen(subject, figures),), figures)
    if any(part in str(trainer.args.optim) for part in ("lomo", "layerwise")):
        return Outcome("update", (), figures, unchecked=("optim/no-update: this optimizer steps while it goes back",))
    own = {id(weight) for weight in weights}
    for weight in every:  # as they were when training would have built its optimizer
        weight.requires_grad_(id(weight) in own)
    if trainer.optimizer is None:
        trainer.create_optimizer()
    optimizer = trainer.optimizer
    findings = list(_held(weights, optimizer, figures))
    if findings and findings[0].severity == "error":
        return Outcome("update", tuple(findings), figures)
    before, prints = subject.forward, fingerprint(unwrap(trainer.model))
    norm = _step(subject, weights, optimizer)
    figures["gradient_norm"] = norm
    if not math.isfinite(norm):
        findings.append(_not_finite(norm))
        return Outcome("update", tuple(findings), figures)
    moved = (subject.forward_logp() - before)[subject.sampled].double()
    figures |= {"kl_after_peak": float(k3(moved).mean()), "largest_logp_change": float(moved.abs().max())}
    same = fingerprint(unwrap(trainer.model)) == prints
    findings += _judged(subject, optimizer, figures, same, norm, thresholds)
    line = (
        f"update: {figures['trainable']:.0f} of {figures['weights']:.0f} weights are trainable; one update moves the "
        f"policy by {figures['kl_after_peak']:.2g} nats per token"
    )
    return Outcome("update", tuple(findings), figures, (line,))


def _frozen(subject: Subject, figures: dict[str, float]) -> Finding:
    lora = is_lora(unwrap(subject.trainer.model))
    return finding(
        "optim/no-update",
        f"none of the model's {figures['weights']:.0f} weights is trainable",
        "the adapter was loaded for inference" if lora else "every parameter has requires_grad=False",
        "load it with PeftModel.from_pretrained(…, is_trainable=True)"
        if lora
        else "call model.requires_grad_(True) before the trainer is built, or give a peft_config",
    )


def _held(weights: list[Tensor], optimizer: Any, figures: dict[str, float]) -> Iterator[Finding]:
    """Whether the optimizer has the model's own tensors; updates of copies have no effect."""
    held = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    own = {id(weight) for weight in weights}
    missing = sum(weight.numel() for weight in weights if id(weight) not in held)
    foreign = sum(parameter.numel() for key, parameter in held.items() if key not in own and parameter.requires_grad)
    figures["not_held"] = float(missing)
    if missing:
        total = sum(weight.numel() for weight in weights)
        yield finding(
            "optim/no-update",
            f"the optimizer holds {total - missing} of the model's {total} trainable weights, and {foreign} others",
            "it was built for other tensors: before the model was wrapped or loaded again, or for a copy",
            "build the optimizer from the parameters of the model that the trainer is given, or leave optimizers out",
            severity="error" if missing == total else "warning",
        )


def _step(subject: Subject, weights: list[Tensor], optimizer: Any) -> float:
    """One step at the full learning rate on the batch's gradient, clipped as training clips it; gives its norm."""
    trainer = subject.trainer
    parts = trainer.args.steps_per_generation
    batch = subject.batch | {"advantages": subject.advantages}
    total = [torch.zeros_like(weight) for weight in weights]
    for micro in split_tensor_dict(batch, parts):
        for mine, gradient in zip(total, subject.gradients(micro), strict=True):
            mine += gradient
    for weight, gradient in zip(weights, total, strict=True):
        weight.grad = gradient
    limit = trainer.args.max_grad_norm
    norm = float(torch.nn.utils.clip_grad_norm_(weights, limit if limit and limit > 0 else math.inf))
    for group in optimizer.param_groups:  # a warm-up may have begun at 0
        group["lr"] = group.get("initial_lr", group["lr"])
    if math.isfinite(norm):
        optimizer.step()
    for weight in weights:
        weight.grad = None
    return norm


def _not_finite(norm: float) -> Finding:
    return finding(
        "optim/non-finite",
        f"the gradient norm of the first batch is {norm}",
        "TRL in fp32 and bf16 applies such an update, and every weight is NaN after it",
        "find what is not finite first (rewards, log-probabilities, loss); KeelGRPOTrainer skips such updates",
    )


def _judged(
    subject: Subject, optimizer: Any, figures: dict[str, float], same: bool, norm: float, thresholds: Thresholds
) -> Iterator[Finding]:
    """Whether an update changes the policy, enough over a whole run, and not too much at once."""
    rate = max(group["lr"] for group in optimizer.param_groups)
    kl, length = figures["kl_after_peak"], float(subject.sampled.sum()) / len(subject.sampled)
    steps = _steps(subject.trainer, thresholds)
    figures["reach"] = kl * length * steps**2
    if same or figures["reach"] < thresholds["reach_least"]:
        done = "leaves every bit of the weights as it was" if same else f"moves the policy by {kl:.1g} nats per token"
        reason = (
            "the gradient is 0"
            if norm == 0
            else "the learning rate is 0"
            if rate == 0
            else "the steps are smaller than the weights' type can hold, or than anything that shows"
        )
        yield finding(
            "optim/no-update",
            f"one update at a rate of {rate:g} with a gradient of norm {norm:.2g} {done}; {steps:.0f} of them reach "
            f"{figures['reach']:.1g} nats per completion at most",
            reason,
            "raise learning_rate, train in float32 (or LoRA, whose adapters are), and look at what is detached",
        )
    elif kl > thresholds["kl_per_update_peak"]:
        yield finding(
            "optim/lr-too-high",
            f"one update at a rate of {rate:g} moves the policy by {kl:.2g} nats per token",
            "an update that leaves the region it was estimated in destroys the policy",
            f"lower learning_rate, as to {rate / math.sqrt(kl / thresholds['kl_per_update']):.1g}",
        )


def _steps(trainer: Any, thresholds: Thresholds) -> float:
    """The number of updates of the run if known, at least the minimum for a judgement."""
    args = trainer.args
    known = float(args.max_steps)
    if known <= 0:
        try:
            rows = len(trainer.train_dataset) * trainer.num_generations * trainer.num_iterations
        except TypeError:  # a stream
            rows = 0
        known = args.num_train_epochs * rows / (args.per_device_train_batch_size * args.gradient_accumulation_steps)
    return max(known, thresholds["steps_to_judge"])


__all__ = ["probe_update"]
