"""Every option with its default, its range and a sentence that names its unit: the data that the rest reads.

A section is a frozen model that refuses keys it does not know. Sections that name a part (`Part`) keep the part's own
parameters beside its name; `checks.py` holds them against the part's signature. What goes into a step: `sources.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from keel.config.fields import Above0, Count, Flag, Float, Int, NotNegative, Part, Positive, Section, Share, as_number
from keel.config.sources import Data, Model, Reward, RewardPart, Rollout, TaskSpec, Warmstart


class Run(Section):
    """What the run is called, where it is written, how long it is."""

    name: str = Field(default="default", min_length=1, description="Name of the run and of its folder inside run.dir.")
    dir: str = Field(default="runs", min_length=1, description="Folder that holds the runs.")
    seed: Int = Field(
        default=0, description="Seed of weights, problems and sampling noise; equal seeds give equal runs."
    )
    max_steps: Positive = Field(default=100, description="Steps to train, each one batch of rollouts.")
    if_exists: Literal["refuse", "resume", "replace"] = Field(
        default="refuse",
        description="What to do with a run folder that holds a run already: refuse, resume or replace it.",
    )


class ControllerSpec(Part):
    """The controller of β and its own parameters."""

    name: str = Field(
        default="fixed",
        description="fixed, warmup, linear, cosine, step, ziegler, dual, pid; its parameters beside it.",
    )


class Budget(Section):
    """The KL that a run may spend: its mean may not pass `max`, its 95th percentile not twice that."""

    max: Above0 = Field(description="Largest mean KL to the reference, in `unit`.")
    unit: Literal["per_token", "per_sequence"] = Field(
        default="per_token", description="Nats per token or per sequence."
    )
    action: Literal["warn", "stop", "rollback"] = Field(default="stop", description="What happens when it is broken.")


def _budget(value: Any) -> Any:
    """A bare number is the largest mean KL in nats per token."""
    value = as_number(value) if not isinstance(value, dict) else value
    return {"max": value} if isinstance(value, int | float) else value


class KL(Section):
    """The KL term: how it is estimated, where it acts, how strongly."""

    beta: NotNegative = Field(
        default=0.0, description="Coefficient of the KL penalty; 0 means none, KL is still measured."
    )
    estimator: str = Field(
        default="k3", description="Estimator of the penalty: k1, k2, k3, abs, exact, exact_reverse, or module:attr."
    )
    gradient: str = Field(default="auto", description="Gradient form; auto picks one that is right for this pairing.")
    placement: Literal["loss", "reward", "advantage"] = Field(default="loss", description="Where the penalty enters.")
    level: Literal["token", "sequence"] = Field(
        default="token", description="A token answers for its own KL, or for that of the sequence."
    )
    reduction: Literal["token_mean", "loss"] = Field(
        default="token_mean",
        description="Mean over all action tokens, so β means the same under every loss; or the loss's own.",
    )
    log_ratio_clamp: Above0 | None = Field(
        default=20.0, description="Log-ratios are held within ± this many nats; null for no limit."
    )
    ratio_cap: Annotated[Float, Field(ge=1)] | None = Field(
        default=None,
        description="Largest importance weight of the KL term when a batch serves several updates; null: none.",
    )
    exact: Flag = Field(
        default=False, description="Also compute the exact KL over the whole vocabulary, nats per token."
    )
    measure_every: Count = Field(default=1, description="Steps between measurements of the KL; 0 is never.")
    collect_max: Above0 | None = Field(
        default=None,
        description="A completion above this KL (nats per token) leaves the policy term and keeps its KL penalty.",
    )
    allow_biased: Flag = Field(default=False, description="Run pairings whose expected gradient is zero or wrong.")
    controller: ControllerSpec = Field(default=ControllerSpec(), description="What sets β over time.")
    budget: Annotated[Budget | None, BeforeValidator(_budget)] = Field(
        default=None, description="Largest KL of the run: nats per token, or {max, unit, action}; null for no limit."
    )

    @property
    def penalizes(self) -> bool:
        """Whether β is ever above 0: from the start, or because a controller may raise it."""
        return self.beta > 0 or self.controller.name != "fixed"

    @property
    def needs_exact(self) -> bool:
        """Whether the full-vocabulary KL is computed, because it is asked for or because the penalty is made of it."""
        return self.exact or self.estimator.startswith("exact")


class ReferenceSpec(Part):
    """The reference and its own parameters."""

    kind: str = Field(
        default="auto",
        description="auto, frozen, adapter_off (a fresh adapter's base; of a continued or warm-started one where it "
        "starts), ema, snapshot, kl_triggered, or a user's module:attr.",
    )


class Mismatch(Section):
    """Weights that repair the difference between the engine that sampled and the model that trains."""

    kind: Literal["none", "truncate", "mask", "icepop"] = Field(
        default="truncate", description="Truncate the weight, mask what is above the cap, or mask outside [floor, cap]."
    )
    cap: Annotated[Float, Field(ge=1)] = Field(default=2.0, description="Largest weight, a ratio of probabilities.")
    floor: Share | None = Field(default=None, description="Smallest weight under icepop, a ratio of probabilities.")
    level: Literal["token", "sequence"] = Field(default="token", description="Weights per token or per sequence.")


class Loss(Section):
    """The policy loss."""

    loss_type: str = Field(
        default="grpo",
        description="policy_gradient, grpo, bnpo, dr_grpo, dapo, gspo, cispo, gmpo, sapo, or module:attr.",
    )
    epsilon: NotNegative | None = Field(
        default=None, description="Clip range below 1, a ratio; null is the loss's own."
    )
    epsilon_high: NotNegative | None = Field(
        default=None, description="Clip range above 1 (cispo: the cap itself); null is epsilon, or the loss's own."
    )
    delta: Above0 | None = Field(default=None, description="Cap of the ratio on the unclipped side; null for none.")
    scale_rewards: Literal["group", "batch", "none"] | None = Field(
        default=None,
        description="Divide advantages by the group's or the batch's deviation, or not; null is the loss's own.",
    )
    baseline: Literal["group_mean", "leave_one_out", "none"] = Field(
        default="group_mean", description="What a reward is compared with: its group's mean, the others' mean, or 0."
    )
    importance_sampling_level: Literal["token", "sequence"] | None = Field(
        default=None, description="Ratios per token or per sequence; null is the loss's own."
    )
    num_iterations: Positive = Field(default=1, description="Passes of updates over each batch of rollouts.")
    mask_truncated_completions: Flag = Field(
        default=False, description="Leave completions that were cut off out of the policy term; their KL penalty stays."
    )
    dynamic_sampling: Flag = Field(
        default=False, description="Sample further problems in place of groups with equal rewards; their KL stays."
    )
    dynamic_sampling_rounds: Positive = Field(default=3, description="Most further rounds of sampling a step.")
    entropy_coef: NotNegative = Field(default=0.0, description="Coefficient of the entropy bonus, per nat per token.")
    sapo_temperature_pos: Above0 = Field(
        default=1.0, description="Steepness of sapo's gate where the advantage is positive."
    )
    sapo_temperature_neg: Above0 = Field(default=1.05, description="Steepness of sapo's gate where it is negative.")
    mismatch: Mismatch = Field(default=Mismatch(), description="Correction of the sampler's mismatch.")


class Optim(Section):
    """The optimizer and how a batch is cut."""

    optimizer: Literal["adamw", "adamw8bit"] = Field(
        default="adamw",
        description="AdamW, fused where the device allows it, or with 8-bit moments (needs bitsandbytes).",
    )
    learning_rate: Above0 = Field(default=1.0e-6, description="Peak step size.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="Course of the learning rate after its warm-up."
    )
    warmup_steps: Count = Field(default=0, description="Steps over which the learning rate rises from 0.")
    decay_steps: Positive | None = Field(
        default=None,
        description="Step at which the decay ends; null is the run.max_steps that the run was begun with.",
    )
    final_ratio: Share = Field(default=0.0, description="Learning rate at the decay's end, as a share of its peak.")
    betas: tuple[Share, Share] = Field(
        default=(0.9, 0.999), description="Decay rates of AdamW's two moments, per update."
    )
    eps: Above0 = Field(default=1e-8, description="Added to AdamW's denominator.")
    weight_decay: NotNegative = Field(default=0.0, description="Decoupled weight decay, per unit of learning rate.")
    max_grad_norm: Above0 | None = Field(
        default=1.0, description="Gradients are scaled down to this norm; null for no limit."
    )
    minibatches: Positive = Field(default=1, description="Parts into which a step's groups are cut, one update each.")
    microbatch_tokens: Positive = Field(
        default=8192, description="Tokens a pass holds at most; gradients are accumulated."
    )
    precision: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Type of the mixed-precision passes; auto is the weights' own type."
    )
    offload: Flag = Field(default=False, description="Keep the optimizer's state in the CPU's memory between updates.")


class Eval(Section):
    """Evaluation on held-out problems."""

    every: Count = Field(
        default=20, description="Steps between evaluations; 0 evaluates at the start and the end only."
    )
    tasks: tuple[TaskSpec | str, ...] = Field(
        default=(), description="Further tasks to evaluate (retention), names or {name, …}."
    )
    samples: Positive = Field(default=64, description="Held-out problems a task.")
    k: tuple[Positive, ...] = Field(default=(1, 8), min_length=1, description="pass@k, in completions a problem.")
    temperature: NotNegative | None = Field(
        default=None, description="Sampling temperature; 0 is greedy; null the rollout's."
    )


class Guards(Section):
    """What the loop does when numbers go wrong."""

    max_consecutive_nans: Positive = Field(
        default=5, description="Steps in a row with a skipped update that call for on_nans."
    )
    on_nans: Literal["rollback", "stop", "warn"] = Field(
        default="rollback",
        description="Back to the last good checkpoint after them, a clean stop there, or an event and no more.",
    )
    recovery_lr_factor: Annotated[Float, Field(gt=0, le=1)] = Field(
        default=0.5, description="Factor of the learning rate after each rollback; they multiply."
    )
    max_rollbacks: Count = Field(
        default=3, description="Rollbacks before the run stops; with 0 on_nans=rollback stops at once."
    )
    grad_spike: Annotated[Float, Field(gt=1)] = Field(
        default=10.0, description="A gradient norm above this many running medians is a spike."
    )
    on_spike: Literal["warn", "skip"] = Field(default="warn", description="Say so, or also skip that update.")
    constant_steps: Count = Field(
        default=10, description="Steps in a row with one and the same reward before it is said; 0 is never."
    )


class Wandb(Section):
    """Weights & Biases."""

    project: str = Field(default="keel", description="Project of the run.")
    name: str | None = Field(default=None, description="Name of the run; null is run.name.")
    entity: str | None = Field(default=None, description="User or team; null is the login's own.")
    mode: Literal["online", "offline", "disabled"] | None = Field(
        default=None, description="Whether anything is sent; null is as the environment says."
    )
    id: str | None = Field(
        default=None, description="Id of the run to continue; null for a new one, kept over resumes."
    )
    group: str | None = Field(default=None, description="Group of runs that belong together.")
    tags: tuple[str, ...] | None = Field(default=None, description="Tags of the run.")


def _wandb(value: Any) -> Any:
    """true is the defaults, a word is the project."""
    if isinstance(value, bool):
        return {} if value else None
    return {"project": value} if isinstance(value, str) else value


class LoggerSpec(Part):
    """A user's logger and its own parameters."""

    name: str = Field(min_length=1, description="The logger, a user's module:attr.")


