"""The whole configuration, composed of the option classes that the rooms own."""

from __future__ import annotations

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
    """What the run is called, where it is written, how long it is."""

    name: str = Field(default="default", min_length=1, description="Name of the run and of its folder inside run.dir.")
    dir: str = Field(default="runs", min_length=1, description="Folder that holds the runs.")
    seed: Int = Field(
        default=0, description="Seed of weights, problems and sampling noise; equal seeds give equal runs."
    )
    max_steps: PositiveInt = Field(default=100, description="Steps to train, each one batch of rollouts.")
    if_exists: Literal["refuse", "resume", "replace"] = Field(
        default="refuse",
        description="What to do with a run folder that holds a run already: refuse, resume or replace it.",
    )


class DoctorThresholds(PluginOptions):
    """Alarm thresholds by name, those of docs/doctor.md; an alarm made less sensitive is shown in the report."""

    named_by = ""


class DoctorOptions(Options):
    """What `keel doctor` and the findings of a run go by."""

    thresholds: Annotated[DoctorThresholds, BeforeValidator(lambda value: value or {})] = Field(
        default=DoctorThresholds(), description="Thresholds that differ from the shipped ones, name: value."
    )


class Config(Options):
    """The whole configuration of a run, checked; build it with `load_config`."""

    run: RunOptions = Field(
        default=RunOptions(), description="What the run is called, where it is written, how long it is."
    )
    model: ModelOptions = Field(default=ModelOptions(), description="The policy.")
    warmstart: WarmstartOptions | None = Field(
        default=None, description="Supervised start whose result is the reference; null for none."
    )
    task: TaskOptions = Field(default=TaskOptions(), description="The task, with its own parameters beside its name.")
    data: DataOptions = Field(
        default=DataOptions(), description="Problems from a file or a hub, for tasks that read data."
    )
    rewards: tuple[RewardPartOptions, ...] = Field(
        default=(RewardPartOptions(),), min_length=1, description="Rewards, each {name, weight, …}."
    )
    reward: RewardOptions = Field(
        default=RewardOptions(), description="How rewards are combined, and what happens when one fails."
    )
    rollout: RolloutOptions = Field(default=RolloutOptions(), description="How completions are sampled.")
    kl: KLOptions = Field(
        default=KLOptions(), description="The KL term: how it is estimated, where it acts, how strongly."
    )
    reference: ReferenceOptions = Field(
        default=ReferenceOptions(), description="The policy that the KL is measured against."
    )
    loss: LossOptions = Field(default=LossOptions(), description="The policy loss.")
    optim: OptimOptions = Field(default=OptimOptions(), description="The optimizer and how a batch is cut.")
    eval: EvalOptions = Field(default=EvalOptions(), description="Evaluation on held-out problems.")
    parallel: ParallelOptions = Field(
        default=ParallelOptions(), description="Layout of the weights over several devices."
    )
    ray: RayOptions | None = Field(default=None, description="What keel train --on ray places; null is the default.")
    guards: GuardOptions = Field(default=GuardOptions(), description="What the loop does when numbers go wrong.")
    log: LogOptions = Field(
        default=LogOptions(), description="Where metrics go besides metrics.jsonl, which is always written."
    )
    checkpoint: CheckpointOptions = Field(
        default=CheckpointOptions(), description="Checkpoints, from which a run resumes exactly."
    )
    doctor: DoctorOptions = Field(default=DoctorOptions(), description="What the findings of a run go by.")

    @property
    def several_updates(self) -> bool:
        """Whether a batch serves several updates, so that all but the first see an older policy's samples."""
        return self.loss.num_iterations > 1 or self.optim.minibatches > 1

    @property
    def off_policy(self) -> bool:
        """Whether updates see an older policy's samples: a batch serves several, or sampling runs ahead."""
        return self.several_updates or self.rollout.max_staleness > 0

    @property
    def episodes_per_step(self) -> int:
        """How many completions a step samples, before any resampling."""
        return self.rollout.prompts_per_step * self.rollout.num_generations

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
