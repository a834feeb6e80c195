"""The Python API: `keel.train` and `keel.evaluate`; the commands `keel train` and `keel sft` use it too.

It calls `keel.run.train.run_training`, and adds findings and the report at the end of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keel.base.errors import KeelError
from keel.config import Config, load_config
from keel.doctor.thresholds import check_thresholds
from keel.envs import Task
from keel.envs.base import check_is_task
from keel.envs.options import SourceOptions
from keel.lab.notebook import Run
from keel.lab.report import AT_END
from keel.run.evaluate import Watch, run_evaluation
from keel.run.model_ref import ModelRef, resolve_model
from keel.run.result import RunOutcome
from keel.run.train import run_sft, run_training
from keel.trainer.loop import Callback

ConfigSource = Config | Mapping[str, Any] | str | Path


@dataclass(frozen=True)
class TrainResult(RunOutcome):
    """The result of a run: its summary, and `run` to read its files. Notebooks show the report."""

    @property
    def run(self) -> Run:
        """Metrics, evaluations and rollouts of the run."""
        if self.summary.get("dry_run"):
            raise KeelError("a dry run writes no files: train without dry_run")
        return Run(self.directory)

    def _repr_html_(self) -> str | None:
        """The upper part of the report, or None after a dry run."""
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
    """Train with `config` (a Config, a mapping, or the path of a YAML file) and return the result.

    `task` is a `keel.envs.Task` that replaces the configured task. `reward` is a function
    `f(problem, text) -> float | dict | Reward` that replaces the configured rewards. Each callback is called as
    `callback(state, metrics)` after every step; if it returns True, the run stops after that step.
    """
    _check_arguments(task, reward)
    checked = _checked(config, overrides)
    ended = run_training(checked, task, reward, callbacks, resume=resume, dry_run=dry_run, at_end=AT_END)
    return TrainResult(**vars(ended))


def _check_arguments(task: Any, reward: Any) -> None:
    """Check the argument types. A common mistake is to pass overrides as the second argument."""
    try:
        if task is not None:
            check_is_task(task, "keel.train: the task is")
    except KeelError as error:
        raise KeelError(f"{error}; pass options as overrides=[...]") from None
    if reward is not None and not callable(reward):
        raise KeelError(
            f"keel.train: the reward is a {type(reward).__name__}: pass a function f(problem, text), or set `rewards:` "
            "in the configuration"
        )


def _checked(config: ConfigSource, overrides: Sequence[str] = ()) -> Config:
    checked = load_config(config, overrides)
    check_thresholds(checked)
    return checked


def supervise(config: ConfigSource) -> TrainResult:
    """`keel sft`: run only the SFT of the `warmstart` section, in its own run folder."""
    return TrainResult(**vars(run_sft(_checked(config), AT_END)))


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
    """Evaluate a run, checkpoint, configuration or model on held-out problems, as `keel eval` does.

    `tasks` are strings such as `arithmetic:skill=sort,digits=4` (default: the tasks of the configuration). `baseline`
    is a second model to compare with. Returns the data of `keel eval --json`.
    """
    model_ref, baseline_ref, data = evaluated_models(model, tasks, overrides, checkpoint, baseline)
    return run_evaluation(model_ref, tasks=tasks, data=data, baseline=baseline_ref, seed=seed, watch=watch)


def evaluated_models(
    model: str, tasks: Sequence[str], overrides: Sequence[str], checkpoint: str | None, baseline: str | None
) -> tuple[ModelRef, ModelRef | None, list[str]]:
    """The model and the baseline of `evaluate`, not loaded yet, and the data options of `tasks`."""
    # if `tasks` are given, data options apply to them, and not to the task that the run was trained on
    data = [item for item in overrides if tasks and _is_data(item)]
    model_overrides = [item for item in overrides if item not in data]
    model_ref = resolve_model(model, model_overrides, checkpoint)
    # model options do not apply to the baseline, except for device, dtype and trust_remote_code
    device_overrides = [
        item
        for item in model_overrides
        if item.startswith(("model.device=", "model.dtype=", "model.trust_remote_code="))
    ]
    return model_ref, None if baseline is None else resolve_model(baseline, device_overrides), data


def _is_data(setting: str) -> bool:
    return setting.startswith(tuple(f"data.{name}{sign}" for name in SourceOptions.model_fields for sign in "=."))


__all__ = ["Run", "TrainResult", "evaluate", "supervise", "train"]
