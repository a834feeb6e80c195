"""Options of the loggers: `log`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from keel.base.options import Flag, NonNegativeInt, Options, PluginOptions


class WandbOptions(Options):
    """Weights & Biases."""

    project: str = Field(default="keel", description="Project of the run.")
    name: str | None = Field(default=None, description="Name of the run; null is run.name.")
    entity: str | None = Field(default=None, description="User or team; null: the login's default.")
    mode: Literal["online", "offline", "disabled"] | None = Field(
        default=None,
        description="online sends the data, offline stores it, disabled does neither; null: W&B's environment "
        "variables.",
    )
    id: str | None = Field(
        default=None, description="Id of the W&B run to continue; null: a new run, which a resume continues."
    )
    group: str | None = Field(default=None, description="Group of runs that belong together.")
    tags: tuple[str, ...] | None = Field(default=None, description="Tags of the run.")


def _wandb(value: Any) -> Any:
    """true means the defaults, a string is the project."""
    if isinstance(value, bool):
        return {} if value else None
    return {"project": value} if isinstance(value, str) else value


class LoggerOptions(PluginOptions):
    """A user's logger and its own parameters."""

    name: str = Field(min_length=1, description="The logger, a user's module:attr.")


class LogOptions(Options):
    """Loggers in addition to metrics.jsonl, which is always written."""

    tensorboard: Flag = Field(default=True, description="Write TensorBoard events to the run's tensorboard folder.")
    wandb: Annotated[WandbOptions | None, BeforeValidator(_wandb)] = Field(
        default=None, description="Weights & Biases: null (off), true, a project's name, or its settings."
    )
    console: Literal["auto", "rich", "plain", "none"] = Field(
        default="auto",
        description="rich: a live panel; plain: lines; none: no output; auto: rich on a terminal, plain elsewhere.",
    )
    rollouts_every: NonNegativeInt = Field(default=1, description="Steps between entries of rollouts.jsonl; 0: never.")
    extra: tuple[LoggerOptions | str, ...] = Field(default=(), description="Further loggers, module:attr or {name, …}.")

    @property
    def parts(self) -> tuple[LoggerOptions, ...]:
        """The further loggers, each with its parameters."""
        return tuple(LoggerOptions(name=part) if isinstance(part, str) else part for part in self.extra)
