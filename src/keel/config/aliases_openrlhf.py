"""OpenRLHF's command line as data: what each option becomes."""

from __future__ import annotations

from typing import Any

from keel.base.errors import KeelError
from keel.config import trl_steps
from keel.config.alias import (
    Alias,
    Options,
    Settings,
    boolean,
    choice,
    first_set,
    group_size,
    harmless,
    no_counterpart,
    refer,
    unless_null,
    whole,
)
from keel.config.aliases_parallel import CONTEXT, LAUNCHED, TENSOR, only_one, zero_stage
from keel.config.aliases_trl import output_dir
from keel.config.verl_values import IN_LOSS, pass_at

# Names that no other trainer has: where one of them is given, a name that others share means what it does here.
OWN = frozenset(
    {"n_samples_per_prompt", "init_kl_coef", "generate_max_len", "prompt_max_len", "pretrain", "prompt_data"}
    | {"actor_learning_rate", "micro_rollout_batch_size", "micro_train_batch_size", "eps_clip"}
)


def _is_openrlhf(settings: Settings) -> bool:
    return not OWN.isdisjoint(settings)


def _kl_coef(value: Any, settings: Settings) -> Options:
    """OpenRLHF's penalty is in the reward, by k1, unless use_kl_loss says otherwise."""
    if settings.get(IN_LOSS) is True or not settings.keys() & (OWN - {"init_kl_coef"}):
        return {"kl.beta": value}
    return {
        "kl.beta": value,
        "kl.placement": "reward",
        **({} if "kl_estimator" in settings else {"kl.estimator": "k1"}),
    }


def _kl_estimator(value: Any, settings: Settings) -> Options:
    """In the loss a peer differentiates the estimator as it stands."""
    known = {**{f"k{i}": f"k{i}" for i in (1, 2, 3)}, **{f"kl{i}": f"k{i}" for i in (1, 2, 3)}}
    if str(value) not in known:
        raise KeelError(f"kl_estimator={value}: set kl.estimator to k1, k2, k3, abs or exact")
    gradient = {"kl.gradient": "plain"} if settings.get(IN_LOSS) is True else {}
    return {"kl.estimator": known[str(value)], **gradient}


def _rollout_batch(value: Any, settings: Settings) -> Options:
    if _is_openrlhf(settings):
        return {"rollout.prompts_per_step": value}
    batch, group = whole("rollout_batch_size", value), group_size(settings)
    groups, remainder = divmod(batch, group)
    of_groups = f"in groups of {group} are rollout.prompts_per_step={groups}"
    raise KeelError(
        f"rollout_batch_size={batch} counts prompts in OpenRLHF and completions elsewhere: {batch} prompts are "
        f"rollout.prompts_per_step={batch}, {batch} completions "
        + (f"are no multiple of rollout.num_generations={group}" if remainder else of_groups)
    )


def _train_batch(value: Any, settings: Settings) -> Options:
    """OpenRLHF counts the completions of an update, verl the prompts of a step."""
    if "rollout_batch_size" not in settings or not _is_openrlhf(settings):
        raise KeelError(
            f"train_batch_size={value} counts prompts of a step in verl and completions of an update elsewhere: set "
            "rollout.prompts_per_step for the first, optim.minibatches (updates a step) for the second"
        )
    completions = whole("rollout_batch_size", settings["rollout_batch_size"]) * group_size(settings, default=1)
    updates, remainder = divmod(completions, whole("train_batch_size", value))
    if remainder or not updates:
        raise KeelError(
            f"train_batch_size={value} does not divide {completions} completions a step: set optim.minibatches"
        )
    return {"optim.minibatches": updates}


def _clip_low_high(value: Any, settings: Settings) -> Options:
    low, high = value
    return {"loss.epsilon": low, "loss.epsilon_high": high}


def _epochs(value: Any, settings: Settings) -> Options:
    """OpenRLHF's are updates on a batch; elsewhere the name counts passes over the data."""
    if _is_openrlhf(settings):
        return {"loss.num_iterations": value}
    raise KeelError(
        f"max_epochs={value} counts passes over a batch of rollouts in OpenRLHF, over the data elsewhere: set "
        f"loss.num_iterations={value} for the first, run.max_steps (steps) for the second"
    )


