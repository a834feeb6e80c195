"""Guards against non-finite numbers, gradient spikes, an exceeded KL budget, rewards without signal and a KL at step 0.

This module only evaluates a step's metrics; `rollback.py` carries out the actions. Before the first update, policy,
reference and sampler are the same model, so their KL is rounding error. The check of step 0 detects a wrong kernel,
mask or position in one of the passes. An error in both policy and reference leaves their KL at 0; the comparison with
the sampler's log-probabilities detects it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from keel.base.errors import KeelError
from keel.base.metrics import values
from keel.base.types import Batch, Completion
from keel.kl.options import KLBudget
from keel.losses import MismatchOptions, centred
from keel.models.dropout import has_dropout
from keel.models.head import causal_lm
from keel.models.precision import matmul_eps
from keel.reference import Reference, starts_at_policy
from keel.trainer.batch import StepBatch, rewards_of
from keel.trainer.measure import measure_policy
from keel.trainer.options import GuardLimits, GuardOptions
from keel.trainer.state import State, TrainingRun

NORM_WINDOW, MIN_NORMS = 50, 10  # gradient norms in the running median, and the minimum for a limit
P95_FACTOR = 2.0  # limit of the 95th percentile, as a multiple of the limit of the mean


@dataclass(frozen=True)
class GuardViolation:
    """A violation found by a guard: the finding's code, one line of evidence, and the configured action."""

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
        code = "optim/spike" if spikes else "optim/non-finite"
        causes = ["a non-finite loss or gradient"] * (not spikes) + ["a gradient spike"] * (state.spike_skips > 0)
        skips = f"{state.consecutive_skips} steps in a row, up to step {state.step}, skipped an update"
        message = f"{skips} because of {' or '.join(causes)}"
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
        message = f"the policy is not finite after the last update, in step {step}"
        return GuardViolation("optim/non-finite", message, options.on_nans)
    broken = over_budget(metrics, budget)
    if budget is None or broken is None:
        return None
    return GuardViolation("kl/over-budget", f"{broken} after the last update, in step {step}", budget.action)


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
    rewards, group = rewards_of(batch.groups)  # recomputed here, because the advantages are on the device
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
    fine = metrics["guard/skipped"] == 0.0 and within  # an overflow does not prove the weights sound
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
        return [("reward/constant", f"all completions of the last {limit} steps have the same reward")]
    if state.zero_advantages == limit:
        return [
            (
                "advantage/zero",
                f"all advantages of the last {limit} steps are 0: within each group the rewards are equal",
            )
        ]
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
            f"KL(sampler‖policy) is {gap:.3g} nats per token, and loss.mismatch.kind=none does not correct it: set it "
            "to truncate"
        )
    if ess < limits.mismatch_ess:
        events["sampler/ess"] = (
            f"the effective sample size is {100 * ess:.3g} % (mismatch/ess): the sampler differs too much from the "
            "policy"
        )
    if cut > limits.filtered_mass:
        events["sampler/filter"] = (
            f"top_p, top_k or min_p remove {100 * cut:.3g} % of the probability (1 − rollout/kept_mass/mean). A mean "
            "is biased by up to this share of its largest value"
        )
    return {kind: {"message": message} for kind, message in events.items()}


def tool_error_event(
    metrics: Mapping[str, float], completions: Sequence[Completion], limits: GuardLimits
) -> dict[str, str] | None:
    """The fields of an event (share of failed calls, first error) if over `limits.tool_errors` of the calls failed."""
    share = metrics.get("tool/error_fraction", 0.0)
    if share <= limits.tool_errors:
        return None
    failed = [completion for completion in completions if completion.counts.get("tool/errors")]
    lines = (line.strip() for completion in failed for line in completion.text.splitlines())
    error = next((line for line in lines if line.startswith("error: ")), "")
    message = f"{100 * share:.0f} % of this step's tool calls returned an error"
    return {"message": f"{message}; the first is: {error}" if error else message, "error": error}


def first_nonfinite(rows: Batch, metrics: Mapping[str, float], gradient: str | None) -> str | None:
    """The first quantity that is not finite, in the order of the computation; `gradient` names the parameter."""
    before: tuple[tuple[str, Tensor | None], ...] = (
        ("reward", rows.rewards),
        ("advantage", rows.advantages),
        ("KL penalty", rows.kl_advantages),
        ("reference log-probability", rows.ref_logp),
        ("policy log-probability", rows.old_logp),
    )
    for name, tensor in before:
        if tensor is not None:
            chosen = tensor[rows.action_mask] if tensor.shape == rows.action_mask.shape else tensor
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
                    "advantage": row_values(rows.advantages, row, length),
                    "kl_advantage": row_values(rows.kl_advantages, row, length),
                    "sample_logp": list(completion.sample_logp),
                    "old_logp": row_values(rows.old_logp, row, length),
                    "ref_logp": row_values(rows.ref_logp, row, length),
                    "stop_reason": completion.stop_reason,
                }
            )
            row += 1
    return {"first_nonfinite": cause, "metrics": dict(metrics), "completions": completions}


