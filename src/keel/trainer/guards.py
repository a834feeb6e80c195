"""Guards against non-finite numbers, gradient spikes, an exceeded KL budget and rewards without signal.

This module only computes on a step's numbers; `rollback.py` carries out the actions.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from keel.base.types import Batch, Completion
from keel.kl.options import KLBudget
from keel.losses import MismatchOptions, centred
from keel.trainer.batch import StepBatch, rewards_of
from keel.trainer.options import GuardLimits, GuardOptions
from keel.trainer.state import State

NORM_WINDOW, MIN_NORMS = 50, 10  # gradient norms in the running median, and how many a limit needs
P95_FACTOR = 2.0  # limit of the 95th percentile, as a multiple of the limit of the mean


@dataclass(frozen=True)
class GuardViolation:
    """A guard's result: the finding's code, one line of evidence, and the configured action."""

    code: str
    message: str
    action: str


def budget_metric(metrics: Mapping[str, float], unit: str) -> str | None:
    """The budget's metric: KL per sequence, or per token (exact if computed, otherwise k3); None if not measured."""
    names = ["kl/policy_ref/sequence"] if unit == "per_sequence" else ["kl/policy_ref/exact", "kl/policy_ref/k3"]
    return next((name for name in names if f"{name}/mean" in metrics), None)


def may_roll_back(options: GuardOptions, budget: KLBudget | None) -> bool:
    """Whether a guard may roll back. If so, the run needs a checkpoint at its start."""
    broken = budget is not None and budget.action == "rollback"
    return options.max_rollbacks > 0 and (broken or options.on_nans == "rollback")


def over_budget(metrics: Mapping[str, float], budget: KLBudget | None) -> str | None:
    """Describe how the budget T is exceeded (mean above T, p95 above 2T, or NaN); None if it is not exceeded."""
    name = None if budget is None else budget_metric(metrics, budget.unit)
    if budget is None or name is None:
        return None
    unit = "token" if budget.unit == "per_token" else "sequence"
    for part, limit in (("mean", budget.max), ("p95", P95_FACTOR * budget.max)):
        value = metrics.get(f"{name}/{part}", 0.0)
        if not value <= limit:
            factor = "" if part == "mean" else f"{P95_FACTOR:g} × "
            return f"{name}/{part} is {value:.4g} nats per {unit}, over {factor}kl.budget.max {budget.max:g}"
    return None


def find_violation(
    state: State, metrics: Mapping[str, float], options: GuardOptions, budget: KLBudget | None = None
) -> GuardViolation | None:
    """The most severe violation of a finished step, or None. Warnings are the least severe."""
    violations = []
    if state.consecutive_skips >= options.max_consecutive_nans:
        spikes = state.spike_skips == state.consecutive_skips
        code, why = ("optim/spike", ", as gradient spikes") if spikes else ("optim/non-finite", "")
        message = f"{state.consecutive_skips} updates in a row were skipped{why} up to step {state.step}"
        violations.append(GuardViolation(code, message, options.on_nans))
    broken = over_budget(metrics, budget)
    if budget is not None and broken is not None:
        violations.append(GuardViolation("kl/over-budget", f"{broken} at step {state.step}", budget.action))
    return min(violations, key=lambda violation: violation.action == "warn", default=None)


def final_violation(
    step: int, metrics: Mapping[str, float], options: GuardOptions, budget: KLBudget | None = None
) -> GuardViolation | None:
    """The violation of the final policy, from the metrics of `measure_final`, or None."""
    if not math.isfinite(metrics.get("logp/policy_mean", 0.0)):
        message = f"the policy is not finite after the last update, that of step {step}"
        return GuardViolation("optim/non-finite", message, options.on_nans)
    broken = over_budget(metrics, budget)
    if budget is None or broken is None:
        return None
    return GuardViolation("kl/over-budget", f"{broken} after the last update, that of step {step}", budget.action)


def spike_limit(norms: Sequence[float], limits: GuardLimits) -> float | None:
    """`grad_spike` × the median of the last norms; None with fewer than `MIN_NORMS` norms."""
    return limits.grad_spike * statistics.median(norms) if len(norms) >= MIN_NORMS else None


def update_guard_state(
    state: State,
    metrics: Mapping[str, float],
    batch: StepBatch,
    budget: KLBudget | None,
    *,
    applied_norms: Sequence[float],
    baseline: str,
) -> State:
    """Update the guards' state after a step: recent norms, steps without signal, and the last confirmed step."""
    totals = {reward.total for group in batch.groups for reward in group.rewards}
    rewards, group = rewards_of(batch.groups)  # the advantages are on the device
    silent = not bool(centred(rewards.float(), group, baseline).any())
    return next_guard_state(
        state, metrics, budget, applied_norms=applied_norms, constant=len(totals) == 1, silent=silent
    )


