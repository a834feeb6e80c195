"""Options of the trainer: `optim`, `guards`, `checkpoint`, `warmstart`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from pydantic import Field

from keel.base.errors import KeelError
from keel.base.options import (
    Flag,
    Float,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    Options,
    PositiveFloat,
    PositiveInt,
    RequiresOption,
)
from keel.envs.options import TaskOptions


class OptimOptions(Options):
    """The optimizer, and the split of a batch into updates and passes."""

    optimizer: Literal["adamw", "adamw8bit"] = Field(
        default="adamw",
        description="adamw (fused if the device supports it), or adamw8bit with 8-bit moments (needs bitsandbytes).",
    )
    learning_rate: PositiveFloat = Field(default=1.0e-6, description="Peak learning rate.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Schedule of the learning rate after its warm-up."
    )
    warmup_steps: NonNegativeInt = Field(default=0, description="Steps over which the learning rate rises from 0.")
    decay_steps: Annotated[PositiveInt | None, RequiresOption("schedule", ("linear", "cosine"))] = Field(
        default=None,
        description="Step at which the decay ends; null: the value of run.max_steps at the start of the run.",
    )
    final_ratio: Fraction = Field(default=0.0, description="Learning rate after the decay, as a fraction of its peak.")
    betas: tuple[Fraction, Fraction] = Field(
        default=(0.9, 0.999), description="Decay rates of AdamW's two moments, per update."
    )
    eps: PositiveFloat = Field(default=1e-8, description="Added to AdamW's denominator.")
    weight_decay: NonNegativeFloat = Field(
        default=0.0, description="Decoupled weight decay, per unit of learning rate."
    )
    max_grad_norm: PositiveFloat | None = Field(
        default=1.0, description="Gradients are scaled down to this norm; null for no limit."
    )
    minibatches: PositiveInt = Field(
        default=1, description="Parts into which a step's groups are split, one update each."
    )
    microbatch_tokens: PositiveInt = Field(
        default=8192,
        description="Largest number of tokens in a pass, fewer if a GPU lacks memory; gradients are accumulated.",
    )
    precision: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Dtype of mixed-precision passes; auto is the dtype of the weights."
    )
    offload: Flag = Field(default=False, description="Keep the optimizer's state in CPU memory between updates.")


def check_optim(optim: OptimOptions) -> None:
    """Refuse betas of 1 and above."""
    if any(beta >= 1 for beta in optim.betas):
        raise KeelError(f"optim.betas is {list(optim.betas)}: both must be below 1")


def warmup_within(optim: OptimOptions, total_steps: int) -> int:
    """The steps of the warm-up. It ends at least one step before a decay ends, so that the rate reaches its peak."""
    if optim.schedule == "constant":
        return optim.warmup_steps
    return min(optim.warmup_steps, (optim.decay_steps or total_steps) - 1)


class ParallelOptions(Options):
    """How weights are sharded over several devices; `keel train --nproc N` starts such a run."""

    sharding: Literal["auto", "none", "full", "hybrid"] = Field(
        default="auto",
        description="none: every device has all weights. full: weights are sharded over all devices. hybrid: weights "
        "are sharded within groups of shard_size devices. auto: the first of none, hybrid and full that fits.",
    )
    shard_size: Annotated[PositiveInt | None, RequiresOption("sharding", ("hybrid",))] = Field(
        default=None,
        description="With hybrid: devices that share one copy of the weights; null: the devices of one machine.",
    )
    offload: Annotated[Flag, RequiresOption("sharding", ("auto", "full", "hybrid"))] = Field(
        default=False, description="Keep sharded weights, gradients and moments in CPU memory between passes."
    )


class RayOptions(Options):
    """The parts of a run that `keel train --on ray` places on the cluster."""

    trainers: PositiveInt = Field(
        default=1,
        description="Number of trainer processes, each with its own GPU if there are GPUs; --nproc sets it too.",
    )
    samplers: NonNegativeInt = Field(
        default=1, description="Number of vLLM servers that sample; 0: the trainers sample with rollout.engine."
    )
    trainer_cpus: PositiveFloat = Field(default=1.0, description="CPUs, and thus threads, of each trainer process.")
    sampler_cpus: PositiveFloat = Field(default=1.0, description="CPUs, and thus threads, of each sampler.")
    max_restarts: NonNegativeInt = Field(default=3, description="Maximum number of restarts of each sampler.")
    sampler_python: str | None = Field(
        default=None,
        description="Python interpreter of the samplers, with Keel and vLLM; null: the interpreter of Ray's nodes.",
    )


class GuardOptions(Options):
    """The actions of the loop on non-finite numbers, spikes and other faults."""

    max_consecutive_nans: PositiveInt = Field(
        default=5, description="Consecutive steps with a skipped update before on_nans applies."
    )
    on_nans: Literal["rollback", "stop", "warn"] = Field(
        default="rollback",
        description="After max_consecutive_nans steps: roll back to the last good checkpoint, stop there, or only log.",
    )
    recovery_lr_factor: Annotated[Float, Field(gt=0, le=1)] = Field(
        default=0.5, description="Each rollback multiplies the learning rate by this factor."
    )
    max_rollbacks: NonNegativeInt = Field(
        default=3,
        description="Maximum number of rollbacks before a stop. With 0, on_nans=rollback stops at once.",
    )
    grad_spike: Annotated[Float, Field(gt=1)] = Field(
        default=10.0, description="A gradient norm above this multiple of the running median is a spike."
    )
    on_spike: Literal["warn", "skip"] = Field(default="warn", description="Log the spike, or also skip that update.")
    on_step0_kl: Literal["stop", "warn"] = Field(
        default="stop",
        description="Stop or warn if policy, reference and sampler disagree before the first update.",
    )
    constant_steps: NonNegativeInt = Field(
        default=10,
        description="Log an event after this many consecutive steps with equal rewards or zero advantages; 0: never.",
    )


@dataclass(frozen=True)
class GuardLimits:
    """The limits of the guards. `doctor.thresholds` sets the limits of the same names.

    `keel doctor --verbose` and the reference of findings list units and reasons.
    """

    kl_at_start: float = 1e-3
    kl_at_start_fp32: float = 1e-6
    sampler_kl_warning: float = 0.01
    sampler_kl_error: float = 0.1
    mismatch_ess: float = 0.3
    filtered_mass: float = 0.1
    tool_errors: float = 0.5
    grad_spike: float = GuardOptions.model_fields["grad_spike"].default

    @classmethod
    def of(cls, guards: GuardOptions, thresholds: Mapping[str, Any]) -> GuardLimits:
        """The limits of a run, from `guards.grad_spike` and `doctor.thresholds`."""
        given = {field.name: float(thresholds[field.name]) for field in fields(cls) if field.name in thresholds}
        return cls(**{"grad_spike": guards.grad_spike, **given})


class CheckpointOptions(Options):
    """Checkpoints, from which a run resumes exactly."""

    every: PositiveInt = Field(default=50, description="Steps between checkpoints; the last step always has one.")
    keep: PositiveInt = Field(
        default=3, description="Number of last checkpoints to keep; the last good one is always kept."
    )
    best: Flag = Field(default=True, description="Also keep the checkpoint with the best evaluation.")


class WarmstartOptions(Options):
    """An SFT warm start on gold answers; its result is the reference."""

    task: tuple[TaskOptions | str, ...] = Field(
        default=(),
        description="Tasks whose gold answers to train on, as names or {name, …}; empty: the run's own task.",
    )
    path: str | None = Field(
        default=None, description="JSONL file with prompt and completion to train on, instead of tasks."
    )
    steps: PositiveInt = Field(default=200, description="SFT updates.")
    batch_size: PositiveInt = Field(default=64, description="Examples per update.")
    learning_rate: PositiveFloat = Field(default=1e-3, description="Peak learning rate of the warm start.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="cosine", description="Schedule of the learning rate over the warm start's steps."
    )
    warmup_steps: NonNegativeInt = Field(default=10, description="Steps over which the learning rate rises from 0.")
    weight_decay: NonNegativeFloat = Field(
        default=0.0, description="Decoupled weight decay of AdamW, per unit of learning rate."
    )
    max_grad_norm: PositiveFloat | None = Field(
        default=1.0, description="Gradients are scaled down to this norm; null for no limit."
    )
    entropy_coef: NonNegativeFloat = Field(
        default=0.0,
        description="Weight of an entropy bonus. Above 0 the policy keeps more entropy, so completions differ more.",
    )

    @property
    def optim(self) -> OptimOptions:
        """The optimizer options of the warm start: this section's values, and defaults of `optim` for the others."""
        return OptimOptions(**self.model_dump(include=set(OptimOptions.model_fields)))
