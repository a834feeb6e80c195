"""Options of tasks, data and rewards: `task`, `data`, `rewards`, `reward`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from keel.base.options import Float, NonNegativeInt, Options, PluginOptions, PositiveFloat, PositiveInt


class TaskOptions(PluginOptions):
    """A task and its own parameters."""

    name: str = Field(default="arithmetic", min_length=1, description="Name of the task, or a user's module:attr.")


class ColumnOptions(Options):
    """Which columns of the data are read; a name with dots is a field inside a column, as reward_model.ground_truth."""

    prompt: str = Field(default="question", min_length=1, description="Column of the prompt, a text or chat messages.")
    answer: Annotated[str, Field(min_length=1)] | None = Field(
        default="answer", description="Column of the answer, one kind of value in all; null: prompts alone."
    )
    messages: str | None = Field(
        default=None, description="Column of whole conversations, in place of prompt; their last turn is the answer."
    )
    system: str | None = Field(default=None, description="Column of each row's own system message; null for none.")


class SourceOptions(Options):
    """The rows that a task reads: the part of `data` that tasks with a parameter called `data` are given."""

    path: str | tuple[str, ...] | None = Field(
        default=None,
        description="A file (.jsonl, .json, .parquet, .csv), a folder, a hub name, or several; null: the task's own.",
    )
    split: str = Field(default="train", min_length=1, description="Split to train on, of a folder or a hub dataset.")
    columns: ColumnOptions = Field(default=ColumnOptions(), description="Columns of the data.")
    on_broken: Literal["error", "skip"] = Field(
        default="error", description="Rows that cannot be read: stop and name them, or leave them out and count them."
    )


class PromptOptions(Options):
    """How prompts become tokens."""

    system_prompt: str | None = Field(default=None, description="Text of a system message put before every prompt.")
    chat_template: str = Field(
        default="auto", description="auto (the tokenizer's, if any), none, or a template's name."
    )
    allow_control_tokens: bool = Field(
        default=False,
        description="Let prompts hold control tokens such as <|im_start|>, as rendered ones do; false: refuse them.",
    )
    max_prompt_length: PositiveInt | None = Field(
        default=None, description="Longest prompt in tokens; null for the context."
    )
    truncation: Literal["error", "left", "drop"] = Field(
        default="error",
        description="A prompt that is too long: stop with an error, cut its left end, or leave the problem out.",
    )


class DataOptions(PromptOptions, SourceOptions):
    """Problems from a file or a hub, for tasks that read data."""

    @property
    def source(self) -> dict[str, Any]:
        """What tasks are given of it, as plain data."""
        return self.model_dump(include=set(SourceOptions.model_fields))


class RewardPartOptions(PluginOptions):
    """One reward and its own parameters."""

    name: str = Field(
        default="task", min_length=1, description="task (its own), a name in docs/rewards.md, or module:attr."
    )
    weight: Float = Field(default=1.0, description="Factor of this reward in the sum.")


class RewardOptions(Options):
    """How rewards are combined, and what happens when one fails."""

    aggregate: Literal["sum", "normalised_sum"] = Field(
        default="sum", description="Weighted sum of the rewards, or of each normalised within its group first."
    )
    warmup_steps: NonNegativeInt = Field(
        default=0, description="Steps over which the advantages' weight rises linearly from 0 to 1."
    )
    timeout_s: PositiveFloat | None = Field(
        default=30.0, description="Seconds after which a reward counts as failed; null: never."
    )
    shuffle: int | None = Field(
        default=None,
        description="Seed to deal rewards out at random in each group: a control that must not learn; null: off.",
    )
    on_error: Literal["stop", "zero", "skip_group"] = Field(
        default="stop", description="A reward that fails, by name: stop the run, count it as 0, or leave its group out."
    )
