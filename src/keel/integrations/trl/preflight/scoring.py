"""Training's log-probabilities against the model's own forward."""

from __future__ import annotations

import torch
from torch import Tensor

from keel.doctor.draws import best_temperature
from keel.doctor.findings import Finding, finding
from keel.doctor.gap import average, largest
from keel.doctor.thresholds import Thresholds
from keel.doctor.verdict import Outcome
from keel.integrations.trl.preflight.batch import Subject
from keel.rollout.sampling import SamplingParams


def probe_scoring(subject: Subject, thresholds: Thresholds) -> Outcome:
    """Compare two training passes over the batch with each other and with an unpadded forward of the model."""
    sampled = subject.sampled
    first, second = subject.scored(subject.whole), subject.scored(subject.whole)
    forward = subject.forward
    if not bool(first[sampled].isfinite().all()):
        return Outcome("scoring", (_not_finite(first[sampled]),), {"gap_max": torch.inf})
    twice, gap = largest((first - second)[sampled]), (first - forward)[sampled]
    figures = {"difference": twice, "gap_max": largest(gap), "gap_mean": average(gap)}
    findings: list[Finding] = []
    if twice > thresholds["scoring_difference"]:
        subject.shared["noise of a pass"] = twice
        findings.append(_unequal(subject, twice))
    elif not subject.close(gap, thresholds):
        findings.append(_other(subject, first, gap, thresholds))
    lines = (f"scoring: within {figures['gap_max']:.2g} nats of the model's own forward",)
    return Outcome("scoring", tuple(findings), figures, lines)


def _not_finite(scored: Tensor) -> Finding:
    return finding(
        "scoring/non-finite",
        f"{int((~scored.isfinite()).sum())} of {len(scored)} log-probabilities are not finite before any update",
        "weights or activations overflow",
        "load the model in bfloat16 or float32, and look for NaN in its weights",
    )


def _unequal(subject: Subject, twice: float) -> Finding:
    on = [m for m in subject.trainer.model.modules() if isinstance(m, torch.nn.Dropout) and m.training and m.p > 0]
    evidence = f"two passes over the same tokens differ by up to {twice:.2g} nats"
    if not on:
        return finding(
            "scoring/nondeterministic",
            evidence,
            "no dropout is on: kernels or hooks give another result each time",
            "set full_determinism=True once, and take out what is random in the forward",
        )
    return finding(
        "scoring/dropout",
        f"{evidence}, and {len(on)} dropout layers are on",
        "dropout gives the same tokens another log-probability at every pass",
        "set disable_dropout=True in GRPOConfig, and lora_dropout=0 in the LoraConfig",
    )


def _other(subject: Subject, scored: Tensor, gap: Tensor, thresholds: Thresholds) -> Finding:
    evidence = f"training's log-probabilities are {average(gap):.2g} nats from the model's own forward on average"

    def cost(params: SamplingParams) -> float:
        return average(torch.cat([scored[row, : len(d)] - d.logp(params) for row, d in draws]))

    draws = list(subject.each_draw(None, subject.texts[:4]))
    best = best_temperature(SamplingParams(), cost)
    if cost(SamplingParams(best)) <= max(0.02 * average(gap), 1e-4):
        return finding(
            "scoring/temperature",
            f"{evidence}, and equal it at temperature {best:.3g} instead of {subject.sampling.temperature:g}",
            "the log-probabilities are taken at another temperature than samples",
            "set the temperature in GRPOConfig, before the trainer is built: the head of its model keeps that one",
        )
    return finding(
        "scoring/mismatch",
        f"{evidence}, and by up to {largest(gap):.2g}",
        "the pass that is trained is not the model's: other positions, a patched head, or other rows beside it",
        "compare _get_per_token_logps_and_entropies with model(input_ids).logits on one row without padding",
    )


__all__ = ["probe_scoring"]
