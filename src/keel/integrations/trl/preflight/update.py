"""Check the KL term, accumulated gradients, one step of the optimizer, and a checkpoint."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import split_tensor_dict

from keel.doctor.findings import Finding, finding, propose
from keel.doctor.measure import Outcome
from keel.doctor.probes.balance import ADVISED_KL, PULLED_AT, Balance
from keel.doctor.probes.kl_term import GradientNorms
from keel.doctor.subject import RELATIVE_NOISE
from keel.integrations.trl.preflight.subject import TrlSubject, signs
from keel.integrations.trl.preflight.trainer import patched
from keel.integrations.trl.rundir import load_state, save_state
from keel.integrations.trl.scoring import action_mask
from keel.kl import k3
from keel.models.fingerprint import fingerprint
from keel.models.head import is_lora
from keel.reference.weights import unwrap

_TRIES = 16
FAR = 1e-3  # if policy and reference differ by more nats than this, the term must have a gradient


def measure_kl(subject: TrlSubject) -> Outcome:
    """Compare the loss's gradients at β and at 0 on a perturbed policy: at the start the KL has no gradient."""
    if subject.beta == 0:
        return _without(subject)
    if why := subject.lacks("loss"):
        return Outcome("kl_term", unchecked=(f"kl/no-gradient, kl/reversed, kl/too-strong: {why}",))
    before = subject.forward_logp()
    with subject.perturbed(_noise(subject)):
        figures = {"moved": _distance(subject, before)}
        micro = subject.micro(subject.rescored())
        micro |= {"advantages": subject.advantages[: len(micro["completion_ids"])]}
        both, policy = subject.gradients(micro), subject.gradients(micro, beta=0.0)
        norms = GradientNorms(_norm(policy), _norm([b - p for b, p in zip(both, policy, strict=True)]) / subject.beta)
        figures |= norms.figures(subject.beta, (0.1, 0.5))
        findings = [*_wrong(subject, micro, norms, figures)]
    share = norms.share(subject.beta)
    line = (
        f"the KL term is {share:.1%} of the gradient at β = {subject.beta:g}, at a KL of {figures['moved']:.2g} nats "
        "per token"
    )
    return Outcome("kl_term", tuple(findings), figures, (line,))


def _noise(subject: TrlSubject) -> float:
    """The size of noise, halved until it moves the policy by a KL of at most 4 × `PULLED_AT`."""
    before, noise = subject.forward_logp(), RELATIVE_NOISE
    for _ in range(_TRIES):
        with subject.perturbed(noise):
            if _distance(subject, before) <= 4 * PULLED_AT:
                break
        noise /= 2
    return noise


def _distance(subject: TrlSubject, before: Tensor) -> float:
    """The KL to the policy that gave `before`, in nats per token to second order."""
    return float((subject.forward_logp() - before)[subject.sampled].double().square().mean() / 2)


def _norm(gradients: list[Tensor]) -> float:
    return float(torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt())


def _without(subject: TrlSubject) -> Outcome:
    """The outcome for β = 0: an error if there are settings that only a penalty uses, otherwise a note."""
    intent = _intent(subject)
    absent = finding(
        "kl/no-gradient",
        f"β is 0, so the loss has no KL term{', although ' if intent else ''}{' and '.join(intent)}",
        "the settings for a KL penalty have no effect, so nothing keeps the policy close to its reference"
        if intent
        else "no setting shows that a penalty was intended",
        propose("set {} in GRPOConfig before the trainer is built, or remove the reference", {"beta": 0.04})
        if intent
        else "none, if no penalty is intended",
        severity=None if intent else "note",
    )
    return Outcome("kl_term", (absent,), {"beta": 0.0}, unchecked=("kl/reversed, kl/too-strong: β is 0",))


