"""The check before the first update: policy, reference and sampler are the same model, so their KL is rounding error.

It detects a wrong kernel, mask or position in one of the passes. An error in both policy and reference leaves their KL
at 0. The comparison with the sampler's log-probabilities detects such an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from keel.base.errors import KeelError
from keel.base.metrics import values
from keel.models.dropout import has_dropout
from keel.models.dtypes import matmul_eps
from keel.models.head import causal_lm
from keel.reference import Reference, starts_at_policy
from keel.trainer.batch import StepBatch
from keel.trainer.guards import GuardViolation
from keel.trainer.measure import measure_policy
from keel.trainer.options import GuardLimits
from keel.trainer.state import State, TrainingRun

_CHECKS = (
    (
        "kl/at-start",
        ("kl/policy_ref/k3/mean", "kl/policy_ref/exact/mean"),
        "policy and reference have equal weights but different log-probabilities: a kernel that is wrong at this "
        "shape, a different mask or different positions in one pass, dropout, or a reference that is not the initial "
        "policy",
    ),
    (
        "sampler/mismatch",
        ("kl/sampler_policy/k3/mean",),
        "the sampler's log-probabilities differ from the policy's: a wrong kernel, mask or position in the training "
        "pass or in the engine, another temperature, weights that were not synced, or too low a precision",
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
    advice = "next: keel doctor on the run's config.yaml, or guards.on_step0_kl=warn to continue training"
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
    """The violations of KLs above their limits. NaN is above any limit."""
    found = []
    for (code, names, causes), limit in zip(_CHECKS, (limits.reference, limits.sampler), strict=True):
        name = next((n for n in names if limit is not None and not abs(metrics.get(n, 0.0)) <= limit), None)
        if name is not None:
            figure = f"{name} is {metrics[name]:.3g} nats per token before the first update, over {limit:g}"
            found.append(GuardViolation(code, f"{figure}: {causes}; {advice}", action))
    return found