def next_guard_state(
    state: State,
    metrics: Mapping[str, float],
    budget: KLBudget | None,
    *,
    applied_norms: Sequence[float],
    constant: bool,
    silent: bool,
) -> State:
    """Update the guards' state.

    `constant` means that all rewards of the step were equal; `silent` means that rewards were equal within every group.
    Only norms of applied updates count, so that skipped spikes do not raise the median. The metrics of step N describe
    the weights after N − 1 updates, so a good step N confirms `step-{N−1}`.
    """
    broken = over_budget(metrics, budget) is not None
    measured = budget is None or budget_metric(metrics, budget.unit) is not None
    within = measured and (not broken or (budget is not None and budget.action == "warn"))
    fine = metrics["guard/skipped"] == 0.0 and within
    return replace(
        state,
        norms=(*state.norms, *applied_norms)[-NORM_WINDOW:],
        over_budget=broken if measured else state.over_budget,
        confirmed=state.step - 1 if fine else state.confirmed,
        constant_rewards=state.constant_rewards + 1 if constant else 0,
        zero_advantages=state.zero_advantages + 1 if silent else 0,
    )


def no_signal_events(state: State, options: GuardOptions) -> list[tuple[str, str]]:
    """Events (kind, message) when the number of steps without signal reaches `guards.constant_steps`."""
    limit = options.constant_steps
    if not limit:
        return []
    if state.constant_rewards == limit:
        return [("reward/constant", f"every completion of the last {limit} steps earned the same reward")]
    if state.zero_advantages == limit:
        return [("advantage/zero", f"every advantage of the last {limit} steps was 0: no group's rewards differed")]
    return []


def sampler_events(
    metrics: Mapping[str, float], mismatch: MismatchOptions, limits: GuardLimits
) -> dict[str, dict[str, str]]:
    """Events, by kind, about the mismatch between sampler and policy."""
    unreported, ess = metrics.get("mismatch/unreported_fraction", 0.0), metrics.get("mismatch/ess", 1.0)
    gap, cut = metrics.get("kl/sampler_policy/k3/mean", 0.0), 1.0 - metrics.get("rollout/kept_mass/mean", 1.0)
    events = {}
    if unreported > 0:
        events["sampler/unreported"] = (
            f"the engine reports no log-probability for {100 * unreported:.3g} % of the sampled tokens: their mismatch "
            "is neither measured nor corrected"
        )
    if gap > limits.sampler_kl_warning and mismatch.kind == "none":
        events["sampler/uncorrected"] = (
            f"KL(sampler‖policy) is {gap:.3g} nats per token and loss.mismatch.kind is none: nothing corrects it"
        )
    if ess < limits.mismatch_ess:
        events["sampler/ess"] = (
            f"the effective sample size is {100 * ess:.3g} % (mismatch/ess): the sampler is too far from the policy"
        )
    if cut > limits.filtered_mass:
        events["sampler/filter"] = (
            f"filters remove {100 * cut:.3g} % of the probability (1 − rollout/kept_mass/mean): means are biased by up "
            "to that share of their largest value"
        )
    return {kind: {"message": message} for kind, message in events.items()}


def tool_error_event(
    metrics: Mapping[str, float], completions: Sequence[Completion], limits: GuardLimits
) -> dict[str, str] | None:
    """The fields of an event if most tool calls of a step failed: the share of failed calls and the first error."""
    share = metrics.get("tool/error_fraction", 0.0)
    if share <= limits.tool_errors:
        return None
    failed = [completion for completion in completions if completion.counts.get("tool/errors")]
    lines = (line.strip() for completion in failed for line in completion.text.splitlines())
    error = next((line for line in lines if line.startswith("error: ")), "")
    message = f"{100 * share:.0f} % of this step's tool calls were answered with an error"
    return {"message": f"{message}; the first: {error}" if error else message, "error": error}


def first_nonfinite(rows: Batch, metrics: Mapping[str, float], gradient: str | None) -> str | None:
    """The first quantity that is not finite, in the order of the computation; `gradient` names the parameter."""
    before: tuple[tuple[str, Tensor | None], ...] = (
        ("reward", rows.rewards),
        ("advantage", rows.advantages),
        ("KL penalty", rows.kl_advantages),
        ("reference log-probability", rows.ref_logp),
        ("policy log-probability", rows.old_logp),
    )
    for name, values in before:
        if values is not None:
            chosen = values[rows.action_mask] if values.shape == rows.action_mask.shape else values
            if not bool(chosen.isfinite().all()):
                return name
    for name in ("loss/policy", "loss/kl", "loss/total"):
        if not math.isfinite(metrics.get(name, 0.0)):
            return name
    return None if gradient is None else f"gradient of {gradient}"