def _wandb(value: Any, settings: Settings) -> Options:
    """OpenRLHF takes the key here, which wandb reads from the environment: it is not repeated."""
    return {"log.wandb": {}} if value else {}


def _kl_target(value: Any, settings: Settings) -> Options:
    if value is None:
        return {}
    return {"kl.controller.name": "ziegler", "kl.controller.unit": "per_token", "kl.controller.target": value}


def _horizon(value: Any, settings: Settings) -> Options:
    if settings.get("kl_target") is None and first_set(settings, "kl.controller.name") != "ziegler":
        raise KeelError(f"the horizon {value} is of the adaptive controller: set kl.controller.name=ziegler beside it")
    return {"kl.controller.horizon": value}


def _eps_clip(value: Any, settings: Settings) -> Options:
    return {} if settings.get("eps_clip_low_high") is not None else {"loss.epsilon": value}


def _no_std(value: Any, settings: Settings) -> Options:
    return {"loss.scale_rewards": "none"} if boolean("no_advantage_std_norm", value) else {}


CRITIC = "GRPO has no critic, and rewards are not discounted"

OPENRLHF = [
    Alias("actor_learning_rate", "optim.learning_rate"),
    Alias("n_samples_per_prompt", "rollout.num_generations"),
    Alias("generate_max_len", "rollout.max_completion_length"),
    Alias(
        "rollout_batch_size",
        "rollout.prompts_per_step",
        "prompts; alone it is refused, since others count completions",
        _rollout_batch,
    ),
    Alias(
        "train_batch_size",
        "optim.minibatches",
        "rollout_batch_size × n_samples_per_prompt / train_batch_size; alone it is refused",
        _train_batch,
    ),
    Alias(
        "init_kl_coef", "kl.beta", "with OpenRLHF's other names in the reward by k1, unless use_kl_loss is on", _kl_coef
    ),
    Alias("kl_estimator", "kl.estimator", "k1, k2, k3; with use_kl_loss its gradient=plain", _kl_estimator),
    Alias("kl_target", "kl.controller.target", "with kl.controller.name=ziegler, unit=per_token", _kl_target),
    *(
        Alias(name, "kl.controller.horizon", "with kl.controller.name=ziegler", _horizon)
        for name in ("kl_horizon", "horizon")
    ),
    Alias("eps_clip_low_high", "loss.epsilon", "the first of two; the second is loss.epsilon_high", _clip_low_high),
    Alias("eps_clip", "loss.epsilon", "where eps_clip_low_high is not given", _eps_clip),
    Alias("dual_clip", "loss.delta", "null is none"),
    choice(
        "policy_loss_type",
        "loss.loss_type",
        {"ppo": {"loss.loss_type": "dapo"}, "gspo": {"loss.loss_type": "gspo"}},
        "ppo is dapo, the mean over tokens",
    ),
    Alias("max_epochs", "loss.num_iterations", "passes over a batch; alone it is refused", _epochs),
    *refer("run.max_steps", "Keel counts steps, not passes over the data: set run.max_steps", "num_episodes"),
    Alias("entropy_loss_coef", "loss.entropy_coef", "null leaves Keel's", unless_null("loss.entropy_coef")),
    choice("dynamic_filtering", "loss.dynamic_sampling", {True: {"loss.dynamic_sampling": True}, False: {}}),
    Alias(
        "lr_warmup_ratio",
        "optim.warmup_steps",
        "× max_steps",
        trl_steps.in_batches("lr_warmup_ratio", "optim.warmup_steps"),
    ),
    Alias("adam_offload", "optim.offload"),
    Alias("pretrain", "model.name"),
    choice("load_in_4bit", "model.quantization", {True: {"model.quantization": "4bit"}, False: {}}, "true is 4bit"),
    *(
        choice(
            name,
            "model.attn_implementation",
            {True: {"model.attn_implementation": "flash_attention_2"}, False: {}},
            "true is flash_attention_2",
        )
        for name in ("flash_attn", "flash_attention", "use_flash_attention", "use_flash_attn")
    ),
    Alias("prompt_max_len", "data.max_prompt_length"),
    Alias("prompt_split", "data.split"),
    Alias("label_key", "data.columns.answer"),
    Alias("eval_temperature", "eval.temperature"),
    Alias("eval_n_samples_per_prompt", "eval.k", "pass@1 and pass@n", pass_at),
    Alias("use_wandb", "log.wandb", "a key belongs into the environment, as WANDB_API_KEY", _wandb),
    Alias("wandb_run_name", "log.wandb.name"),
    Alias("max_norm", "optim.max_grad_norm"),
    Alias("l2", "optim.weight_decay"),
    Alias("adam_betas", "optim.betas"),
    choice(
        "lr_scheduler", "optim.schedule", {name: {"optim.schedule": name} for name in ("constant", "linear", "cosine")}
    ),
    choice(
        "advantage_estimator",
        "loss.baseline",
        {
            "group_norm": {"loss.baseline": "group_mean", "loss.scale_rewards": "group"},
            "grpo": {"loss.baseline": "group_mean", "loss.scale_rewards": "group"},
            "dr_grpo": {"loss.baseline": "group_mean", "loss.scale_rewards": "none"},
            "rloo": {"loss.baseline": "leave_one_out", "loss.scale_rewards": "none"},
        },
        "group_norm, dr_grpo and rloo, each with its loss.scale_rewards; gae needs a critic",
    ),
    Alias("no_advantage_std_norm", "loss.scale_rewards", "true is none", _no_std),
    Alias("prompt_data", "data.path"),
    Alias("input_key", "data.columns.prompt"),
    Alias("save_path", "run.dir", "its last part is run.name, unless that is given", output_dir),
    harmless("ckpt_path", "checkpoints are in the run's folder, run.dir"),
    Alias("max_ckpt_num", "checkpoint.keep"),
    choice("load_checkpoint", "run.if_exists", {True: {"run.if_exists": "resume"}, False: {}}, "true is resume"),
    Alias("wandb_project", "log.wandb.project"),
    Alias(
        "use_tensorboard",
        "log.tensorboard",
        "a folder is true: the files are in the run's",
        lambda value, settings: {"log.tensorboard": bool(value)},
    ),
    Alias("train_max_tokens_per_gpu", "optim.microbatch_tokens"),
    choice(
        "enable_vllm_is_correction",
        "loss.mismatch.kind",
        {True: {}, False: {"loss.mismatch.kind": "none"}},
        "true is Keel's default",
    ),
    Alias("vllm_is_truncated_threshold", "loss.mismatch.cap"),
    *(
        harmless(name, "optim.microbatch_tokens cuts the batch by tokens")
        for name in ("micro_train_batch_size", "micro_rollout_batch_size", "micro_batch_size", "grad_accum_steps")
    ),
    harmless("packing_samples", "batches are always packed by tokens"),
    harmless("apply_chat_template", "data.chat_template is the model's own unless set", True),
    zero_stage("zero_stage"),
    *only_one(LAUNCHED, "actor_num_nodes", "actor_num_gpus_per_node", "ref_num_nodes", "ref_num_gpus_per_node"),
    *only_one(TENSOR, "ds_tensor_parallel_size"),
    *only_one(CONTEXT, "ring_attn_size"),
    *no_counterpart(
        "every device trains, scores and samples: models and engines have no devices of their own",
        *("colocate_all_models", "vllm_num_engines", "vllm_sync_backend", "vllm_enable_sleep"),
        *("deepspeed_enable_sleep", "enforce_eager", "async_train"),
    ),
    *no_counterpart(
        CRITIC,
        *("critic_learning_rate", "value_clip", "gamma", "lambd", "vf_coef", "value_loss_coef", "gae_lambda"),
        *("lam", "vf_loss_coef", "cliprange_value"),
    ),
    *no_counterpart(
        "a reward is named in rewards: [{name, weight}], one of your own as module:attr",
        *("remote_rm_url", "reward_pretrain", "reward_model", "reward_model_path"),
    ),
    *no_counterpart("loss.scale_rewards divides advantages by group, batch or none", "normalize_reward"),
]