def _intent(subject: TrlSubject) -> list[str]:
    """Settings that show that a penalty was intended. Keel's own trainer refuses them without a β."""
    trainer, args = subject.trainer, subject.trainer.args
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    names = [n for n in ("beta", "ref_model_mixup_alpha", "ref_model_sync_steps") if getattr(args, n) != defaults[n]]
    shown = [f"GRPOConfig sets {name}={getattr(args, name):g}" for name in names]
    shown += ["the trainer has a ref_model"] if trainer.ref_model is not None else []
    shown += ["the model has an adapter called ref"] if "ref" in getattr(trainer.model, "peft_config", {}) else []
    return [] if subject.keel else shown


def _wrong(
    subject: TrlSubject, micro: Mapping[str, Any], norms: GradientNorms, figures: dict[str, float]
) -> Iterator[Finding]:
    """Findings if the term has no gradient, points away from the reference, or holds the policy at its start.

    With token-level ratios, every KL form of TRL pulls each token back to the reference. A sequence-level ratio couples
    tokens and is not checked. The pairings of `KeelGRPOTrainer` are verified elsewhere.
    """
    if norms.kl == 0:
        yield finding(
            "kl/no-gradient",
            f"the loss has the same gradient at β = {subject.beta:g} and at 0, although the KL to the reference is "
            f"{figures['moved']:.2g} nats per token",
            "the KL term is missing from the loss, or detached",
            "return TRL's loss from _compute_loss, or add beta times the KL to your own loss",
        )
        return
    args, mask = subject.trainer.args, action_mask(micro)
    pull = subject.logp_gradient(micro) - subject.logp_gradient(micro, beta=0.0)
    rows = len(mask)
    apart = subject.of_batch_width(subject.score(subject.groups[:rows]))
    apart = (apart - micro["ref_per_token_logps"]).double()
    far = mask & (apart.abs() > FAR)
    coupled = subject.keel or (args.use_bias_correction_kl and args.importance_sampling_level != "token")
    if bool(far.any()) and not coupled:
        figures["wrong_way"] = float(((pull * apart)[far] < 0).double().mean())
        if figures["wrong_way"] > subject.thresholds["loss_wrong_way"]:
            yield finding(
                "kl/reversed",
                f"the KL term pushes {100 * figures['wrong_way']:.0f} % of {int(far.sum())} tokens away from the "
                "reference",
                "its sign is reversed, or its two log-probabilities are swapped",
                "add beta times the KL to the loss that is minimized",
            )
            return
    yield from _too_strong(subject, micro, pull, apart.masked_fill(~mask, 0.0), figures)


def _too_strong(
    subject: TrlSubject, micro: Mapping[str, Any], pull: Tensor, apart: Tensor, figures: dict[str, float]
) -> Iterator[Finding]:
    """The KL at which the term balances this batch's advantages: KL* = ½·(W·A / (β·v))² nats per completion."""
    mask, advantages = action_mask(micro), signs(micro["advantages"])
    nats = float(apart.square().sum() / mask.sum().clamp_min(1) / 2)
    if nats == 0 or not bool(pull.any()):  # an exact KL acts on the whole distribution
        return
    column = (advantages if advantages.dim() == 2 else advantages[:, None]).double()
    pushed = subject.logp_gradient({**micro, "advantages": advantages}, beta=0.0)
    weight = float(-(pushed / column)[mask].sum())  # −Σ ∂loss/∂logp per unit of advantage
    kl_weight = float((pull * apart).sum()) / subject.beta / (2 * nats)
    size = float(subject.advantages.double().square().mean().sqrt())
    if not (weight > 0 and kl_weight > 0):
        return
    balance = Balance(weight * size, kl_weight, float(mask.sum()) / len(mask))
    figures["equilibrium"] = balance.equilibrium(subject.beta)
    if figures["equilibrium"] < subject.thresholds["kl_equilibrium"]:
        yield finding(
            "kl/too-strong",
            f"at β = {subject.beta:g} the KL term balances advantages of size {size:.2g} at "
            f"{figures['equilibrium']:.2g} nats per completion, at any learning rate",
            "the penalty is so strong that the policy stays close to its start",
            propose("lower β, for example with {}", {"beta": float(f"{balance.beta_for(ADVISED_KL):.1g}")}),
        )


