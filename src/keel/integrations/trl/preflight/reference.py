"""Check the reference: the right model, equal to the policy at step 0, and unchanged by updates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from trl.trainer.utils import use_adapter

from keel.doctor.findings import Finding, finding
from keel.doctor.gap import average, largest
from keel.doctor.thresholds import Thresholds
from keel.doctor.verdict import Outcome
from keel.eval.statistics import normal_interval
from keel.integrations.trl.preflight.batch import Subject
from keel.kl import k3
from keel.models.adapters import is_lora
from keel.models.fingerprint import fingerprint
from keel.models.lora import adapter_is_zero
from keel.reference.weights import unwrap


def probe_reference(subject: Subject, thresholds: Thresholds) -> Outcome:
    """The reference's log-probabilities against a forward of our own, the KL at the start, and a changed policy."""
    given = subject.batch.get("ref_per_token_logps")
    if given is None:
        why = "β is 0, so that TRL scores no reference" if subject.beta == 0 else "the batch has no ref_per_token_logps"
        return Outcome("reference", unchecked=(f"reference/*, kl/at-start: {why}",))
    sampled, policy = subject.sampled, subject.forward
    seen = sampled & subject.batch["completion_mask"].bool()  # others are scored without their own text
    if not bool(seen.any()):
        return Outcome("reference", unchecked=("reference/*: no token of the batch is scored",))
    d = (given.float() - policy)[seen].double()
    kl = float(k3(d).mean())
    with reference_model(subject) as model:
        own = subject.forward_logp(model)
    gap = (given.float() - own)[seen]
    figures = {"kl_at_start": kl, "gap_max": largest(gap)}
    findings: list[Finding] = []
    if not _masks_hold(subject):
        gap = torch.zeros_like(gap)  # wrong masks have their own finding
    elif not subject.close(gap, thresholds):
        findings.append(_not_its_own(subject, gap))
    if not findings and _masks_hold(subject) and kl > thresholds["kl_at_start"]:
        findings.append(_at_start(subject, d, seen, kl))
    unchecked: tuple[str, ...] = ()
    if not subject.weights:
        unchecked = ("reference/moving: no weight is trainable",)
    elif _masks_hold(subject):
        findings += _when_the_policy_moves(subject, given, seen, figures, thresholds)
    line = f"reference: KL(policy‖reference) is {kl:.2g} nats per token at the start"
    return Outcome("reference", tuple(findings), figures, (line,), unchecked)


def _masks_hold(subject: Subject) -> bool:
    """Whether every completion is scored as sampled, and its mask covers all or none of it."""
    mask, present = subject.batch["completion_mask"].bool(), subject.present
    return subject.rows_hold and bool(((mask == present).all(1) | ~mask.any(1)).all())


@contextmanager
def reference_model(subject: Subject) -> Iterator[nn.Module]:
    """The model that the reference should be: `ref_model`, an adapter called ref, or the policy without its adapter."""
    trainer = subject.trainer
    if subject.keel:
        with trainer.keel_reference.model() as model:
            yield model
        return
    policy = unwrap(trainer.model)
    if trainer.ref_model is not None or not is_lora(policy):
        yield trainer.model if trainer.ref_model is None else trainer.ref_model
        return
    with use_adapter(policy, "ref" if "ref" in policy.peft_config else None):
        yield policy


def _not_its_own(subject: Subject, gap: Tensor) -> Finding:
    return finding(
        "reference/wrong",
        f"ref_per_token_logps are {average(gap):.2g} nats from a forward of {_name(subject)} on average, up to "
        f"{largest(gap):.2g}",
        "the batch's reference scores come from another model, other tokens or another temperature",
        "leave ref_per_token_logps as GRPOTrainer computes them, or mend the method that changes them",
    )


def _name(subject: Subject) -> str:
    trainer = subject.trainer
    if subject.keel:
        return f"the reference ({trainer.keel_reference.kind})"
    if trainer.ref_model is not None:
        return "trainer.ref_model"
    return "the adapter 'ref'" if "ref" in unwrap(trainer.model).peft_config else "the model without its adapter"


def _at_start(subject: Subject, d: Tensor, seen: Tensor, kl: float) -> Finding:
    """Explain a difference of policy and reference before the first update by the weights that differ."""
    rows = seen.nonzero()[:, 0]
    means = [float(k3(d[rows == row]).mean()) for row in rows.unique()]
    low, high = normal_interval(means)
    evidence = (
        f"KL(policy‖reference) is {kl:.3g} nats per token before any update (95 % between {low:.3g} and {high:.3g})"
    )
    trainer, policy = subject.trainer, unwrap(subject.trainer.model)
    if trainer.ref_model is not None and is_lora(policy):
        with use_adapter(policy, None):
            base = fingerprint(policy)
        other = fingerprint(unwrap(trainer.ref_model))
        return finding(
            "reference/wrong",
            f"{evidence}; the policy is an adapter on weights {base[:8]}, trainer.ref_model has {other[:8]}",
            "under LoRA TRL's reference is the model with its adapter off, but ref_model is another model",
            "leave ref_model None under LoRA, or give the base model that the adapter is on",
        )
    if is_lora(policy) and not adapter_is_zero(policy) and trainer.ref_model is None and not subject.keel:
        return finding(
            "reference/wrong",
            f"{evidence}; the adapter is not zero, and the reference is {_name(subject)}",
            "the policy starts from an adapter that was trained before, the reference does not",
            "merge the adapter into the model first, or give the trainer a PeftModel with beta above 0 from the "
            "start, so that TRL keeps a copy of it",
        )
    if trainer.ref_model is not None and fingerprint(policy) != fingerprint(unwrap(trainer.ref_model)):
        path = getattr(trainer.model.config, "_name_or_path", "")
        return finding(
            "reference/wrong",
            f"{evidence}; the weights of policy and reference differ",
            f"TRL has loaded its reference from {path!r}, and the policy that it was given is another one",
            "save the policy and build the trainer with that path, or use KeelGRPOTrainer, whose reference is a copy",
        )
    return finding(
        "kl/at-start",
        evidence,
        "the weights are the same, so that the two passes differ: dropout, precision or a patched forward",
        "set disable_dropout=True, and load both in one dtype",
    )


def _when_the_policy_moves(
    subject: Subject, given: Tensor, seen: Tensor, figures: dict[str, float], thresholds: Thresholds
) -> Iterator[Finding]:
    """Score the same tokens after adding noise to the policy: the reference must not change."""
    with subject.perturbed() as moved:
        again = subject.rescored().get("ref_per_token_logps")
    if again is None:
        return
    drift = (again - given).float()[seen]
    figures |= {"moved_by": float(drift.abs().mean()), "policy_moved": moved}
    if subject.close(drift, thresholds):
        return
    lora = is_lora(unwrap(subject.trainer.model))
    yield finding(
        "reference/adapter-on" if lora else "reference/moving",
        f"noise that moves the policy by {moved:.2g} nats per token moves the reference's log-probabilities by "
        f"{average(drift):.2g} on average",
        "the reference is scored with the policy's adapter on" if lora else "the reference shares the policy's weights",
        "score the reference with the adapter off" if lora else "give the trainer a copy of the model as ref_model",
    )


__all__ = ["probe_reference", "reference_model"]
