"""Compare the sampler and the reference with a forward of the right model."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from keel.doctor.draws import batch_draws, chance_of
from keel.doctor.findings import Finding, finding
from keel.doctor.gap import average, close, largest
from keel.doctor.measure import Outcome
from keel.doctor.probes.alternatives import configured_finding, drawn_finding
from keel.doctor.probes.reported import Reports, filtered_findings, reported_finding
from keel.eval.statistics import normal_interval
from keel.integrations.trl.preflight.subject import TrlSubject
from keel.kl import k3
from keel.models.fingerprint import fingerprint
from keel.models.head import is_lora
from keel.models.lora import adapter_is_zero
from keel.reference.weights import unwrap


def measure_sampler(subject: Any) -> Outcome:
    """Compare reported log-probabilities and drawn tokens with the model's own forward."""
    trainer, limits, params = subject.trainer, subject.thresholds, subject.sampling
    findings, unchecked, figures = list[Finding](), list[str](), dict[str, float]()
    used = (trainer.args.generation_kwargs or {}).get("temperature", trainer.temperature)
    if used != trainer.temperature:
        findings.append(
            finding(
                "sampler/temperature",
                f"the sampler uses temperature {used:g}, but the loss uses {trainer.temperature:g}",
                "generation_kwargs override GRPOConfig.temperature for the sampler only",
                f"set temperature={used:g} in GRPOConfig, and leave it out of generation_kwargs",
            )
        )
    drawn, reports = batch_draws(subject), Reports.of(subject, subject.groups)
    if drawn.filtered_logp is None or bool(drawn.filtered_logp.isnan().all()):
        unchecked.append("sampler/precision: the sampler reports no log-probabilities; its tokens are tested instead")
    elif params.filtered:
        findings += filtered_findings(subject, drawn)
    else:
        figures |= {"gap_max": largest(reports.gap), "gap_mean": reports.size}
        findings += [] if reports.close(limits) else [reported_finding(reports, limits)]
    if trainer.repetition_penalty != 1.0 or sum((params.top_p < 1, params.top_k > 0, params.min_p > 0)) > 1:
        unchecked.append("sampler/mismatch: a repetition penalty or several filters at once are not modelled")
    elif subject.tools:
        unchecked.append("sampler/mismatch: completions contain tokens of tools")
    else:
        chance = chance_of(drawn, params)
        figures |= {"draws": float(len(drawn)), "draws_chance": chance}
        if chance < limits["sampler_draws"] and not findings:
            findings.append(drawn_finding(drawn, subject, chance, [], 0.0))
        if params.filtered:
            findings.append(configured_finding(subject, drawn))
    shown = ", ".join(f"{name} {value:.2g}" for name, value in figures.items())
    return Outcome("sampler", tuple(findings), figures, (f"sampler: {shown}",), tuple(unchecked))


# ------------------------------------------------------------------------ the reference


def measure_reference(subject: TrlSubject) -> Outcome:
    """Compare the reference's log-probabilities with its own forward and the policy, also after noise on the policy."""
    mask = subject.batch_values("completion_mask").bool()
    seen = subject.sampled & mask  # TRL hides other tokens from its attention as well
    whole = bool(((mask == subject.written).all(1) | ~mask.any(1)).all())
    if not whole or not bool(seen.any()) or subject.found & {"sampler/swapped", "sampler/other-prompt"}:
        why = "reference/*, kl/at-start: the batch's rows and masks are not those of the sampled tokens"
        return Outcome("reference", unchecked=(why,))
    given = subject.batch_values("ref_per_token_logps")
    d = (given - subject.forward_logp())[seen].double()
    with subject.reference() as reference:
        gap = (given - reference.forward_logp())[seen]
    figures = {"kl_at_start": float(k3(d).mean()), "gap_max": largest(gap)}
    findings: list[Finding] = []
    if not close(subject, gap):
        findings.append(_not_its_own(subject, gap))
    elif figures["kl_at_start"] > subject.thresholds["kl_at_start"]:
        findings.append(_at_start(subject, d, seen))
    unchecked = () if subject.weights else ("reference/moving: no weight is trainable",)
    with subject.perturbed():
        again = subject.rescored().get("ref_per_token_logps") if subject.weights else None
    if again is not None:
        drift = (again - subject.batch["ref_per_token_logps"])[subject.of_batch_width(seen)].float()
        figures["moved_by"] = average(drift)
        findings += [] if close(subject, drift) else [_moving(subject, average(drift))]
    line = f"reference: KL(policy‖reference) is {figures['kl_at_start']:.2g} nats per token at the start"
    return Outcome("reference", tuple(findings), figures, (line,), unchecked)


