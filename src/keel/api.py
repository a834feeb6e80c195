"""What a program calls: `keel.train` and `keel.evaluate`, and what stands behind `keel train` and `keel sft`.

A run ends with the lab's findings and report; without them it is `keel.run.train.train`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keel.base.errors import KeelError
from keel.base.world import first_process
from keel.envs import Task
from keel.envs.options import SourceOptions
from keel.lab.hooks import AT_END
from keel.lab.notebook import Run
from keel.run import sft
from keel.run import train as runs
from keel.run.evaluate import Watch, run_evaluation
from keel.run.model_ref import ModelRef, resolve_model
from keel.run.result import TrainResult as RunResult
from keel.run.result import closing_line, next_lines
from keel.run.train import ConfigSource
from keel.trainer.loop import Callback

if TYPE_CHECKING:
    from keel.lab.plots.figure import PanelFigure


@dataclass(frozen=True)
class TrainResult(RunResult):
    """How a run ended, and the run to look at, in a notebook too."""

    @property
    def run(self) -> Run:
        """Its metrics, evaluations, rollouts and findings."""
        if self.summary.get("dry_run"):
            raise KeelError("a dry run writes nothing that could be looked at: train without dry_run")
        return Run(self.directory)

    def plot(self, *charts: str) -> PanelFigure:
        """Its most important curves as a figure, or the report's charts of these titles."""
        return self.run.plot(*charts)

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

    `task` is an object of the shape of `keel.envs.Task` and takes the place of the configured one; `reward` is a
    function `f(problem, text) -> float | dict | Reward` that takes the place of the configured rewards. Each callback
    is called as `callback(state, metrics)` after every step; one that returns True ends the run after that step.
    """
    given: dict[str, Any] = {"overrides": overrides, "resume": resume, "dry_run": dry_run}
    return TrainResult(**vars(runs.train(config, task, reward, callbacks, **given, at_end=AT_END)))


def main(
    config: ConfigSource, *, resume: bool = False, dry_run: bool = False, overrides: Sequence[str] = ()
) -> TrainResult:
    """`keel train`: the same, with last lines that say how it went, where it is and what to look at."""
    result = train(config, overrides=overrides, resume=resume, dry_run=dry_run)
    if first_process():
        print("\n".join([closing_line(result), *next_lines(result)]))
    return result


def supervise(config: ConfigSource) -> TrainResult:
    """`keel sft`: behaviour cloning by the `warmstart` section, with a run directory of its own."""
    return TrainResult(**vars(sft.supervise(config, AT_END)))


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


__all__ = ["Run", "TrainResult", "evaluate", "main", "supervise", "train"]
