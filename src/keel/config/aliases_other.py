"""Names of PPO trainers, open-instruct, slime, NeMo-RL, RookWorld and courses on GRPO as data."""

from __future__ import annotations

from typing import Any

from keel.base.errors import KeelError
from keel.config.alias import GROUP, Alias, Options, Settings, boolean, choice, first_set, harmless, refer
from keel.config.aliases_trl import output_dir
from keel.config.verl_values import BETA, A

_SCALED = "loss.scale_rewards divides advantages by the deviation of the group or the batch, or not: group, batch, none"
_ADAPTIVE = (
    "write kl.controller={{name: ziegler, target: T}}, T in nats a sequence; with unit: per_token in nats a token"
)


# Names that mean the same in the same unit.
_PLAIN = {
    "run.name": "exp_name",
    "run.seed": "random_seed",
    "run.max_steps": "n_grpo_steps num_rollout max_num_steps num_steps train_steps",
    "model.name": "model_name model_path sft_model_path hf_checkpoint",
    "model.lora.r": "model.lora.rank",
    "data.path": "dataset",
    "data.columns.answer": "ground_truths_key",
    "data.max_prompt_length": "max_prompt_token_length",
    "rollout.num_generations": " ".join(GROUP),
    "rollout.prompts_per_step": "num_prompts_per_step num_unique_prompts_rollout prompts_per_rollout groups_per_batch",
    "rollout.max_completion_length": "max_new_tokens max_tokens rollout_max_response_len sampling_max_tokens",
    "rollout.temperature": "rollout_temperature sampling_temperature",
    "rollout.max_turns": "max_rollout_turns",
    "rollout.stop": "stop_strings",
    "kl.beta": "kl_weight kl_coefficient kl_penalty_coef reference_policy_kl_penalty",
    "loss.epsilon": "clip_range cliprange clip_eps clip_epsilon clip_lower eps_clip_low pg_clip ratio_clip_min",
    "loss.epsilon_high": "clip_higher eps_clip_high ratio_clip_max",
    "loss.num_iterations": "mu num_ppo_epochs epochs_per_rollout_batch",
    "loss.entropy_coef": "ent_coef",
    "optim.learning_rate": "lr",
    "optim.max_grad_norm": "clip_grad gradient_clipping",
    "optim.minibatches": "num_mini_batches num_substeps",
    "eval.every": "val_period eval_freq eval_interval eval_every local_eval_every",
    "checkpoint.every": "save_interval save_period save_every",
    "checkpoint.keep": "keep_last_n_checkpoints keep_top_k",
}


def _use_kl_penalty(value: Any, settings: Settings) -> Options:
    """A switch beside a coefficient: Keel has the coefficient alone."""
    if not boolean("use_kl_penalty", value):
        return {"kl.beta": 0.0}
    beta = first_set(settings, *BETA, A + "kl_loss_coef", *_PLAIN["kl.beta"].split())
    if not beta:
        raise KeelError(f"use_kl_penalty is true while β is {beta or 0}: set kl.beta above 0, such as kl.beta=0.01")
    return {}


OTHER = [
    *(Alias(name, option) for option, names in _PLAIN.items() for name in names.split()),
    choice(
        "token_level_loss",
        "loss.loss_type",
        {True: {"loss.loss_type": "dapo"}, False: {"loss.loss_type": "grpo"}},
        "true is dapo, the mean over tokens; false grpo, the mean over completions",
    ),
    choice(
        "use_leave_one_out_baseline",
        "loss.baseline",
        {True: {"loss.baseline": "leave_one_out"}, False: {"loss.baseline": "group_mean"}},
    ),
    Alias("use_kl_penalty", "kl.beta", "true needs a β above 0, false is kl.beta=0", _use_kl_penalty),
    *refer("kl.controller", _ADAPTIVE, "adap_kl_ctrl", "adaptive_kl"),
    *refer(
        "run.max_steps",
        "Keel counts steps of rollout.prompts_per_step × rollout.num_generations completions: set run.max_steps",
        *("total_episodes", "steps"),
    ),
    *refer("run.max_steps", "Keel counts steps, not passes over the data: set run.max_steps", "epochs"),
    *refer(
        "loss.num_iterations",
        "passes over a batch are loss.num_iterations={value}; how long a run is, run.max_steps says in steps",
        *("num_epochs", "n_epochs"),
    ),
    *refer(
        "optim.minibatches",
        "Keel cuts a step by number, optim.minibatches=N updates a step, and a pass by optim.microbatch_tokens",
        *("mini_batch_size", "global_batch_size", "train_global_batch_size"),
    ),
    *refer(
        "rollout.num_generations",
        "completions a problem are rollout.num_generations={value}, problems of an evaluation eval.samples={value}",
        "num_samples",
    ),
    *refer("loss.scale_rewards", _SCALED, *("normalize_advantage", "normalize_advantages", "whiten_rewards")),
    *(
        choice(
            name,
            "loss.scale_rewards",
            {True: {"loss.scale_rewards": "group"}, False: {"loss.scale_rewards": "none"}},
            "true is group, false none",
        )
        for name in ("normalize_rewards", "use_std_normalization")
    ),
    *refer(
        "reference.every",
        "a reference that follows the policy is reference.kind=ema or snapshot, every reference.every steps",
        *("ref_policy_update_freq", "ref_update_interval"),
    ),
    choice(
        "use_tis",
        "loss.mismatch.kind",
        {True: {"loss.mismatch.kind": "truncate"}, False: {"loss.mismatch.kind": "none"}},
    ),
    choice(
        "lr_decay_style",
        "optim.schedule",
        {name: {"optim.schedule": name} for name in ("constant", "linear", "cosine")},
    ),
    *refer(
        "rollout.max_completion_length",
        "a prompt's length is data.max_prompt_length, a completion's rollout.max_completion_length, in tokens",
        "max_length",
    ),
    *refer(
        "loss.mask_truncated_completions",
        "what was cut off is left out by loss.mask_truncated_completions=true; a penalty is a reward of your own",
        "missing_eos_penalty",
    ),
    *refer("data.path", "all rows of data.path are used: name a file that holds those alone", "n_train_samples"),
    Alias("checkpoint_dir", "run.dir", "its last part is run.name, unless that is given", output_dir),
    choice("with_tracking", "log.wandb", {True: {"log.wandb": {}}, False: {}}),
    harmless("log_freq", "every step is logged; log.rollouts_every sets how often rollouts are"),
]
