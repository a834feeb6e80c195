"""What the loop watches: non-finite numbers, gradient spikes, a broken KL budget, rewards that say nothing.

Everything here is arithmetic on a step's numbers; `rollback.py` does what they ask for.
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

WINDOW, ENOUGH = 50, 10  # gradient norms that the running median looks back on, and those it needs to say anything
P95_FACTOR = 2.0  # the 95th percentile may be this many times the budget of the mean


@dataclass(frozen=True)
class GuardViolation:
    """What a guard has found: the finding's code, one line of evidence, and the configured action."""

    code: str
    message: str
    action: str


def budget_metric(metrics: Mapping[str, float], unit: str) -> str | None:
    """The KL that the budget is about: a sequence's, or a token's (exact where it is computed); None if unmeasured."""
    names = ["kl/policy_ref/sequence"] if unit == "per_sequence" else ["kl/policy_ref/exact", "kl/policy_ref/k3"]
    return next((name for name in names if f"{name}/mean" in metrics), None)


def may_roll_back(options: GuardOptions, budget: KLBudget | None) -> bool:
    """Whether the start is worth a checkpoint, because there may be nothing else to go back to."""
    broken = budget is not None and budget.action == "rollback"
    return options.max_rollbacks > 0 and (broken or options.on_nans == "rollback")


def over_budget(metrics: Mapping[str, float], budget: KLBudget | None) -> str | None:
    """One line that says how the budget T is broken: mean above T, p95 above 2T, or not a number; None if it is not."""
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
    """The gravest violation of a finished step, or None; one that only warns does not hide another."""
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
    """The same about the policy that the last update has left, from the numbers of `measure_final`."""
    if not math.isfinite(metrics.get("logp/policy_mean", 0.0)):
        message = f"the policy is not finite after the last update, that of step {step}"
        return GuardViolation("optim/non-finite", message, options.on_nans)
    broken = over_budget(metrics, budget)
    if budget is None or broken is None:
        return None
    return GuardViolation("kl/over-budget", f"{broken} after the last update, that of step {step}", budget.action)


def spike_limit(norms: Sequence[float], limits: GuardLimits) -> float | None:
    """`grad_spike` × the median of the last norms; None until there are enough of them."""
    return limits.grad_spike * statistics.median(norms) if len(norms) >= ENOUGH else None


def update_guard_state(
    state: State,
    metrics: Mapping[str, float],
    batch: StepBatch,
    budget: KLBudget | None,
    *,
    applied_norms: Sequence[float],
    baseline: str,
) -> State:
    """The guards' state after a step: running norms, stretches without signal, and how far back all was well."""
    totals = {reward.total for group in batch.groups for reward in group.rewards}
    rewards, group = rewards_of(batch.groups)  # the advantages are on the device
    silent = not bool(centred(rewards.float(), group, baseline).any())
    return judged_state(state, metrics, budget, applied_norms=applied_norms, constant=len(totals) == 1, silent=silent)


def judged_state(
    state: State,
    metrics: Mapping[str, float],
    budget: KLBudget | None,
    *,
    applied_norms: Sequence[float],
    constant: bool,
    silent: bool,
) -> State:
    """The same, given whether all rewards of the step were one number, and whether no group's rewards differed.

    Only norms of updates that were made count: spikes that were skipped must not become the usual. The
    numbers of step N are those of the weights after N − 1 updates, so a fine step N vouches for `step-{N−1}`.
    """
    broken = over_budget(metrics, budget) is not None
    measured = budget is None or budget_metric(metrics, budget.unit) is not None
    within = measured and (not broken or (budget is not None and budget.action == "warn"))
    fine = metrics["guard/skipped"] == 0.0 and within
    return replace(
        state,
        norms=(*state.norms, *applied_norms)[-WINDOW:],
        over_budget=broken if measured else state.over_budget,
        confirmed=state.step - 1 if fine else state.confirmed,
        constant_rewards=state.constant_rewards + 1 if constant else 0,
        zero_advantages=state.zero_advantages + 1 if silent else 0,
    )


