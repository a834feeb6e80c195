"""Compare the sampler's reported log-probabilities and drawn tokens with the policy. A measure of the doctor compares
its weights.
"""

from __future__ import annotations

from typing import Any

from keel.doctor.draws import batch_draws, chance_of
from keel.doctor.findings import Finding, finding
from keel.doctor.gap import largest
from keel.doctor.probes.alternatives import configured_finding, drawn_finding
from keel.doctor.probes.reported import Reports, filtered_findings, reported_finding
from keel.doctor.verdict import Outcome


def measure_sampler(subject: Any) -> Outcome:
    """Reported log-probabilities and drawn tokens against the model's own forward."""
    trainer, limits, params = subject.trainer, subject.thresholds, subject.sampling
    findings, unchecked, figures = list[Finding](), list[str](), dict[str, float]()
    used = (trainer.args.generation_kwargs or {}).get("temperature", trainer.temperature)
    if used != trainer.temperature:
        findings.append(
            finding(
                "sampler/temperature",
                f"generation_kwargs sample at temperature {used:g}, the loss scores at {trainer.temperature:g}",
                "generation_kwargs override GRPOConfig.temperature for the sampler alone",
                f"set temperature={used:g} in GRPOConfig, and leave it out of generation_kwargs",
            )
        )
    drawn, reports = batch_draws(subject), Reports.of(subject, subject.groups)
    if drawn.filtered_logp is None or bool(drawn.filtered_logp.isnan().all()):
        unchecked.append("sampler/precision: the sampler reports no log-probabilities; its tokens are tested instead")
    elif params.filtered:
        findings += filtered_findings(subject, drawn, limits)
    else:
        figures |= {"gap_max": largest(reports.gap), "gap_mean": reports.size}
        findings += [] if reports.close(limits) else [reported_finding(reports, limits)]
    if trainer.repetition_penalty != 1.0 or sum((params.top_p < 1, params.top_k > 0, params.min_p > 0)) > 1:
        unchecked.append("sampler/mismatch: a repetition penalty or several filters at once are not modelled")
    elif subject.tools:
        unchecked.append("sampler/mismatch: completions hold tokens of tools")
    else:
        chance = chance_of(drawn, params)
        figures |= {"draws": float(len(drawn)), "draws_chance": chance}
        if chance < limits["sampler_draws"] and not findings:
            findings.append(drawn_finding(drawn, subject, chance, [], 0.0, limits))
        if params.filtered:
            findings.append(configured_finding(subject, drawn, limits))
    shown = ", ".join(f"{name} {value:.2g}" for name, value in figures.items())
    return Outcome("sampler", tuple(findings), figures, (f"sampler: {shown}",), tuple(unchecked))


__all__ = ["measure_sampler"]