def skipped_record(batch: StepBatch, metrics: Mapping[str, float], cause: str | None) -> dict[str, Any]:
    """The record of a skipped batch, for inspection: one entry per completion, and all metrics."""
    rows, completions = batch.rows, []
    row = 0
    for group in batch.groups:
        for completion, reward in zip(group.completions, group.rewards, strict=True):
            length = len(completion.tokens)
            completions.append(
                {
                    "problem": group.problem.key,
                    "prompt_tokens": list(group.prompt_tokens),
                    "tokens": list(completion.tokens),
                    "action": list(completion.action),
                    "text": completion.text,
                    "reward": reward.total,
                    "parts": dict(reward.parts),
                    "advantage": _row(rows.advantages, row, length),
                    "kl_advantage": _row(rows.kl_advantages, row, length),
                    "sample_logp": list(completion.sample_logp),
                    "old_logp": _row(rows.old_logp, row, length),
                    "ref_logp": _row(rows.ref_logp, row, length),
                    "stop_reason": completion.stop_reason,
                }
            )
            row += 1
    return {"first_nonfinite": cause, "metrics": dict(metrics), "completions": completions}


def _row(values: Tensor | None, row: int, length: int) -> Any:
    if values is None:
        return None
    return values[row].tolist() if values.dim() == 1 else values[row, :length].tolist()


def guard_findings(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The findings of the guards in a finished run: its stop and its rollbacks, read from the run's events."""
    stops = [event for event in events if event.get("kind") == "stop"]
    rollbacks = [event for event in events if event.get("kind") == "rollback"]
    findings = []
    if stops and events and _last(events) is stops[-1]:
        code = str(stops[-1].get("code"))
        findings.append(_finding(code, "error", _message(stops[-1])))
    if rollbacks:
        evidence = "; ".join(map(_message, rollbacks))
        findings.append(_finding("guard/rolled-back", "warning", evidence))
    return findings


def _message(event: Mapping[str, Any]) -> str:
    """An event's message, or a placeholder if it is missing: files may be edited or truncated."""
    return str(event.get("message") or f"{event.get('kind')} at step {event.get('step', '?')}, without a message")


def _last(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The last stop, rollback or resume. A run that was resumed does not count as stopped."""
    return next((event for event in reversed(events) if event.get("kind") in ("stop", "rollback", "resume")), None)


_WHY = {
    "optim/spike": (
        "Several steps in a row had gradient norms far above the running median and were skipped: the scale of the "
        "gradient has changed, or a few completions dominate every update.",
        "Look at skipped/step-N.json; set optim.max_grad_norm near the running median, or raise guards.grad_spike if "
        "the new scale is intended.",
    ),
    "optim/non-finite": (
        "Several steps in a row had a non-finite loss or gradient: overflow in the dtype, or a loss that divides by 0.",
        "skipped/step-N.json names the first non-finite quantity; lower optim.learning_rate, or set "
        "model.dtype=float32.",
    ),
    "kl/at-start": (
        "Policy and reference have equal weights before the first update, but their passes give different results.",
        "Run keel doctor on the run's config.yaml to find the cause; guards.on_step0_kl=warn continues training.",
    ),
    "sampler/mismatch": (
        "Before the first update the sampler's log-probabilities differ from the policy's training pass.",
        "Run keel doctor on the run's config.yaml to find the cause; guards.on_step0_kl=warn continues training.",
    ),
    "kl/over-budget": (
        "The KL grew faster than the KL penalty limits it.",
        "Raise kl.beta or lower optim.learning_rate; if a larger KL is intended, raise kl.budget.max and resume.",
    ),
    "guard/rolled-back": (
        "A guard rolled the run back to the last good checkpoint and lowered the learning rate.",
        "The run continued. To avoid the rollback, start with the lower optim.learning_rate or a larger kl.beta.",
    ),
}


def _finding(code: str, severity: str, evidence: str) -> dict[str, Any]:
    cause, advice = _WHY.get(code, ("A guard stopped the run.", "See the run's events.jsonl."))
    return {"code": code, "severity": severity, "evidence": evidence, "cause": cause, "advice": advice}
