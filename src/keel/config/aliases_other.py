"""Names of PPO trainers, open-instruct, slime, NeMo-RL, RookWorld and courses on GRPO as data."""

from __future__ import annotations

from typing import Any

from keel.base.errors import KeelError
from keel.config import text
from keel.config.alias import GROUP, Alias, Convert, Options, Settings, boolean, choice, first_set, harmless, refer
from keel.config.aliases_parallel import OTHER_PARALLEL
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
    "run.max_steps": "n_grpo_steps num_rollout max_num_steps num_steps train_steps total_steps steps",
    "model.name": "model_name model_path base_model sft_model_path hf_checkpoint",
    "model.lora.r": "model.lora.rank",
    "data.path": "dataset dataset_path train_file",
    "data.system_prompt": "system_prompt",
    "data.columns.answer": "ground_truths_key",
    "data.max_prompt_length": "max_prompt_token_length",
    "rollout.num_generations": " ".join(GROUP),
    "rollout.prompts_per_step": "num_prompts_per_step num_unique_prompts_rollout prompts_per_rollout groups_per_batch",
    "rollout.max_completion_length": "max_new_tokens max_tokens rollout_max_response_len sampling_max_tokens",
    "rollout.temperature": "rollout_temperature sampling_temperature",
    "rollout.max_turns": "max_rollout_turns",
    "rollout.stop": "stop_strings stop_sequences",
    "kl.beta": "kl_weight kl_coefficient kl_penalty_coef reference_policy_kl_penalty",
    "loss.epsilon": "clip_range cliprange clip_coef clip_eps clip_epsilon clip_lower eps_clip_low pg_clip "
    "ratio_clip_min",
    "loss.epsilon_high": "clip_higher eps_clip_high ratio_clip_max",
    "loss.num_iterations": "mu num_ppo_epochs update_epochs epochs_per_rollout_batch",
    "loss.entropy_coef": "ent_coef",
    "optim.learning_rate": "lr actor_lr",
    "optim.max_grad_norm": "clip_grad gradient_clipping",
    "optim.minibatches": "num_mini_batches num_substeps",
    "eval.every": "val_period eval_freq eval_interval eval_every local_eval_every",
    "checkpoint.every": "save_interval save_period save_every",
    "checkpoint.keep": "keep_last_n_checkpoints",
}


def _use_kl_penalty(value: Any, settings: Settings) -> Options:
    """A switch beside a coefficient: Keel has the coefficient alone."""
    if not boolean("use_kl_penalty", value):
        return {"kl.beta": 0.0}
    beta = first_set(settings, *BETA, A + "kl_loss_coef", *_PLAIN["kl.beta"].split())
    if not beta:
        raise KeelError(f"use_kl_penalty is true while β is {beta or 0}: set kl.beta above 0, such as kl.beta=0.01")
    return {}


def _reference_every(name: str) -> Convert:
    """The period of a reference that follows the policy, whose kind has to be given."""

    def convert(value: Any, settings: Settings) -> Options:
        if settings.get("reference.kind") in ("ema", "snapshot"):
            return {"reference.every": value}
        raise KeelError(
            f"{name}={text.dump(value)} needs a reference that follows the policy: give reference.kind=snapshot (a "
            "copy) or ema (an average) beside it"
        )

    return convert


