"""verl's YAML (0.9) as data: what each option becomes, and the few conversions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keel.config.aliases import Alias, Convert, choice, first_given, harmless, no, number, switch, unless_null
from keel.errors import KeelError

Given = Mapping[str, Any]
Options = Mapping[str, Any]


A, R, M = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
IN_LOSS, IN_REWARD = A + "use_kl_loss", "algorithm.use_kl_in_reward"


def _both(given: Given) -> None:
    if given.get(IN_LOSS) is True and given.get(IN_REWARD) is True:
        raise KeelError(f"{IN_LOSS} and {IN_REWARD} are both true: Keel's penalty enters once, set kl.placement")


def _use_kl_loss(value: Any, given: Given) -> Options:
    _both(given)
    if switch(IN_LOSS, value):
        return {"kl.placement": "loss", "kl.reduction": "loss"}
    return {} if given.get(IN_REWARD) is True else {"kl.beta": 0.0}


def _use_kl_in_reward(value: Any, given: Given) -> Options:
    _both(given)
    if switch(IN_REWARD, value):
        return {"kl.placement": "reward"}
    return {} if given.get(IN_LOSS) is True or IN_LOSS in given else {"kl.beta": 0.0}


def _when(switch: str, convert: Convert | None) -> Convert:
    """An option that verl reads only while `switch` is on."""
    return lambda value, given: {} if given.get(switch) is False or convert is None else convert(value, given)


def _when_adaptive(target: str) -> Convert:
    def convert(value: Any, given: Given) -> Options:
        steers = given.get("algorithm.kl_ctrl.type") == "adaptive" and given.get(IN_REWARD) is not False
        return {target: value} if steers else {}

    return convert


VERL_KL: dict[Any, dict[str, Any]] = {
    **{name: {"kl.estimator": "k1", "kl.gradient": "plain"} for name in ("kl", "k1")},
    **{name: {"kl.estimator": "k2", "kl.gradient": "plain"} for name in ("mse", "k2")},
    **{name: {"kl.estimator": "k3", "kl.gradient": "plain"} for name in ("low_var_kl", "k3")},
    "abs": {"kl.estimator": "abs", "kl.gradient": "plain"},
    **{name: {"kl.estimator": "k1", "kl.gradient": "k2"} for name in ("kl+", "k1+")},
    **{name: {"kl.estimator": "k3", "kl.gradient": "k2"} for name in ("low_var_kl+", "k3+")},
    "full": {"kl.estimator": "exact"},
}
_kl_type = choice(A + "kl_loss_type", "kl.estimator", VERL_KL).convert
_penalty_type = choice(
    "algorithm.kl_penalty", "kl.estimator", {key: {"kl.estimator": v["kl.estimator"]} for key, v in VERL_KL.items()}
).convert


def _estimator(value: Any, given: Given) -> Options:
    """verl's own default, gae, is PPO's and learns a critic."""
    if value in ("grpo", "rloo"):
        return {"loss.baseline": "group_mean" if value == "grpo" else "leave_one_out"}
    why = "it needs a critic; " if value == "gae" else ""
    raise KeelError(f"algorithm.adv_estimator={value} has no counterpart: {why}known: grpo, rloo")


def _warmup(value: Any, given: Given) -> Options:
    """A share of the steps, which verl reads where lr_warmup_steps is negative or not given."""
    steps = given.get(A + "optim.lr_warmup_steps")
    ratio = number(A + "optim.lr_warmup_steps_ratio", value, "give a share of the steps")
    if ratio == 0 or (isinstance(steps, int) and steps >= 0):
        return {}
    total = first_given(given, "trainer.total_training_steps", "run.max_steps", "max_steps")
    if total is None:
        raise KeelError(
            f"{A}optim.lr_warmup_steps_ratio={value} is a share of the steps, and trainer.total_training_steps is not "
            "given: set optim.warmup_steps by hand"
        )
    return {"optim.warmup_steps": int(ratio * total)}


def _epochs(value: Any, given: Given) -> Options:
    """verl reads it only where total_training_steps does not say how long to train."""
    if first_given(given, "trainer.total_training_steps", "run.max_steps", "max_steps") is None:
        raise KeelError(
            f"trainer.total_epochs={value} has no counterpart: Keel counts steps, not passes over the data; set "
            "run.max_steps by hand"
        )
    return {}


def _own_reward(value: Any, given: Given) -> Options:
    """verl's function has other arguments than Keel's, so that its name alone would not do."""
    path, name = given.get("custom_reward_function.path"), given.get("custom_reward_function.name", "compute_score")
    if path is None:
        return {}
    module = str(path).rpartition("/")[2].removesuffix(".py")
    raise KeelError(
        f"verl calls {name}(data_source, solution_str, ground_truth, extra_info), Keel reward(problem, text): wrap it "
        f"and name it by hand, rewards: [{{name: {module}:reward}}]"
    )


def _truncation(value: Any, given: Given) -> Options:
    """verl drops too long prompts first, so that its rule for them never acts."""
    if value in ("right", "middle"):
        raise KeelError(f"data.truncation={value} has no counterpart: use left, drop or error")
    return {"data.truncation": "drop" if given.get("data.filter_overlong_prompts") is True else value}


def _minibatches(value: Any, given: Given) -> Options:
    batch = first_given(given, "data.train_batch_size", "rollout.prompts_per_step", default=16)
    parts, rest = divmod(int(batch), int(number(A + "ppo_mini_batch_size", value, "give a whole number")))
    if rest or not parts:
        raise KeelError(
            f"{A}ppo_mini_batch_size={value} does not divide {batch} problems a step: set optim.minibatches"
        )
    return {"optim.minibatches": parts}


def _val_sampling(value: Any, given: Given) -> Options:
    return {} if switch(R + "val_kwargs.do_sample", value) else {"eval.temperature": 0.0}


def _lora_rank(value: Any, given: Given) -> Options:
    return {"model.lora.r": value} if value else {}


def _lora_alpha(value: Any, given: Given) -> Options:
    return {"model.lora.alpha": value} if given.get(M + "lora_rank") else {}


def _top_k(value: Any, given: Given) -> Options:
    return {"rollout.top_k": max(0, value) if isinstance(value, int) else value}


def _positive_or(target: str, otherwise: Options) -> Convert:
    return lambda value, given: {target: value} if isinstance(value, int) and value > 0 else otherwise


def _logger(value: Any, given: Given) -> Options:
    wanted = {value} if isinstance(value, str) else set(value or [])
    odd = wanted - {"console", "wandb", "tensorboard", "file"}
    if odd:
        raise KeelError(f"trainer.logger={sorted(odd)[0]} has no counterpart: known: console, tensorboard, wandb")
    project = first_given(given, "trainer.project_name", default="keel")
    return {
        "log.tensorboard": "tensorboard" in wanted,
        **({"log.wandb": {"project": project}} if "wandb" in wanted else {}),
    }


VERL = [
    Alias(IN_LOSS, "kl.placement", "true is placement loss and reduction loss; false is kl.beta=0", _use_kl_loss),
    Alias(
        A + "kl_loss_coef",
        "kl.beta",
        "read while use_kl_loss is on",
        _when(IN_LOSS, lambda value, given: {"kl.beta": value}),
    ),
    Alias(
        A + "kl_loss_type",
        "kl.estimator",
        "low_var_kl is k3, mse k2, kl k1, each with gradient=plain; a + is gradient=k2; full is exact",
        _when(IN_LOSS, _kl_type),
    ),
    Alias(IN_REWARD, "kl.placement", "true is placement reward; β/σ under scale_rewards=group", _use_kl_in_reward),
    Alias("algorithm.kl_penalty", "kl.estimator", "read while use_kl_in_reward is on", _when(IN_REWARD, _penalty_type)),
    Alias(
        "algorithm.kl_ctrl.kl_coef",
        "kl.beta",
        "read while use_kl_in_reward is on",
        _when(IN_REWARD, lambda value, given: {"kl.beta": value}),
    ),
    Alias(
        "algorithm.kl_ctrl.type",
        "kl.controller.name",
        "fixed; adaptive is ziegler with unit=per_token",
        _when(
            IN_REWARD,
            choice(
                "algorithm.kl_ctrl.type",
                "kl.controller.name",
                {
                    "fixed": {"kl.controller.name": "fixed"},
                    "adaptive": {"kl.controller.name": "ziegler", "kl.controller.unit": "per_token"},
                },
            ).convert,
        ),
    ),
    Alias(
        "algorithm.kl_ctrl.horizon", "kl.controller.horizon", "when adaptive", _when_adaptive("kl.controller.horizon")
    ),
    Alias(
        "algorithm.kl_ctrl.target_kl", "kl.controller.target", "when adaptive", _when_adaptive("kl.controller.target")
    ),
    Alias(
        "algorithm.adv_estimator",
        "loss.baseline",
        "grpo, rloo; gae, verl's default, needs a critic and has no counterpart",
        _estimator,
    ),
    choice(
        "algorithm.norm_adv_by_std_in_grpo",
        "loss.scale_rewards",
        {True: {"loss.scale_rewards": "group"}, False: {"loss.scale_rewards": "none"}},
    ),
    Alias("algorithm.filter_groups.enable", "loss.dynamic_sampling"),
    Alias("algorithm.filter_groups.max_num_gen_batches", "loss.dynamic_sampling_rounds"),
    Alias("data.train_batch_size", "rollout.prompts_per_step"),
    Alias("data.train_files", "data.path", "verl's parquet layout is read as it is"),
    Alias("data.val_files", "task.eval_path", "null holds a tenth of the problems out", unless_null("task.eval_path")),
    Alias("data.truncation", "data.truncation", "drop where data.filter_overlong_prompts is true", _truncation),
    choice(
        "data.filter_overlong_prompts",
        "data.truncation",
        {True: {"data.truncation": "drop"}, False: {}},
        "too long prompts are left out and counted",
    ),
    harmless("data.filter_overlong_prompts_workers", "prompts are measured in one process"),
    harmless("data.reward_fn_key", "a reward sees every column in problem.info"),
    harmless("data.return_raw_chat", "rollouts.jsonl holds the messages"),
    harmless("data.val_batch_size", "eval.samples problems are evaluated at a time"),
    harmless("data.dataloader_num_workers", "data are read once, whole"),
    harmless("data.train_max_samples", "all rows are used", -1),
    harmless("data.val_max_samples", "set eval.samples", -1),
    Alias("data.max_response_length", "rollout.max_completion_length"),
    Alias("data.prompt_key", "data.columns.prompt"),
    harmless("data.shuffle", "problems are drawn by seed and step", True),
    Alias(R + "n", "rollout.num_generations"),
    Alias(R + "temperature", "rollout.temperature"),
    Alias(R + "top_p", "rollout.top_p"),
    Alias(R + "top_k", "rollout.top_k", "-1 is 0", _top_k),
    Alias(R + "response_length", "rollout.max_completion_length"),
    Alias(R + "multi_turn.max_turns", "rollout.max_turns", "null leaves Keel's", unless_null("rollout.max_turns")),
    choice(R + "name", "rollout.engine", {"vllm": {"rollout.engine": "vllm"}, "hf": {"rollout.engine": "native"}}),
    Alias(R + "val_kwargs.temperature", "eval.temperature"),
    Alias(
        R + "val_kwargs.n",
        "eval.k",
        "pass@1 and pass@n",
        lambda value, given: {"eval.k": [1] if value == 1 else [1, value]},
    ),
    Alias(R + "val_kwargs.do_sample", "eval.temperature", "false is 0, greedy", _val_sampling),
    Alias(M + "path", "model.name"),
    Alias(M + "enable_gradient_checkpointing", "model.gradient_checkpointing"),
    Alias(M + "trust_remote_code", "model.trust_remote_code"),
    Alias(M + "lora_rank", "model.lora.r", "0 is no LoRA", _lora_rank),
    Alias(M + "lora_alpha", "model.lora.alpha", "with a lora_rank", _lora_alpha),
    Alias(
        M + "target_modules",
        "model.lora.targets",
        "with a lora_rank",
        lambda value, given: {"model.lora.targets": value} if given.get(M + "lora_rank") else {},
    ),
    Alias(A + "ppo_mini_batch_size", "optim.minibatches", "train_batch_size / ppo_mini_batch_size", _minibatches),
    Alias(A + "ppo_epochs", "loss.num_iterations"),
    Alias(A + "ppo_max_token_len_per_gpu", "optim.microbatch_tokens"),
    harmless(A + "ppo_micro_batch_size_per_gpu", "optim.microbatch_tokens cuts the batch by tokens"),
    harmless(A + "ppo_micro_batch_size", "optim.microbatch_tokens cuts the batch by tokens"),
    harmless(A + "use_dynamic_bsz", "batches are always cut by tokens"),
    Alias(
        A + "clip_ratio",
        "loss.epsilon",
        "where clip_ratio_low is not given",
        lambda value, given: {} if given.get(A + "clip_ratio_low") is not None else {"loss.epsilon": value},
    ),
    Alias(A + "clip_ratio_low", "loss.epsilon"),
    Alias(A + "clip_ratio_high", "loss.epsilon_high"),
    Alias(A + "clip_ratio_c", "loss.delta", "verl's dual clip bounds the ratio where the advantage is negative"),
    choice(
        A + "loss_agg_mode",
        "loss.loss_type",
        {
            "token-mean": {"loss.loss_type": "dapo"},
            "seq-mean-token-mean": {"loss.loss_type": "grpo"},
            "seq-mean-token-sum-norm": {"loss.loss_type": "dr_grpo"},
        },
        "Keel's losses differ in their reduction: token-mean is dapo, seq-mean-token-mean grpo",
    ),
    Alias(A + "entropy_coeff", "loss.entropy_coef"),
    Alias(A + "grad_clip", "optim.max_grad_norm"),
    Alias(A + "use_torch_compile", "model.compile"),
    Alias(A + "optim.lr", "optim.learning_rate"),
    Alias(A + "optim.weight_decay", "optim.weight_decay"),
    Alias(A + "optim.betas", "optim.betas"),
    Alias(A + "optim.lr_warmup_steps_ratio", "optim.warmup_steps", "× total_training_steps", _warmup),
    Alias(A + "optim.lr_warmup_steps", "optim.warmup_steps", "negative is 0", _positive_or("optim.warmup_steps", {})),
    choice(
        A + "optim.warmup_style",
        "optim.schedule",
        {"constant": {"optim.schedule": "constant"}, "cosine": {"optim.schedule": "cosine"}},
    ),
    choice(
        A + "optim.lr_scheduler_type",
        "optim.schedule",
        {"constant": {"optim.schedule": "constant"}, "cosine": {"optim.schedule": "cosine"}},
    ),
    Alias(
        A + "optim.min_lr_ratio",
        "optim.final_ratio",
        "null is 0",
        lambda value, given: {"optim.final_ratio": value or 0.0},
    ),
    Alias(A + "fsdp_config.optimizer_offload", "optim.offload"),
    Alias("actor_rollout_ref.ref.fsdp_config.param_offload", "reference.offload"),
    Alias("trainer.total_training_steps", "run.max_steps", "null leaves Keel's", unless_null("run.max_steps")),
    Alias("trainer.experiment_name", "run.name"),
    Alias("trainer.default_local_dir", "run.dir"),
    Alias("trainer.project_name", "log.wandb.project", "with wandb in trainer.logger", lambda value, given: {}),
    Alias("trainer.logger", "log", "console, tensorboard, wandb", _logger),
    Alias("trainer.save_freq", "checkpoint.every", "-1 leaves Keel's", _positive_or("checkpoint.every", {})),
    Alias(
        "trainer.test_freq",
        "eval.every",
        "-1 is 0: at the start and the end",
        _positive_or("eval.every", {"eval.every": 0}),
    ),
    Alias("trainer.max_actor_ckpt_to_keep", "checkpoint.keep", "null leaves Keel's", unless_null("checkpoint.keep")),
    harmless("trainer.nnodes", "one machine", 1),
    harmless("trainer.critic_warmup", "there is no critic", 0),
    Alias("trainer.total_epochs", "", "set run.max_steps; Keel counts steps, not passes over the data", _epochs),
    harmless(A + "policy_loss.loss_mode", "another loss is loss.loss_type, by hand", "vanilla"),
    harmless(M + "use_remove_padding", "batches are cut by tokens"),
    harmless("trainer.balance_batch", "one device"),
    harmless("trainer.resume_mode", "a run is resumed by run.if_exists=resume"),
    harmless("trainer.val_before_train", "a run is evaluated before it trains, always", True),
    harmless(A + "fsdp_config.param_offload", "weights stay on the device", False),
    harmless("trainer.n_gpus_per_node", "Keel trains on one device", 1),
    harmless(R + "tensor_model_parallel_size", "Keel samples on one device", 1),
    harmless(A + "ulysses_sequence_parallel_size", "Keel trains on one device", 1),
    harmless("actor_rollout_ref.hybrid_engine", "the engine shares the policy's weights", True),
    harmless("reward_model.enable", "rewards are functions", False),
    *no(
        "settings of the engines themselves have no options here",
        *(R + name for name in ("gpu_memory_utilization", "enforce_eager")),
        *(R + name for name in ("free_cache_engine", "max_num_batched_tokens", "max_num_seqs", "load_format")),
        *(R + name for name in ("log_prob_micro_batch_size_per_gpu", "enable_chunked_prefill", "dtype", "mode")),
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    ),
    *no("Keel trains on one device", A + "strategy"),
    *(
        Alias(
            "custom_reward_function." + name, "", "a function of yours is rewards: [{name: module:attr}]", _own_reward
        )
        for name in ("path", "name")
    ),
]