# ------------------------------------------------------------------------ the update


def measure_accumulation(subject: TrlSubject) -> Outcome:
    """Check that the gradients which `training_step` sums over microbatches equal that of the whole batch.

    bnpo and the entropy bonus are means over each microbatch. There, only the division by their number is checked.
    """
    trainer, args = subject.trainer, subject.trainer.args
    rows = len(subject.groups)
    parts = args.steps_per_generation if args.steps_per_generation > 1 else args.gradient_accumulation_steps
    if parts == 1 or rows % parts:
        why = "an update has one microbatch" if parts == 1 else f"{rows} is not divisible by {parts} microbatches"
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
    line = (
        f"accumulation: the gradient of {parts} microbatches is {factor:.4g} times that of one, with a relative error "
        f"of {100 * error:.2g} %"
    )
    if error <= subject.thresholds["gradient_error_half" if subject.in_half_precision else "gradient_error"]:
        return Outcome("accumulation", (), figures, (line,))
    wrong = finding(
        "loss/scale",
        f"the gradient of {parts} microbatches is {factor:.3g} times that of all rows in one microbatch, with a "
        f"relative error of {100 * error:.0f} %",
        f"the loss is not normalized as loss_type={args.loss_type} requires: it is divided per microbatch, twice, or "
        "not at all",
        "divide once by current_gradient_accumulation_steps (or num_items_in_batch); keep loss_is_scaled_for_ga=True",
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
    """Check the trainable weights, the optimizer's list of them, and one step at the full rate. Call in `untouched`."""
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
            "TRL applies such an update in fp32 and bf16, and then every weight is NaN",
            "find the first value that is not finite (rewards, log-probabilities, loss), or use KeelGRPOTrainer, "
            "which skips such updates",
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
            else "call model.requires_grad_(True) before the trainer is built, or set a peft_config",
        )
    missing, total = figures["not_held"], figures["trainable"]
    return finding(
        "optim/no-update",
        f"the optimizer updates {total - missing:.0f} of the model's {total:.0f} trainable weights",
        "the optimizer was built before the model was wrapped or loaded again, or for a copy of the model",
        "build the optimizer from the parameters of the model that the trainer gets, or leave optimizers out",
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
        done = "changes no weight" if same else f"moves the policy by {kl:.1g} nats per token"
        reason = "the updates are too small for the weights' dtype, or too small to matter"
        yield finding(
            "optim/no-update",
            f"one update at learning rate {rate:g} and gradient norm {norm:.2g} {done}; {steps:.0f} updates reach at "
            f"most {figures['reach']:.1g} nats per completion",
            "the gradient is 0" if norm == 0 else "the learning rate is 0" if rate == 0 else reason,
            "raise learning_rate, train in float32 (or LoRA, whose adapters are float32), and check that the loss is "
            "not detached",
        )
    elif kl > limits["kl_per_update_peak"]:
        yield finding(
            "optim/lr-too-high",
            f"one update at learning rate {rate:g} moves the policy by {kl:.2g} nats per token",
            "the gradient is only valid near the current policy, so larger updates can destroy the policy",
            f"lower learning_rate, for example to {rate / math.sqrt(kl / limits['kl_per_update']):.1g}",
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
    trls = ("resume: TRL's own part of a checkpoint (weights, optimizer, schedule, order of the data) is not checked",)
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
        return Outcome("resume", (), figures, ("resume: controller and reference are restored exactly",), trls)
    lost = finding(
        "reference/not-saved",
        f"saving and loading changes the {' and the '.join(name for name, equal in same.items() if not equal)}",
        "your own controller or reference does not save its whole state",
        "save and load everything that changes during training in state_dict and load_state_dict",
    )
    return Outcome("resume", (lost,), figures, unchecked=trls)


__all__ = ["measure_accumulation", "measure_kl", "measure_resume", "measure_update"]
