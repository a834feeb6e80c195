"""The check before the first update: policy, reference and sampler are one policy, and their KL is rounding.

An error of a kernel, a mask or positions in one of the passes shows here, before anything is trained on it. An error
that policy and reference share leaves their KL at 0: that is what the sampler's log-probabilities are compared for.
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
        "policy and reference have equal weights and give different numbers: a kernel that is wrong at this shape, "
        "another mask or other positions in one of the passes, dropout, or a reference that is not the start",
    ),
    (
        "sampler/mismatch",
        ("kl/sampler_policy/k3/mean",),
        "the sampler's log-probabilities are not the policy's: a wrong kernel, mask or position in the training pass "
        "or in the engine, another temperature, weights that were not synced, or too few bits",
    ),
)


@dataclass(frozen=True)
class StartLimits:
    """The largest KL in nats per token that rounding explains; None where it may be larger for a good reason."""

    reference: float | None
    sampler: float | None


class StartMismatch(KeelError):
    """Ends a step before its update: what `guards.on_step0_kl=stop` found."""

    def __init__(self, violations: Sequence[GuardViolation]) -> None:
        super().__init__(violations[0].message)
        self.violations = violations


def check_start(batch: StepBatch, run: TrainingRun, state: State) -> None:
    """Stop before the first update if the passes disagree; `guards.on_step0_kl=warn` is the loop's to log."""
    if state.step == 0 and run.guards.on_step0_kl == "stop":
        found = differences_at_start(run.world.broadcast(values(measure_policy(batch, run))), run)
        if found:
            raise StartMismatch(found)


def differences_at_start(metrics: Mapping[str, float], run: TrainingRun) -> list[GuardViolation]:
    """What the metrics of the first step show about a run of Keel's own trainer."""
    engine = run.engine
    native = engine.native or engine.shares_weights
    limits = start_limits(
        run.policy.model,
        run.reference,
        run.limits,
        amp_dtype=run.amp_dtype,
        same_modules=engine.shares_weights,
        weighed=not native and run.loss.mismatch.kind != "none",
    )
    advice = "next: keel doctor on the run's config.yaml, or guards.on_step0_kl=warn to train on"
    return start_violations(metrics, limits, run.guards.on_step0_kl, advice)


def start_limits(
    model: nn.Module,
    reference: Reference | None,
    limits: GuardLimits,
    *,
    amp_dtype: torch.dtype | None,
    same_modules: bool,
    weighed: bool,
) -> StartLimits:
    """The limits of a run; the sampler computes with the policy's `same_modules`, or its mismatch is `weighed`.

    With dropout the training pass differs from both others. A reference of the user's own may have other weights.
    """
    if has_dropout(model):
        return StartLimits(None, None)
    eps = matmul_eps(model) if amp_dtype is None else torch.finfo(amp_dtype).eps
    quantized = getattr(causal_lm(model).config, "quantization_config", None) is not None
    exact = eps <= torch.finfo(torch.float32).eps and not quantized
    largest = limits.kl_at_start_fp32 if exact else limits.kl_at_start
    rounded = limits.sampler_kl_error if weighed else limits.sampler_kl_warning
    return StartLimits(largest if starts_at_policy(reference) else None, largest if exact and same_modules else rounded)


def start_violations(
    metrics: Mapping[str, float], limits: StartLimits, action: str, advice: str
) -> list[GuardViolation]:
    """The KLs over their limits; NaN is over any."""
    found = []
    for (code, names, causes), limit in zip(_CHECKS, (limits.reference, limits.sampler), strict=True):
        name = next((n for n in names if limit is not None and not abs(metrics.get(n, 0.0)) <= limit), None)
        if name is not None:
            figure = f"{name} is {metrics[name]:.3g} nats per token before the first update, over {limit:g}"
            found.append(GuardViolation(code, f"{figure}: {causes}; {advice}", action))
    return found