def _resume(name: str) -> Convert:
    def convert(value: Any, settings: Settings) -> Options:
        if isinstance(value, str):
            raise KeelError(f"{name}={value} names a folder: a run is resumed by keel train --resume RUN")
        return {"run.if_exists": "resume"} if value is not None and boolean(name, value) else {}

    return convert


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
    Alias(
        "use_kl_penalty",
        "kl.beta",
        "true needs a β above 0, false is kl.beta=0",
        _use_kl_penalty,
        unneeded="β is above 0, so the penalty is on already",
    ),
    *refer("kl.controller", _ADAPTIVE, "adap_kl_ctrl", "adaptive_kl"),
    *refer(
        "run.max_steps",
        "Keel counts steps of rollout.prompts_per_step × rollout.num_generations completions: set run.max_steps",
        "total_episodes",
    ),
    *refer(
        "run.max_steps",
        "completions a problem are rollout.num_generations={value}, steps of a run run.max_steps={value}",
        "num_rollouts",
    ),
    *refer(
        "run.max_steps",
        "steps of a run are run.max_steps={value}, tokens of a completion rollout.max_completion_length, turns of an "
        "episode rollout.max_turns",
        *("n_steps", "rollout_steps"),
    ),
    *refer(
        "rollout.prompts_per_step",
        "problems a step are rollout.prompts_per_step={value}; all rows of data.path are used",
        "num_prompts",
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
    *refer(
        "loss.scale_rewards", _SCALED, *("normalize_advantage", "normalize_advantages", "norm_adv", "whiten_rewards")
    ),
    *(
        choice(
            name,
            "loss.scale_rewards",
            {True: {"loss.scale_rewards": "group"}, False: {"loss.scale_rewards": "none"}},
            "true is group, false none",
        )
        for name in ("normalize_rewards", "use_std_normalization")
    ),
    *(
        harmless(name, "1e-4 is added to the deviation that loss.scale_rewards divides advantages by", 1e-4)
        for name in ("advantage_eps", "advantage_epsilon")
    ),
    *(
        Alias(
            name, "reference.every", "with reference.kind=ema or snapshot; alone it is refused", _reference_every(name)
        )
        for name in ("ref_policy_update_freq", "ref_update_interval", "ref_update_steps")
    ),
    *refer(
        "rewards",
        "a reward is named in rewards=[{{name: {value}}}], a function of yours as module:attr",
        *("reward_fn", "reward_func", "reward_function", "reward_functions"),
    ),
    *refer(
        "rewards",
        "a reward's factor is its weight, rewards=[{{name: task, weight: {value}}}]; loss.scale_rewards divides by the "
        "deviation",
        "reward_scale",
    ),
    *refer(
        "kl.log_ratio_clamp",
        "log-ratios are held within ± kl.log_ratio_clamp nats, importance weights of the KL below kl.ratio_cap",
        "kl_clip",
    ),
    *refer(
        "kl.budget.max",
        "a limit for the run is kl.budget={value}, for a completion kl.collect_max={value}, in nats a token; a KL to "
        "steer towards is kl.controller.target",
        "max_kl",
    ),
    *refer(
        "checkpoint.keep",
        "the last checkpoints kept are checkpoint.keep={value}; of the best by evaluation one is kept, checkpoint.best",
        "keep_top_k",
    ),
    *refer(
        "optim.microbatch_tokens",
        "optim.microbatch_tokens cuts a step's batch; beside per_device_train_batch_size write "
        "gradient_accumulation_steps={value}",
        "gradient_accumulation",
    ),
    *refer(
        "task.malformed",
        "what an answer that cannot be read earns is task.malformed={value}, of the chess tasks",
        *("r_policy_malformed", "r_env_malformed"),
    ),
    *refer("task.environment", "the share of A: problems is task.environment={value}, of chess", "mix_env_ratio"),
    choice(
        "anneal_lr",
        "optim.schedule",
        {True: {"optim.schedule": "linear"}, False: {"optim.schedule": "constant"}},
        "true is linear, to 0",
    ),
    *(Alias(name, "run.if_exists", "true is resume", _resume(name)) for name in ("resume", "resume_from_checkpoint")),
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
        *("max_length", "max_seq_len", "max_seq_length"),
    ),
    *refer(
        "loss.mask_truncated_completions",
        "what was cut off is left out by loss.mask_truncated_completions=true; a penalty is a reward of your own",
        "missing_eos_penalty",
    ),
    *refer("data.path", "all rows of data.path are used: name a file that holds those alone", "n_train_samples"),
    *(
        Alias(name, "run.dir", "its last part is run.name, unless that is given", output_dir)
        for name in ("checkpoint_dir", "save_dir")
    ),
    *refer(
        "run.dir",
        "a run's logs and checkpoints are in one folder, run.name inside run.dir: set run.dir={value}",
        *("log_dir", "logging_dir"),
    ),
    *OTHER_PARALLEL,
    choice("with_tracking", "log.wandb", {True: {"log.wandb": {}}, False: {}}),
    harmless("log_freq", "every step is logged; log.rollouts_every sets how often rollouts are"),
]