def no_signal_events(state: State, options: GuardOptions) -> list[tuple[str, str]]:
    """(kind, message) of a stretch of steps without signal, once it is long enough to be reported."""
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
    """Kind → fields of the events on what was sampled otherwise than it is trained: by how much, and what holds it."""
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
            f"KL(sampler‖policy) is {gap:.3g} nats per token and loss.mismatch.kind is none: nothing weighs the samples"
        )
    if ess < limits.mismatch_ess:
        events["sampler/ess"] = (
            f"the weights of the samples leave {100 * ess:.3g} % of them effective (mismatch/ess): the sampler is too "
            "far from the policy"
        )
    if cut > limits.filtered_mass:
        events["sampler/filter"] = (
            f"filters cut off {100 * cut:.3g} % of the probability (1 − rollout/kept_mass/mean): means are biased "
            "by up to that share of their largest value"
        )
    return {kind: {"message": message} for kind, message in events.items()}


def tool_error_event(
    metrics: Mapping[str, float], completions: Sequence[Completion], limits: GuardLimits
) -> dict[str, str] | None:
    """The fields of an event where most tool calls of a step failed: how many, and the first error."""
    share = metrics.get("tool/error_fraction", 0.0)
    if share <= limits.tool_errors:
        return None
    failed = [completion for completion in completions if completion.counts.get("tool/errors")]
    lines = (line.strip() for completion in failed for line in completion.text.splitlines())
    error = next((line for line in lines if line.startswith("error: ")), "")
    message = f"{100 * share:.0f} % of this step's tool calls were answered with an error"
    return {"message": f"{message}; the first: {error}" if error else message, "error": error}


def first_nonfinite(rows: Batch, metrics: Mapping[str, float], gradient: str | None) -> str | None:
    """What was not finite first, in the order of the computation; `gradient` is the parameter whose gradient was."""
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
    """A batch whose update was skipped, for whoever wants to know why: a record a completion, and all metrics."""
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
    """The guards' findings on a finished run, from its events: why it was stopped, and its rollbacks."""
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
    """What an event says, or that it says nothing: files are edited, and cut by kills."""
    return str(event.get("message") or f"{event.get('kind')} at step {event.get('step', '?')}, without a message")


def _last(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The last event that says where the run went: a stop that was resumed from is no longer how it ended."""
    return next((event for event in reversed(events) if event.get("kind") in ("stop", "rollback", "resume")), None)


_WHY = {
    "optim/spike": (
        "Gradient norms far above their running median, step after step, were skipped: the gradient has another size "
        "than before, or a few completions rule every update.",
        "Look at skipped/step-N.json; set optim.max_grad_norm near the running median, or raise guards.grad_spike if "
        "the new size is meant.",
    ),
    "optim/non-finite": (
        "The loss or its gradient was not finite, step after step: numbers too large for their type, or a loss that "
        "divides by what can be 0.",
        "Look at skipped/step-N.json for what was not finite first; lower optim.learning_rate, or set "
        "model.dtype=float32.",
    ),
    "kl/at-start": (
        "Policy and reference have equal weights before the first update, and their passes give different numbers.",
        "Run keel doctor on the run's config.yaml, which tells the causes apart; guards.on_step0_kl=warn trains on.",
    ),
    "sampler/mismatch": (
        "Before the first update the sampler's log-probabilities are not those of the policy's training pass.",
        "Run keel doctor on the run's config.yaml, which tells the causes apart; guards.on_step0_kl=warn trains on.",
    ),
    "kl/over-budget": (
        "The policy left its reference faster than the KL term pulled it back.",
        "Raise kl.beta or lower optim.learning_rate; if the distance is wanted, raise kl.budget.max and resume.",
    ),
    "guard/rolled-back": (
        "A guard found the run in trouble and took it back to the last good checkpoint with a lower learning rate.",
        "The run went on; to avoid the detour, start with the lower optim.learning_rate or a larger kl.beta.",
    ),
}


def _finding(code: str, severity: str, evidence: str) -> dict[str, Any]:
    cause, advice = _WHY.get(code, ("A guard stopped the run.", "See the run's events.jsonl."))
    return {"code": code, "severity": severity, "evidence": evidence, "cause": cause, "advice": advice}