class Log(Section):
    """Where metrics go besides metrics.jsonl, which is always written."""

    tensorboard: Flag = Field(default=True, description="Write TensorBoard events to the run's tensorboard folder.")
    wandb: Annotated[Wandb | None, BeforeValidator(_wandb)] = Field(
        default=None, description="Weights & Biases: null, true, a project, or its settings."
    )
    console: Literal["auto", "rich", "plain", "none"] = Field(
        default="auto", description="Live display on a terminal, plain lines elsewhere; or one of them, or nothing."
    )
    rollouts_every: Count = Field(default=1, description="Steps between entries of rollouts.jsonl; 0 is never.")
    extra: tuple[LoggerSpec | str, ...] = Field(default=(), description="Further loggers, module:attr or {name, …}.")


class DoctorThresholds(Part):
    """Alarm thresholds by name, those of docs/doctor.md; an alarm made less sensitive is shown in the report."""


class Doctor(Section):
    """What `keel doctor` and the findings of a run go by."""

    thresholds: Annotated[DoctorThresholds, BeforeValidator(lambda value: value or {})] = Field(
        default=DoctorThresholds(), description="Thresholds that differ from the shipped ones, name: value."
    )


class Checkpoint(Section):
    """Checkpoints, from which a run resumes exactly."""

    every: Positive = Field(default=50, description="Steps between checkpoints; the last step always has one.")
    keep: Positive = Field(default=3, description="Checkpoints kept, the last good one always among them.")
    best: Flag = Field(default=True, description="Also keep the checkpoint with the best evaluation.")