def _not_its_own(subject: TrlSubject, gap: Tensor) -> Finding:
    return finding(
        "reference/wrong",
        f"ref_per_token_logps differ from a forward pass of {_name(subject)} by {average(gap):.2g} nats on average "
        f"and by up to {largest(gap):.2g}",
        "the batch's reference scores come from another model, other tokens or another temperature",
        "leave ref_per_token_logps as GRPOTrainer computes them, or fix the method that changes them",
    )


def _name(subject: TrlSubject) -> str:
    trainer = subject.trainer
    if subject.keel:
        return f"the reference ({trainer.keel_reference.kind})"
    if trainer.ref_model is not None:
        return "trainer.ref_model"
    return "the adapter 'ref'" if "ref" in unwrap(trainer.model).peft_config else "the model without its adapter"


def _at_start(subject: TrlSubject, d: Tensor, seen: Tensor) -> Finding:
    """Explain a difference between policy and reference before the first update by the weights that differ."""
    rows, kl = seen.nonzero()[:, 0], k3(d)
    low, high = normal_interval([float(kl[rows == row].mean()) for row in rows.unique()])
    evidence = (
        f"KL(policy‖reference) is {float(kl.mean()):.3g} nats per token before any update (95 % interval {low:.3g} to "
        f"{high:.3g})"
    )
    trainer, policy, code = subject.trainer, unwrap(subject.trainer.model), "reference/wrong"
    if is_lora(policy) and trainer.ref_model is not None:
        cause = "under LoRA TRL's reference is the model with its adapter disabled, but ref_model is another model"
        advice = "set ref_model=None under LoRA, or give the adapter's base model"
    elif is_lora(policy) and not adapter_is_zero(policy) and not subject.keel:
        cause = f"the policy starts from a trained adapter, but the reference is {_name(subject)}"
        advice = (
            "merge the adapter into the model first, or give the trainer a PeftModel with beta above 0 from the start, "
            "so that TRL keeps a copy of it"
        )
    elif trainer.ref_model is not None and fingerprint(policy) != fingerprint(unwrap(trainer.ref_model)):
        cause = f"TRL loaded the reference from {subject.policy.name!r}, but the policy has other weights"
        advice = (
            "save the policy and build the trainer with that path, or use KeelGRPOTrainer, whose reference is a copy "
            "of the policy"
        )
    else:
        code, cause = (
            "kl/at-start",
            "the weights are equal, so the forward passes differ, by dropout, precision or a patch",
        )
        advice = "set disable_dropout=True, and load both models in the same dtype"
    return finding(code, evidence, cause, advice)


def _moving(subject: TrlSubject, drift: float) -> Finding:
    lora = is_lora(unwrap(subject.trainer.model))
    return finding(
        "reference/adapter-on" if lora else "reference/moving",
        f"noise on the policy's weights changes the reference's log-probabilities by {drift:.2g} nats on average",
        "the reference is scored with the policy's adapter enabled"
        if lora
        else "the reference shares the policy's weights",
        "disable the adapter while scoring the reference"
        if lora
        else "give the trainer a copy of the model as ref_model",
    )


__all__ = ["measure_reference", "measure_sampler"]
