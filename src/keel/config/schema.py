"""Every option with its default, its range and a sentence that names its unit: the data that the rest reads.

A section is a frozen model that refuses keys it does not know. Sections that name a part (`Part`) keep the part's own
parameters beside its name; `checks.py` holds them against the part's signature.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from keel.config.fields import Above0, Count, Flag, Float, Int, NotNegative, Part, Positive, Section, Share, as_number


class Run(Section):
    """What the run is called, where it is written, how long it is."""

    name: str = Field("default", min_length=1, description="Name of the run and of its folder inside run.dir.")
    dir: str = Field("runs", min_length=1, description="Folder that holds the runs.")
    seed: Int = Field(0, description="Seed of weights, problems and sampling noise; equal seeds give equal runs.")
    max_steps: Positive = Field(100, description="Steps to train, each one batch of rollouts.")
    if_exists: Literal["refuse", "resume", "replace"] = Field(
        "refuse", description="What to do with a run folder that holds a run already: refuse, resume or replace it."
    )


class Lora(Section):
    """LoRA: W + (alpha / r)·B·A on each target layer."""

    r: Positive = Field(16, description="Rank of the update, in dimensions.")
    alpha: Above0 = Field(32.0, description="Scale of the update; it is multiplied by alpha / r.")
    dropout: Annotated[Float, Field(ge=0, lt=1)] = Field(
        0.0, description="Dropout probability on the adapter's input; above 0 the KL at step 0 is not 0."
    )
    targets: str | tuple[str, ...] = Field("all-linear", description="Layers to adapt: all-linear or names of layers.")
    adapter: str | None = Field(None, description="Folder of an existing adapter to continue; null for a fresh one.")


class Model(Section):
    """The policy."""

    name: str = Field(
        "tiny", min_length=1, description="tiny, a folder, a hub name, a .gguf file, or a loader module:attr."
    )
    dtype: Literal["auto", "float32", "fp32", "bfloat16", "bf16", "float16", "fp16"] = Field(
        "auto", description="Type of the weights; auto is float32 on the CPU and the checkpoint's own elsewhere."
    )
    device: str = Field("auto", description="Where the model runs: auto (CUDA where present), cpu, cuda or cuda:N.")
    attn_implementation: str = Field("sdpa", description="Attention of transformers: sdpa, eager, flash_attention_2…")
    lora: Lora | None = Field(None, description="LoRA settings; null trains all weights.")
    quantization: Literal["4bit", "8bit"] | None = Field(
        None, description="Bits of the frozen base under LoRA (QLoRA; needs bitsandbytes and CUDA); null for none."
    )
    dropout: Flag = Field(False, description="Keep the model's own dropout; then the KL at step 0 is not 0.")
    gradient_checkpointing: Flag = Field(False, description="Recompute activations: less memory, about 30 % slower.")
    compile: Flag = Field(False, description="Compile the model with torch.compile.")
    trust_remote_code: Flag = Field(False, description="Run Python code that comes with the model.")


class TaskSpec(Part):
    """A task and its own parameters."""

    name: str = Field("arithmetic", min_length=1, description="Name of the task, or a user's module:attr.")


class Warmstart(Section):
    """A supervised start (behaviour cloning of gold answers); its result is the reference."""

    task: tuple[TaskSpec | str, ...] = Field(
        (), description="Tasks whose gold answers are learned, names or {name, …}; empty means the run's own task."
    )
    path: str | None = Field(None, description="JSONL of prompt and completion to learn from in place of tasks.")
    steps: Positive = Field(200, description="Supervised updates.")
    batch_size: Positive = Field(64, description="Examples an update.")
    learning_rate: Above0 = Field(1e-3, description="Peak step size of AdamW during the warm start.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "cosine", description="Course of the learning rate over the warm start's steps."
    )
    warmup_steps: Count = Field(10, description="Steps over which the learning rate rises from 0.")
    weight_decay: NotNegative = Field(0.0, description="Decoupled weight decay of AdamW, per unit of learning rate.")
    max_grad_norm: Above0 | None = Field(1.0, description="Gradients are scaled down to this norm; null for no limit.")


class Columns(Section):
    """Which columns of the data are read."""

    prompt: str = Field("question", description="Column that holds the prompt.")
    answer: str = Field("answer", description="Column that holds the answer.")


class Data(Section):
    """Problems from a file or a hub, for tasks that read data."""

    path: str | None = Field(None, description="A file, a folder or a hub name; null where the task makes its own.")
    split: str = Field("train", description="Split to train on.")
    columns: Columns = Field(Columns(), description="Columns of the data.")
    system_prompt: str | None = Field(None, description="Text of a system message put before every prompt.")
    chat_template: str = Field("auto", description="auto (the tokenizer's, if any), none, or a template's file.")
    max_prompt_length: Positive | None = Field(None, description="Longest prompt in tokens; null for the context.")
    truncation: Literal["error", "left", "drop"] = Field(
        "error", description="A prompt that is too long: stop with an error, cut its left end, or drop the problem."
    )


class RewardPart(Part):
    """One reward and its own parameters."""

    name: str = Field("exact", min_length=1, description="Name of the reward, or a user's module:attr.")
    weight: Float = Field(1.0, description="Factor of this reward in the sum.")


class Reward(Section):
    """How rewards are combined, and what happens when one fails."""

    aggregate: Literal["sum", "normalised_sum"] = Field(
        "sum", description="Weighted sum of the rewards, or of each normalised within its group first."
    )
    warmup_steps: Count = Field(0, description="Steps over which the advantages' weight rises linearly from 0 to 1.")
    timeout_s: Above0 | None = Field(30.0, description="Seconds after which a reward counts as failed; null: never.")
    on_error: Literal["stop", "exclude"] = Field(
        "stop",
        description="A reward that fails: stop the run, or exclude the completion from the policy term and count it.",
    )


class Rollout(Section):
    """How completions are sampled."""

    engine: str = Field("native", description="Engine that samples: native, vllm, or a user's module:attr.")
    prompts_per_step: Positive = Field(16, description="Problems a step; each gives one group of completions.")
    num_generations: Positive = Field(8, description="Completions a problem, compared with each other.")
    temperature: NotNegative = Field(1.0, description="Sampling temperature; KL is between policies at it.")
    top_p: Annotated[Float, Field(gt=0, le=1)] = Field(1.0, description="Nucleus probability kept; 1 is off.")
    top_k: Count = Field(0, description="Most probable tokens kept; 0 is off.")
    min_p: Share = Field(0.0, description="Least probability kept, as a share of the largest; 0 is off.")
    max_completion_length: Positive = Field(64, description="Longest completion in tokens, over all turns.")
    max_turns: Positive = Field(1, description="Most turns of the model in an episode.")
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field((), description="Texts that end a turn.")
    max_batch: Positive | None = Field(None, description="Completions sampled at a time; null for all of them.")


class ControllerSpec(Part):
    """The controller of β and its own parameters."""

    name: str = Field(
        "fixed", description="fixed, warmup, linear, cosine, step, ziegler, dual, pid; its parameters beside it."
    )


class Budget(Section):
    """The KL that a run may spend: the mean may not pass `max`, nor the 95th percentile twice that."""

    max: Above0 = Field(description="Largest mean KL to the reference, in `unit`.")
    unit: Literal["per_token", "per_sequence"] = Field("per_token", description="Nats per token or per sequence.")
    action: Literal["warn", "stop", "rollback"] = Field("stop", description="What happens when it is broken.")


def _budget(value: Any) -> Any:
    """A bare number is the largest mean KL in nats per token."""
    value = as_number(value) if not isinstance(value, dict) else value
    return {"max": value} if isinstance(value, int | float) else value


class KL(Section):
    """The KL term: how it is estimated, where it acts, how strongly."""

    beta: NotNegative = Field(0.0, description="Coefficient of the KL penalty; 0 means none, KL is still measured.")
    estimator: str = Field("k3", description="Estimator of the penalty: k1, k2, k3, abs, exact or exact_reverse.")
    gradient: str = Field("auto", description="Gradient form; auto picks one that is right for this pairing.")
    placement: Literal["loss", "reward", "advantage"] = Field("loss", description="Where the penalty enters.")
    level: Literal["token", "sequence"] = Field(
        "token", description="A token answers for its own KL, or for that of the sequence."
    )
    reduction: Literal["token_mean", "loss"] = Field(
        "token_mean",
        description="Mean over all action tokens, so β means the same under every loss; or the loss's own.",
    )
    log_ratio_clamp: Above0 | None = Field(
        20.0, description="Log-ratios are held within ± this many nats; null for no limit."
    )
    ratio_cap: Above0 | None = Field(
        None, description="Largest importance weight of the KL term when a batch serves several updates; null: none."
    )
    exact: Flag = Field(False, description="Also compute the exact KL over the whole vocabulary, nats per token.")
    measure_every: Count = Field(1, description="Steps between measurements of the KL; 0 is never.")
    collect_max: Above0 | None = Field(
        None, description="A completion above this KL (nats per token) leaves the policy term, not the KL term."
    )
    allow_biased: Flag = Field(False, description="Run pairings whose expected gradient is zero or wrong.")
    controller: ControllerSpec = Field(ControllerSpec(), description="What sets β over time.")
    budget: Annotated[Budget | None, BeforeValidator(_budget)] = Field(
        None, description="Largest KL of the run: nats per token, or {max, unit, action}; null for no limit."
    )

    @property
    def needs_exact(self) -> bool:
        """Whether the full-vocabulary KL is computed, because it is asked for or because the penalty is made of it."""
        return self.exact or self.estimator.startswith("exact")


class ReferenceSpec(Part):
    """The reference and its own parameters."""

    kind: str = Field(
        "auto", description="auto, frozen, adapter_off, ema, snapshot, kl_triggered, or a user's module:attr."
    )


class Mismatch(Section):
    """Weights that repair the difference between the engine that sampled and the model that trains."""

    kind: Literal["none", "truncate", "mask", "icepop"] = Field(
        "truncate", description="Truncate the weight, mask what is above the cap, or mask outside [floor, cap]."
    )
    cap: Annotated[Float, Field(ge=1)] = Field(2.0, description="Largest weight, a ratio of probabilities.")
    floor: Share | None = Field(None, description="Smallest weight under icepop, a ratio of probabilities.")
    level: Literal["token", "sequence"] = Field("token", description="Weights per token or per sequence.")


class Loss(Section):
    """The policy loss."""

    loss_type: str = Field(
        "grpo", description="policy_gradient, grpo, bnpo, dr_grpo, dapo, gspo, cispo, gmpo, sapo, or module:attr."
    )
    epsilon: NotNegative | None = Field(None, description="Clip range below 1, a ratio; null is the loss's own.")
    epsilon_high: NotNegative | None = Field(
        None, description="Clip range above 1 (cispo: the cap itself); null is epsilon, or the loss's own."
    )
    delta: Above0 | None = Field(None, description="Cap of the ratio on the unclipped side; null for none.")
    scale_rewards: Literal["group", "batch", "none"] | None = Field(
        None, description="Divide advantages by the group's or the batch's deviation, or not; null is the loss's own."
    )
    baseline: Literal["group_mean", "leave_one_out", "none"] = Field(
        "group_mean", description="What a reward is compared with: its group's mean, the others' mean, or 0."
    )
    importance_sampling_level: Literal["token", "sequence"] | None = Field(
        None, description="Ratios per token or per sequence; null is the loss's own."
    )
    num_iterations: Positive = Field(1, description="Passes of updates over each batch of rollouts.")
    mask_truncated_completions: Flag = Field(
        False, description="Leave completions that were cut off out of the policy term."
    )
    dynamic_sampling: Flag = Field(
        False, description="Sample further problems in place of groups with equal rewards; their KL stays."
    )
    dynamic_sampling_rounds: Positive = Field(3, description="Most further rounds of sampling a step.")
    entropy_coef: NotNegative = Field(0.0, description="Coefficient of the entropy bonus, per nat per token.")
    sapo_temperature_pos: Above0 = Field(1.0, description="Steepness of sapo's gate where the advantage is positive.")
    sapo_temperature_neg: Above0 = Field(1.05, description="Steepness of sapo's gate where it is negative.")
    mismatch: Mismatch = Field(Mismatch(), description="Correction of the sampler's mismatch.")


class Optim(Section):
    """The optimizer and how a batch is cut."""

    optimizer: Literal["adamw", "adamw8bit"] = Field(
        "adamw", description="AdamW, fused where the device allows it, or with 8-bit moments (needs bitsandbytes)."
    )
    learning_rate: Above0 = Field(1.0e-6, description="Peak step size.")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Course of the learning rate after its warm-up."
    )
    warmup_steps: Count = Field(0, description="Steps over which the learning rate rises from 0.")
    decay_steps: Positive | None = Field(None, description="Step at which the decay ends; null is run.max_steps.")
    final_ratio: Share = Field(0.0, description="Learning rate at the decay's end, as a share of its peak.")
    betas: tuple[Share, Share] = Field((0.9, 0.999), description="Decay rates of AdamW's two moments, per update.")
    eps: Above0 = Field(1e-8, description="Added to AdamW's denominator.")
    weight_decay: NotNegative = Field(0.0, description="Decoupled weight decay, per unit of learning rate.")
    max_grad_norm: Above0 | None = Field(1.0, description="Gradients are scaled down to this norm; null for no limit.")
    minibatches: Positive = Field(1, description="Parts into which a step's groups are cut, one update each.")
    microbatch_tokens: Positive = Field(8192, description="Tokens a pass holds at most; gradients are accumulated.")
    precision: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Type of the mixed-precision passes; auto is the weights' own type."
    )
    offload: Flag = Field(False, description="Keep the optimizer's state in the CPU's memory between updates.")


class Eval(Section):
    """Evaluation on held-out problems."""

    every: Count = Field(20, description="Steps between evaluations; 0 evaluates at the start and the end only.")
    tasks: tuple[TaskSpec | str, ...] = Field(
        (), description="Further tasks to evaluate (retention), names or {name, …}."
    )
    samples: Positive = Field(64, description="Held-out problems a task.")
    k: tuple[Positive, ...] = Field((1, 8), min_length=1, description="pass@k, in completions a problem.")
    temperature: NotNegative | None = Field(None, description="Sampling temperature; 0 is greedy; null the rollout's.")


class Guards(Section):
    """What the loop does when numbers go wrong."""

    max_consecutive_nans: Positive = Field(5, description="Skipped updates in a row before the run rolls back.")
    recovery_lr_factor: Annotated[Float, Field(gt=0, le=1)] = Field(
        0.5, description="Factor of the learning rate after a rollback."
    )
    max_rollbacks: Count = Field(3, description="Rollbacks before the run stops.")
    grad_spike: Annotated[Float, Field(gt=1)] = Field(
        10.0, description="A gradient norm above this many running medians is a spike."
    )


class Wandb(Section):
    """Weights & Biases."""

    project: str = Field("keel", description="Project of the run.")
    name: str | None = Field(None, description="Name of the run; null is run.name.")
    entity: str | None = Field(None, description="User or team; null is the login's own.")
    mode: Literal["online", "offline", "disabled"] = Field("online", description="Whether anything is sent.")
    id: str | None = Field(None, description="Id of the run to continue; null for a new one, kept over resumes.")


class Log(Section):
    """Where metrics go besides metrics.jsonl, which is always written."""

    tensorboard: Flag = Field(True, description="Write TensorBoard events to the run's tensorboard folder.")
    wandb: Wandb | None = Field(None, description="Weights & Biases settings; null for none.")
    console: Literal["auto", "rich", "plain", "none"] = Field(
        "auto", description="Live display on a terminal, plain lines elsewhere; or one of them, or nothing."
    )
    rollouts_every: Count = Field(1, description="Steps between entries of rollouts.jsonl; 0 is never.")
    extra: tuple[str, ...] = Field((), description="Further loggers, each a user's module:attr.")


class Checkpoint(Section):
    """Checkpoints, from which a run resumes exactly."""

    every: Positive = Field(50, description="Steps between checkpoints; the last step always has one.")
    keep: Positive = Field(3, description="Checkpoints kept, the last good one always among them.")
    best: Flag = Field(True, description="Also keep the checkpoint with the best evaluation.")


class Config(Section):
    """The whole configuration of a run, checked; build it with `load_config`."""

    run: Run = Field(Run(), description="What the run is called, where it is written, how long it is.")
    model: Model = Field(Model(), description="The policy.")
    warmstart: Warmstart | None = Field(
        None, description="Supervised start whose result is the reference; null for none."
    )
    task: TaskSpec = Field(TaskSpec(), description="The task, with its own parameters beside its name.")
    data: Data = Field(Data(), description="Problems from a file or a hub, for tasks that read data.")
    rewards: tuple[RewardPart, ...] = Field((RewardPart(),), min_length=1, description="Rewards and their weights.")
    reward: Reward = Field(Reward(), description="How rewards are combined, and what happens when one fails.")
    rollout: Rollout = Field(Rollout(), description="How completions are sampled.")
    kl: KL = Field(KL(), description="The KL term: how it is estimated, where it acts, how strongly.")
    reference: ReferenceSpec = Field(ReferenceSpec(), description="The policy that the KL is measured against.")
    loss: Loss = Field(Loss(), description="The policy loss.")
    optim: Optim = Field(Optim(), description="The optimizer and how a batch is cut.")
    eval: Eval = Field(Eval(), description="Evaluation on held-out problems.")
    guards: Guards = Field(Guards(), description="What the loop does when numbers go wrong.")
    log: Log = Field(Log(), description="Where metrics go besides metrics.jsonl, which is always written.")
    checkpoint: Checkpoint = Field(Checkpoint(), description="Checkpoints, from which a run resumes exactly.")

    @property
    def off_policy(self) -> bool:
        """Whether a batch serves several updates, so that all but the first see an older policy's samples."""
        return self.loss.num_iterations > 1 or self.optim.minibatches > 1

    @property
    def needs_reference(self) -> bool:
        """Whether any pass of the reference is ever spent: never at β = 0 without measurements."""
        return self.kl.beta > 0 or self.kl.measure_every > 0 or self.kl.controller.name != "fixed"

    def notes(self) -> list[str]:
        """Advice on this configuration, one sentence each: what is allowed and yet may surprise."""
        from keel.config.checks import advice

        return advice(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain data (dicts, lists, numbers, strings) that loads to this configuration again."""
        return plain(self.model_dump())


def plain(value: Any) -> Any:
    """The same data with lists for tuples, as YAML and JSON have them."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value
