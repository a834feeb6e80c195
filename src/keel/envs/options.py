"""Options of the sections `task`, `data`, `rewards` and `reward`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from keel.base.options import Float, NonNegativeInt, Options, PluginOptions, PositiveFloat, PositiveInt


class TaskOptions(PluginOptions):
    """The name of a task and its parameters."""

    name: str = Field(default="arithmetic", min_length=1, description="Name of the task, or module:attr.")


class ColumnOptions(Options):
    """Columns of the data. A name with dots is a field inside a column, such as reward_model.ground_truth."""

    prompt: str = Field(default="question", min_length=1, description="Column of the prompt: text or chat messages.")
    answer: Annotated[str, Field(min_length=1)] | None = Field(
        default="answer", description="Column of the answer. All answers have one type. null: the data have no answers."
    )
    messages: str | None = Field(
        default=None, description="Column of whole conversations, instead of prompt; the last turn is the answer."
    )
    system: str | None = Field(default=None, description="Column of the system message; null: none.")


class SourceOptions(Options):
    """The part of `data` that is passed to tasks with a parameter `data`."""

    path: str | tuple[str, ...] | None = Field(
        default=None,
        description="A file (.jsonl, .json, .parquet, .csv), a folder, a hub name or a list; null: the task's default.",
    )
    split: str = Field(default="train", min_length=1, description="Split of a folder or hub dataset to train on.")
    columns: ColumnOptions = Field(default=ColumnOptions(), description="Columns of the data.")
    on_broken: Literal["error", "skip"] = Field(
        default="error", description="Rows that cannot be read: stop with an error, or skip and count them."
    )


class PromptOptions(Options):
    """How prompts are rendered to tokens."""

    system_prompt: str | None = Field(default=None, description="System message for every prompt.")
    chat_template: str = Field(
        default="auto", description="auto (the tokenizer's, if any), none, or a template's name."
    )
    allow_control_tokens: bool = Field(
        default=False,
        description="Allow control tokens such as <|im_start|> in prompts; false: raise an error.",
    )
    max_prompt_length: PositiveInt | None = Field(
        default=None, description="Maximum prompt length in tokens; null: the context length."
    )
    truncation: Literal["error", "left", "drop"] = Field(
        default="error",
        description="Prompts that are too long: raise an error, truncate on the left, or drop the problem.",
    )


class CurriculumOptions(Options):
    """Draw problems in proportion to how often their groups carry signal. A group does if its rewards differ."""

    candidates: Annotated[PositiveInt, Field(ge=2)] = Field(
        default=4, description="Number of candidates that the task draws for each training problem."
    )
    half_life: PositiveFloat = Field(
        default=50.0, description="Half-life in steps of a group's weight in the estimates."
    )


class DataOptions(PromptOptions, SourceOptions):
    """Problems from a file or a hub, for tasks that read data."""

    curriculum: CurriculumOptions | None = Field(
        default=None,
        description="Draw problems in proportion to how often the rewards of their groups differ. Works with any task. "
        "null: use the task's own order.",
    )

    @property
    def source(self) -> dict[str, Any]:
        """The options that are passed to tasks, as plain data."""
        return self.model_dump(include=set(SourceOptions.model_fields))


class RewardPartOptions(PluginOptions):
    """The name and weight of a reward, and its parameters."""

    name: str = Field(
        default="task",
        min_length=1,
        description="task (the task's own reward), a name in docs/rewards.md, or module:attr.",
    )
    weight: Float = Field(default=1.0, description="Weight of this reward in the sum.")


class RewardOptions(Options):
    """How rewards are combined and how their failures are handled."""

    aggregate: Literal["sum", "normalised_sum"] = Field(
        default="sum", description="Weighted sum of the rewards, or of rewards that are normalised within each group."
    )
    warmup_steps: NonNegativeInt = Field(
        default=0, description="Steps over which the weight of the advantages rises linearly from 0 to 1."
    )
    timeout_s: PositiveFloat | None = Field(default=30.0, description="Time limit of a reward in seconds; null: none.")
    shuffle: int | None = Field(
        default=None,
        description="Seed for permuting the rewards within each group: a control run that must not improve. null: off.",
    )
    on_error: Literal["stop", "zero", "skip_group"] = Field(
        default="stop", description="If a reward fails: stop the run, use 0, or drop its group."
    )