def row_values(values: Tensor | None, row: int, length: int) -> Any:
    """A row of values `[B]` or `[B, T]`, without its padding."""
    if values is None:
        return None
    return values[row].tolist() if values.dim() == 1 else values[row, :length].tolist()


_CHECKS = (
    (
        "kl/at-start",
        ("kl/policy_ref/k3/mean", "kl/policy_ref/exact/mean"),
        "policy and reference have equal weights but different log-probabilities. Possible causes: a kernel that is "
        "wrong at this shape, another mask or other positions in one pass, dropout, or a reference that is not the "
        "initial policy",
    ),
    (
        "sampler/mismatch",
        ("kl/sampler_policy/k3/mean",),
        "the sampler's log-probabilities differ from the policy's. Possible causes: a wrong kernel, mask or position "
        "in the training pass or in the engine, another temperature, weights that were not synced, or low precision",
    ),
)


@dataclass(frozen=True)
class Step0Limits:
    """The largest KL (nats per token) that rounding explains; None disables the check."""

    reference: float | None
    sampler: float | None


class Step0Mismatch(KeelError):
    """Raised before the first update by `guards.on_step0_kl=stop`."""

    def __init__(self, violations: Sequence[GuardViolation]) -> None:
        super().__init__(violations[0].message)
        self.violations = violations


def check_step0(batch: StepBatch, run: TrainingRun, state: State) -> None:
    """Raise before the first update if the passes disagree. With `guards.on_step0_kl=warn` the loop only logs it."""
    if state.step == 0 and run.guards.on_step0_kl == "stop":
        found = step0_differences(run.world.broadcast(values(measure_policy(batch, run))), run)
        if found:
            raise Step0Mismatch(found)


def step0_differences(metrics: Mapping[str, float], run: TrainingRun) -> list[GuardViolation]:
    """The violations in the metrics of the first step."""
    engine = run.engine
    native = engine.native or engine.shares_weights
    limits = step0_limits(
        run.policy.model,
        run.reference,
        run.limits,
        amp_dtype=run.amp_dtype,
        same_modules=engine.shares_weights,
        weighed=not native and run.loss.mismatch.kind != "none",
    )
    advice = "run keel doctor on the run's config.yaml, or set guards.on_step0_kl=warn to continue training"
    return step0_violations(metrics, limits, run.guards.on_step0_kl, advice)


def step0_limits(
    model: nn.Module,
    reference: Reference | None,
    limits: GuardLimits,
    *,
    amp_dtype: torch.dtype | None,
    same_modules: bool,
    weighed: bool,
) -> Step0Limits:
    """The limits of a run.

    `same_modules` means that the sampler uses the policy's modules. `weighed` means that importance weights correct the
    mismatch with the sampler. Dropout disables the check, because it changes the training pass. A user's own reference
    may have other weights and is not checked.
    """
    if has_dropout(model):
        return Step0Limits(None, None)
    eps = matmul_eps(model) if amp_dtype is None else torch.finfo(amp_dtype).eps
    quantized = getattr(causal_lm(model).config, "quantization_config", None) is not None
    exact = eps <= torch.finfo(torch.float32).eps and not quantized
    largest = limits.kl_at_start_fp32 if exact else limits.kl_at_start
    rounded = limits.sampler_kl_error if weighed else limits.sampler_kl_warning
    return Step0Limits(largest if starts_at_policy(reference) else None, largest if exact and same_modules else rounded)


def step0_violations(
    metrics: Mapping[str, float], limits: Step0Limits, action: str, advice: str
) -> list[GuardViolation]:
    """One violation for each KL above its limit. NaN exceeds any limit."""
    found = []
    for (code, names, causes), limit in zip(_CHECKS, (limits.reference, limits.sampler), strict=True):
        name = next((n for n in names if limit is not None and not abs(metrics.get(n, 0.0)) <= limit), None)
        if name is not None:
            figure = f"{name} is {metrics[name]:.3g} nats per token before the first update, over {limit:g}"
            found.append(GuardViolation(code, f"{figure}: {causes}; {advice}", action))
    return found
