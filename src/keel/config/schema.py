"""The configuration, composed of the option classes that the packages declare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from keel.base.options import Int, Options, PluginOptions, PositiveInt
from keel.envs.options import DataOptions, RewardOptions, RewardPartOptions, TaskOptions
from keel.eval.options import EvalOptions
from keel.kl.options import KLOptions
from keel.loggers.options import LogOptions
from keel.losses.options import LossOptions
from keel.models.options import ModelOptions
from keel.reference.options import ReferenceOptions
from keel.rollout.options import RolloutOptions
from keel.trainer.options import (
    CheckpointOptions,
    GuardOptions,
    OptimOptions,
    ParallelOptions,
    RayOptions,
    WarmstartOptions,
)


class RunOptions(Options):
    """Name, folder, seed and length of the run."""

    name: str = Field(default="default", min_length=1, description="Name of the run and of its folder in run.dir.")
    dir: str = Field(default="runs", min_length=1, description="Folder that holds the runs.")
    seed: Int = Field(
        default=0, description="Seed of weights, problems and sampling noise; equal seeds give equal runs."
    )
    max_steps: PositiveInt = Field(default=100, description="Number of training steps, each one batch of rollouts.")
    if_exists: Literal["refuse", "resume", "replace"] = Field(
        default="refuse",
        description="If the folder already holds a run: refuse to start, resume it, or replace it.",
    )


class DoctorThresholds(PluginOptions):
    """Thresholds of the doctor by name (docs/doctor.md). The report lists those made less sensitive."""

    named_by = ""


class DoctorOptions(Options):
    """Options of `keel doctor` and of a run's findings."""

    thresholds: Annotated[DoctorThresholds, BeforeValidator(lambda value: value or {})] = Field(
        default=DoctorThresholds(), description="Overrides of the default thresholds, name: value."
    )


class Config(Options):
    """The checked configuration of a run. Build it with `load_config`."""

    run: RunOptions = Field(default=RunOptions(), description="Name, folder, seed and length of the run.")
    model: ModelOptions = Field(default=ModelOptions(), description="The policy.")
    warmstart: WarmstartOptions | None = Field(
        default=None,
        description="SFT warm start; its result is the reference unless reference.model is set. null: none.",
    )
    task: TaskOptions = Field(default=TaskOptions(), description="The task: its name and its parameters.")
    data: DataOptions = Field(
        default=DataOptions(), description="Problems from a file or a hub, for tasks that read data."
    )
    rewards: tuple[RewardPartOptions, ...] = Field(
        default=(RewardPartOptions(),), min_length=1, description="Rewards, each {name, weight, …}."
    )
    reward: RewardOptions = Field(
        default=RewardOptions(), description="How rewards are combined and how errors in them are handled."
    )
    rollout: RolloutOptions = Field(default=RolloutOptions(), description="How completions are sampled.")
    kl: KLOptions = Field(
        default=KLOptions(), description="The KL term: estimator, placement, coefficient and controller."
    )
    reference: ReferenceOptions = Field(
        default=ReferenceOptions(), description="The policy that the KL is measured against."
    )
    loss: LossOptions = Field(default=LossOptions(), description="The policy loss.")
    optim: OptimOptions = Field(
        default=OptimOptions(), description="The optimizer and the split of a batch into updates."
    )
    eval: EvalOptions = Field(default=EvalOptions(), description="Evaluation on held-out problems.")
    parallel: ParallelOptions = Field(default=ParallelOptions(), description="How weights are sharded over devices.")
    ray: RayOptions | None = Field(
        default=None, description="Placement for keel train --on ray; null: the default placement."
    )
    guards: GuardOptions = Field(default=GuardOptions(), description="Reaction to non-finite values and spikes.")
    log: LogOptions = Field(
        default=LogOptions(), description="Loggers in addition to metrics.jsonl, which is always written."
    )
    checkpoint: CheckpointOptions = Field(
        default=CheckpointOptions(), description="Checkpoints, from which a run resumes exactly."
    )
    doctor: DoctorOptions = Field(default=DoctorOptions(), description="Thresholds of the findings of a run.")

    @property
    def several_updates(self) -> bool:
        """Whether each batch is used for several updates; all but the first are off-policy."""
        return self.loss.num_iterations > 1 or self.optim.minibatches > 1

    @property
    def off_policy(self) -> bool:
        """Whether updates use samples of an older policy: several updates per batch, or asynchronous sampling."""
        return self.several_updates or self.rollout.max_staleness > 0

    @property
    def episodes_per_step(self) -> int:
        """Number of completions per step, before dynamic sampling."""
        return self.rollout.prompts_per_step * self.rollout.num_generations

    @property
    def needs_reference(self) -> bool:
        """Whether the reference is ever evaluated: not if β = 0 and the KL is not measured."""
        return self.kl.penalizes or self.kl.measure_every > 0

    @property
    def teachers(self) -> dict[str, tuple[str | Mapping[str, str], Mapping[str, Any]]]:
        """Each teacher's model (or models by task) and parameters, by the section that names the teacher."""
        named: dict[str, tuple[str | Mapping[str, str], Mapping[str, Any]]] = {}
        params = dict(self.reference.params)
        if self.reference.kind in ("auto", "frozen") and (model := params.pop("model", None)) is not None:
            named["reference"] = model, params
        if self.kl.teacher is not None:
            named["kl.teacher"] = self.kl.teacher.model, self.kl.teacher.params
        return named

    def to_dict(self) -> dict[str, Any]:
        """Plain data (dicts, lists, numbers, strings) that loads to the same configuration."""
        return plain(self.model_dump())


def plain(value: Any) -> Any:
    """The same data with tuples converted to lists, for YAML and JSON."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value
