"""What a program calls: `keel.train` and `keel.evaluate`, and what stands behind `keel train` and `keel sft`.

A run ends with the lab's findings and report; without them it is `keel.run.train.run_training`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keel.base.errors import KeelError
from keel.config import Config, load_config
from keel.envs import Task
from keel.envs.base import check_is_task
from keel.envs.options import SourceOptions
from keel.lab.hooks import AT_END
from keel.lab.notebook import Run
from keel.lab.thresholds import check_thresholds
from keel.run import sft
from keel.run.evaluate import Watch, run_evaluation
from keel.run.model_ref import ModelRef, resolve_model
from keel.run.result import RunOutcome
from keel.run.train import run_training
from keel.trainer.loop import Callback

ConfigSource = Config | Mapping[str, Any] | str | Path


@dataclass(frozen=True)
class TrainResult(RunOutcome):
    """How a run ended, and the run to look at, in a notebook too."""

    @property
    def run(self) -> Run:
        """Its metrics, evaluations and rollouts."""
        if self.summary.get("dry_run"):
            raise KeelError("a dry run writes nothing that could be looked at: train without dry_run")
        return Run(self.directory)

    def _repr_html_(self) -> str | None:
        """The upper part of the report; nothing where there is no run to show."""
        try:
            return self.run._repr_html_()
        except KeelError:
            return None


def train(
    config: ConfigSource,
    task: Task | None = None,
    reward: Callable[..., Any] | None = None,
    callbacks: Sequence[Callback] = (),
    *,
    overrides: Sequence[str] = (),
    resume: bool = False,
    dry_run: bool = False,
) -> TrainResult:
    """Train as `config` says (a Config, a mapping, or a YAML file's path) and return the run's summary.

    `task` is a `keel.envs.Task` and takes the place of the configured one; `reward` is a
    function `f(problem, text) -> float | dict | Reward` that takes the place of the configured rewards. Each callback
    is called as `callback(state, metrics)` after every step; one that returns True ends the run after that step.
    """
    _check_arguments(task, reward)
    checked = _checked(config, overrides)
    ended = run_training(checked, task, reward, callbacks, resume=resume, dry_run=dry_run, at_end=AT_END)
    return TrainResult(**vars(ended))


def _check_arguments(task: Any, reward: Any) -> None:
    """Refuse a task or reward that is none, such as overrides as the second argument."""
    try:
        if task is not None:
            check_is_task(task, "keel.train: the task is")
    except KeelError as error:
        raise KeelError(f"{error}; options are given as overrides=[...]") from None
    if reward is not None and not callable(reward):
        raise KeelError(
            f"keel.train: the reward is a {type(reward).__name__}: give a function f(problem, text), and configured "
            "rewards as `rewards:` of the configuration"
        )


def _checked(config: ConfigSource, overrides: Sequence[str] = ()) -> Config:
    checked = load_config(config, overrides)
    check_thresholds(checked)
    return checked


def supervise(config: ConfigSource) -> TrainResult:
    """`keel sft`: behaviour cloning by the `warmstart` section, with a run directory of its own."""
    return TrainResult(**vars(sft.run_sft(_checked(config), AT_END)))


def evaluate(
    model: str,
    tasks: Sequence[str] = (),
    *,
    overrides: Sequence[str] = (),
    checkpoint: str | None = None,
    baseline: str | None = None,
    seed: int | None = None,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """`keel eval` as data: a run, checkpoint, configuration or model on held-out problems, beside a `baseline`.

    `tasks` are texts such as `arithmetic:skill=sort,digits=4`; without any, the configuration's own are evaluated.
    """
    model_ref, baseline_ref, data = evaluated_models(model, tasks, overrides, checkpoint, baseline)
    return run_evaluation(model_ref, tasks=tasks, data=data, baseline=baseline_ref, seed=seed, watch=watch)


def evaluated_models(
    model: str, tasks: Sequence[str], overrides: Sequence[str], checkpoint: str | None, baseline: str | None
) -> tuple[ModelRef, ModelRef | None, list[str]]:
    """The model and the baseline that `evaluate`'s arguments name, not loaded, and the settings of the tasks' data."""
    # what a task reads is the given tasks' where there are any, not that of the task a run was trained on
    data = [item for item in overrides if tasks and _is_data(item)]
    model_overrides = [item for item in overrides if item not in data]
    model_ref = resolve_model(model, model_overrides, checkpoint)
    # the baseline's model is its own, so what the user says of the model does not hold for it; where it runs does
    device_overrides = [
        item
        for item in model_overrides
        if item.startswith(("model.device=", "model.dtype=", "model.trust_remote_code="))
    ]
    return model_ref, None if baseline is None else resolve_model(baseline, device_overrides), data


def _is_data(setting: str) -> bool:
    return setting.startswith(tuple(f"data.{name}{sign}" for name in SourceOptions.model_fields for sign in "=."))


__all__ = ["Run", "TrainResult", "evaluate", "supervise", "train"]