class Config(Section):
    """The whole configuration of a run, checked; build it with `load_config`."""

    run: Run = Field(default=Run(), description="What the run is called, where it is written, how long it is.")
    model: Model = Field(default=Model(), description="The policy.")
    warmstart: Warmstart | None = Field(
        default=None, description="Supervised start whose result is the reference; null for none."
    )
    task: TaskSpec = Field(default=TaskSpec(), description="The task, with its own parameters beside its name.")
    data: Data = Field(default=Data(), description="Problems from a file or a hub, for tasks that read data.")
    rewards: tuple[RewardPart, ...] = Field(
        default=(RewardPart(),), min_length=1, description="Rewards, each {name, weight, …}."
    )
    reward: Reward = Field(default=Reward(), description="How rewards are combined, and what happens when one fails.")
    rollout: Rollout = Field(default=Rollout(), description="How completions are sampled.")
    kl: KL = Field(default=KL(), description="The KL term: how it is estimated, where it acts, how strongly.")
    reference: ReferenceSpec = Field(default=ReferenceSpec(), description="The policy that the KL is measured against.")
    loss: Loss = Field(default=Loss(), description="The policy loss.")
    optim: Optim = Field(default=Optim(), description="The optimizer and how a batch is cut.")
    eval: Eval = Field(default=Eval(), description="Evaluation on held-out problems.")
    guards: Guards = Field(default=Guards(), description="What the loop does when numbers go wrong.")
    log: Log = Field(default=Log(), description="Where metrics go besides metrics.jsonl, which is always written.")
    checkpoint: Checkpoint = Field(default=Checkpoint(), description="Checkpoints, from which a run resumes exactly.")
    doctor: Doctor = Field(default=Doctor(), description="What the findings of a run go by.")

    @property
    def off_policy(self) -> bool:
        """Whether a batch serves several updates, so that all but the first see an older policy's samples."""
        return self.loss.num_iterations > 1 or self.optim.minibatches > 1

    @property
    def needs_reference(self) -> bool:
        """Whether any pass of the reference is ever spent: never at β = 0 without measurements."""
        return self.kl.penalizes or self.kl.measure_every > 0

    def to_dict(self) -> dict[str, Any]:
        """Plain data (dicts, lists, numbers, strings) that loads to this configuration again."""
        return plain(self.model_dump())


def plain(value: Any) -> Any:
    """The same data with lists for tuples, as YAML and JSON have them."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value
