"""Options of evaluation: `eval`."""

from __future__ import annotations

from pydantic import Field

from keel.base.options import NonNegativeInt, Options, PositiveInt, Temperature
from keel.envs.options import TaskOptions


class EvalOptions(Options):
    """Evaluation on held-out problems."""

    every: NonNegativeInt = Field(
        default=20, description="Steps between evaluations; 0: only at the start and the end."
    )
    tasks: tuple[TaskOptions | str, ...] = Field(
        default=(), description="Further tasks to evaluate (retention), names or {name, …}."
    )
    samples: PositiveInt = Field(default=64, description="Held-out problems per task.")
    k: tuple[PositiveInt, ...] = Field(
        default=(1, 8), min_length=1, description="Values of k for pass@k (completions per problem)."
    )
    temperature: Temperature | None = Field(
        default=None, description="Sampling temperature; 0: greedy; null: rollout.temperature."
    )
