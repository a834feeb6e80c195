"""Options of what goes into a step: the model, its supervised start, the task, data, rewards and rollouts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from keel.config.fields import Above0, Count, Flag, Float, NotNegative, Part, Positive, Section, Share


class Lora(Section):
    """LoRA: W + (alpha / r)·B·A on each target layer."""

    r: Positive = Field(default=16, description="Rank of the update, in dimensions.")
    alpha: Above0 = Field(default=32.0, description="Scale of the update; it is multiplied by alpha / r.")
    dropout: Annotated[Float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="Dropout probability on the adapter's input; above 0 the KL at step 0 is not 0."
    )
    targets: str | tuple[str, ...] = Field(
        default="all-linear", description="Layers to adapt: all-linear or names of layers."
    )
    adapter: str | None = Field(
        default=None, description="Folder of an existing adapter to continue; null for a fresh one."
    )


class Model(Section):
    """The policy."""

    name: str = Field(
        default="tiny", min_length=1, description="tiny, a folder, a hub name, a .gguf file, or a loader module:attr."
    )
    dtype: Literal["auto", "float32", "fp32", "bfloat16", "bf16", "float16", "fp16"] = Field(
        default="auto",
        description="Type of the weights; auto is float32 on the CPU and the checkpoint's own elsewhere.",
    )
    device: str = Field(
        default="auto", description="Where the model runs: auto (CUDA where present), cpu, cuda or cuda:N."
    )
    attn_implementation: str = Field(
        default="sdpa", description="Attention of transformers: sdpa, eager, flash_attention_2…"
    )
    lora: Lora | None = Field(default=None, description="LoRA settings; null trains all weights.")
    quantization: Literal["4bit", "8bit"] | None = Field(
        default=None,
        description="Bits of the frozen base under LoRA (QLoRA; needs bitsandbytes and CUDA); null for none.",
    )
    dropout: Flag = Field(default=False, description="Keep the model's own dropout; then the KL at step 0 is not 0.")
    gradient_checkpointing: Flag = Field(
        default=False, description="Recompute activations: less memory, about 30 % slower."
    )
    scorer: str = Field(
        default="native", description="What turns tokens into log-probabilities: native, or a user's module:attr."
    )
    compile: Flag = Field(default=False, description="Compile the model with torch.compile.")
    trust_remote_code: Flag = Field(default=False, description="Run Python code that comes with the model.")


class TaskSpec(Part):
    """A task and its own parameters."""

    name: str = Field(default="arithmetic", min_length=1, description="Name of the task, or a user's module:attr.")


class Warmstart(Section):
    """A supervised start (behaviour cloning of gold answers); its result is the reference."""

    task: tuple[TaskSpec | str, ...] = Field(
        default=(),
        description="Tasks whose gold answers are learned, names or {name, …}; empty means the run's own task.",
    )
    path: str | None = Field(
        default=None, description="JSONL of prompt and completion to learn from in place of tasks."
    )
    steps: Positive = Field(default=200, description="Supervised updates.")
    batch_size: Positive = Field(default=64, description="Examples an update.")
    learning_rate: Above0 = Field(default=1e-3, description="Peak step size of AdamW during the warm start.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="cosine", description="Course of the learning rate over the warm start's steps."
    )
    warmup_steps: Count = Field(default=10, description="Steps over which the learning rate rises from 0.")
    weight_decay: NotNegative = Field(
        default=0.0, description="Decoupled weight decay of AdamW, per unit of learning rate."
    )
    max_grad_norm: Above0 | None = Field(
        default=1.0, description="Gradients are scaled down to this norm; null for no limit."
    )
    entropy_coef: NotNegative = Field(
        default=0.0, description="Reward for entropy while imitating: above 0 the start stays unsure, so groups differ."
    )


class Columns(Section):
    """Which columns of the data are read; a name with dots is a field inside a column, as reward_model.ground_truth."""

    prompt: str = Field(default="question", min_length=1, description="Column of the prompt, a text or chat messages.")
    answer: Annotated[str, Field(min_length=1)] | None = Field(
        default="answer", description="Column of the answer, one kind of value in all; null: prompts alone."
    )
    messages: str | None = Field(
        default=None, description="Column of whole conversations, in place of prompt; their last turn is the answer."
    )
    system: str | None = Field(default=None, description="Column of each row's own system message; null for none.")


class Data(Section):
    """Problems from a file or a hub, for tasks that read data."""

    path: str | tuple[str, ...] | None = Field(
        default=None,
        description="A file (.jsonl, .json, .parquet, .csv), a folder, a hub name, or several; null: the task's own.",
    )
    split: str = Field(default="train", min_length=1, description="Split to train on, of a folder or a hub dataset.")
    columns: Columns = Field(default=Columns(), description="Columns of the data.")
    on_broken: Literal["error", "skip"] = Field(
        default="error", description="Rows that cannot be read: stop and name them, or leave them out and count them."
    )
    system_prompt: str | None = Field(default=None, description="Text of a system message put before every prompt.")
    chat_template: str = Field(
        default="auto", description="auto (the tokenizer's, if any), none, or a template's name."
    )
    max_prompt_length: Positive | None = Field(
        default=None, description="Longest prompt in tokens; null for the context."
    )
    truncation: Literal["error", "left", "drop"] = Field(
        default="error",
        description="A prompt that is too long: stop with an error, cut its left end, or leave the problem out.",
    )


class RewardPart(Part):
    """One reward and its own parameters."""

    name: str = Field(
        default="task", min_length=1, description="task (its own), a name in docs/rewards.md, or module:attr."
    )
    weight: Float = Field(default=1.0, description="Factor of this reward in the sum.")


class Reward(Section):
    """How rewards are combined, and what happens when one fails."""

    aggregate: Literal["sum", "normalised_sum"] = Field(
        default="sum", description="Weighted sum of the rewards, or of each normalised within its group first."
    )
    warmup_steps: Count = Field(
        default=0, description="Steps over which the advantages' weight rises linearly from 0 to 1."
    )
    timeout_s: Above0 | None = Field(
        default=30.0, description="Seconds after which a reward counts as failed; null: never."
    )
    shuffle: int | None = Field(
        default=None,
        description="Seed to deal rewards out at random in each group: a control that must not learn; null: off.",
    )
    on_error: Literal["stop", "zero", "skip_group"] = Field(
        default="stop", description="A reward that fails, by name: stop the run, count it as 0, or leave its group out."
    )


class Rollout(Section):
    """How completions are sampled."""

    engine: str = Field(default="native", description="Engine that samples: native, or a user's module:attr.")
    prompts_per_step: Positive = Field(default=16, description="Problems a step; each gives one group of completions.")
    num_generations: Positive = Field(default=8, description="Completions a problem, compared with each other.")
    temperature: NotNegative = Field(default=1.0, description="Sampling temperature; KL is between policies at it.")
    top_p: Annotated[Float, Field(gt=0, le=1)] = Field(default=1.0, description="Nucleus probability kept; 1 is off.")
    top_k: Count = Field(default=0, description="Most probable tokens kept; 0 is off.")
    min_p: Share = Field(default=0.0, description="Least probability kept, as a share of the largest; 0 is off.")
    max_completion_length: Positive = Field(
        default=64, description="Longest completion in tokens, over all turns and the messages between them."
    )
    max_turns: Positive = Field(default=1, description="Most turns of the model in an episode.")
    max_turn_length: Positive | None = Field(
        default=None, description="Longest turn of the model in tokens; null: only max_completion_length counts."
    )
    join_turns: bool = Field(
        default=True,
        description="Episodes that were answered join those still speaking; false: all are answered together, which "
        "suits slow tools.",
    )
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(default=(), description="Texts that end a turn.")
    max_batch: Positive | None = Field(default=None, description="Completions sampled at a time; null for all of them.")
    kept_gib: NotNegative = Field(
        default=1.0,
        description="GiB of the model's device for keys and values between turns; what finds no room is read again.",
    )
    cuda_graphs: bool = Field(
        default=True, description="Decode by CUDA graphs where the model allows it (Llama-shaped, on a GPU)."
    )
