"""TRL's GRPOConfig (1.16) as data: what each option becomes, and the few conversions."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from keel.base.errors import KeelError
from keel.config import trl_steps
from keel.config.alias import (
    Alias,
    Convert,
    Options,
    Settings,
    boolean,
    choice,
    first_set,
    group_size,
    harmless,
    no_counterpart,
    unless_null,
    whole,
)
from keel.config.aliases_parallel import TRL_PARALLEL
from keel.config.verl_values import LORA_RANK


def _per_device(value: Any, settings: Settings) -> Options:
    """TRL counts completions: per device × slices of a batch of rollouts."""
    completions = whole("per_device_train_batch_size", value)
    if settings.get("generation_batch_size") is not None:
        return {}  # which says it all
    steps, _ = trl_steps.slices(settings)
    group = group_size(settings)
    prompts, remainder = divmod(completions * steps, group)
    if remainder:
        raise KeelError(
            f"per_device_train_batch_size={value} × {steps} accumulated is {completions * steps} completions, which is "
            f"no multiple of num_generations={group}: set rollout.prompts_per_step"
        )
    return {"rollout.prompts_per_step": prompts}


def _generation_batch(value: Any, settings: Settings) -> Options:
    if value is None:
        return {}
    slices, _ = trl_steps.slices(settings)
    group = group_size(settings)
    prompts, remainder = divmod(slices * int(first_set(settings, "per_device_train_batch_size", default=8)), group)
    if remainder:
        raise KeelError(f"generation_batch_size={value} is no multiple of num_generations={group}")
    return {"rollout.prompts_per_step": prompts, **trl_steps.minibatches(settings)}


def _only_with_sync(target: str) -> Convert:
    def convert(value: Any, settings: Settings) -> Options:
        if settings.get("sync_ref_model") is False:
            return {}
        options: Options = {target: value}
        if target == "reference.every":
            options = trl_steps.in_batches("ref_model_sync_steps", target)(value, settings)
        return {**({} if "sync_ref_model" in settings else {"reference.kind": "ema"}), **options}

    return convert


def output_dir(value: Any, settings: Settings) -> Options:
    """A run's own folder: its last part is the run's name, unless that is given."""
    path = PurePath(str(value))
    name = first_set(settings, "run_name", "run.name", "exp_name")
    return {"run.dir": str(path)} if name else {"run.dir": str(path.parent), "run.name": path.name or "default"}


def _report_to(value: Any, settings: Settings) -> Options:
    loggers = {value} if isinstance(value, str) else set(value or ["none"])
    unknown = loggers - {"tensorboard", "wandb", "none", "all"}
    if unknown:
        raise KeelError(f"report_to={sorted(unknown)[0]} has no counterpart: known: tensorboard, wandb, none")
    wandb = {"log.wandb": {"project": "keel"}} if loggers & {"wandb", "all"} else {}
    return {"log.tensorboard": bool(loggers & {"tensorboard", "all"}), **wandb}


def _precision(dtype: str) -> Convert:
    name = "bf16" if dtype == "bfloat16" else "fp16"
    return lambda value, settings: {"optim.precision": dtype} if value is not None and boolean(name, value) else {}


def _dataset_name(value: Any, settings: Settings) -> Options:
    config = settings.get("dataset_config")
    return {"data.path": value if config is None else f"{value},{config}"}


def _dataset_config(value: Any, settings: Settings) -> Options:
    if value is not None and settings.get("dataset_name") is None:
        raise KeelError(f"dataset_config={value} needs a dataset_name: set data.path=NAME,{value}")
    return {}


def _vllm_mode(value: Any, settings: Settings) -> Options:
    """token_truncate, token_mask, sequence_truncate, sequence_mask."""
    level, _, kind = str(value).partition("_")
    if level not in ("token", "sequence") or kind not in ("truncate", "mask"):
        raise KeelError(
            f"vllm_importance_sampling_mode={value} has no counterpart: use token or sequence, truncate or mask"
        )
    return {"loss.mismatch.kind": kind, "loss.mismatch.level": level}


def _clip_min(value: Any, settings: Settings) -> Options:
    return {} if value is None else {"loss.mismatch.kind": "icepop", "loss.mismatch.floor": value}


def _prompt_length(value: Any, settings: Settings) -> Options:
    """TRL cut prompts that are too long at their left end."""
    if value is None:
        return {}
    return {"data.max_prompt_length": value, **({} if "data.truncation" in settings else {"data.truncation": "left"})}


def _min_p(value: Any, settings: Settings) -> Options:
    return {"rollout.min_p": 0.0 if value is None else value}


def _of_adapter(option: str) -> Convert:
    """An option of the adapter, which `use_peft: false`, `use_lora: false` and `lora_rank: 0` leave out."""

    def convert(value: Any, settings: Settings) -> Options:
        off = any(settings.get(name) is False for name in ("use_peft", "use_lora")) or settings.get(LORA_RANK) == 0
        return {} if off else {f"model.lora.{option}": value}

    return convert


TRL = [
    Alias("learning_rate", "optim.learning_rate"),
    Alias("loss_type", "loss.loss_type", "TRL's default is dapo, Keel's is grpo; luspo and vespo have no counterpart"),
    Alias("epsilon", "loss.epsilon"),
    Alias("epsilon_high", "loss.epsilon_high"),
    Alias("delta", "loss.delta"),
    Alias("num_iterations", "loss.num_iterations"),
    Alias("importance_sampling_level", "loss.importance_sampling_level"),
    choice(
        "scale_rewards",
        "loss.scale_rewards",
        {
            **{name: {"loss.scale_rewards": name} for name in ("group", "batch", "none")},
            True: {"loss.scale_rewards": "group"},
            False: {"loss.scale_rewards": "none"},
        },
        "true is group, false is none",
    ),
    Alias("mask_truncated_completions", "loss.mask_truncated_completions"),
    Alias("entropy_coef", "loss.entropy_coef"),
    Alias("sapo_temperature_pos", "loss.sapo_temperature_pos"),
    Alias("sapo_temperature_neg", "loss.sapo_temperature_neg"),
    choice(
        "use_bias_correction_kl",
        "kl.gradient",
        {True: {"kl.gradient": "rho"}, False: {"kl.gradient": "plain"}},
        "true is ρ·k3, kl.gradient=rho; false is plain k3; Keel's auto has the gradient of the first",
    ),
    choice(
        "sync_ref_model",
        "reference.kind",
        {True: {"reference.kind": "ema"}, False: {}},
        "true is reference.kind=ema; works with LoRA too",
    ),
    Alias("ref_model_mixup_alpha", "reference.alpha", "with reference.kind=ema", _only_with_sync("reference.alpha")),
    Alias("ref_model_sync_steps", "reference.every", trl_steps.COUNTED, _only_with_sync("reference.every")),
    Alias("temperature", "rollout.temperature"),
    Alias("top_p", "rollout.top_p"),
    Alias("top_k", "rollout.top_k"),
    Alias("min_p", "rollout.min_p", "null is 0", _min_p),
    Alias("max_completion_length", "rollout.max_completion_length", "TRL's default is 512, Keel's is 64"),
    Alias("max_prompt_length", "data.max_prompt_length", "with data.truncation=left, as TRL cut", _prompt_length),
    Alias("max_tool_calling_iterations", "rollout.max_turns", "null leaves Keel's", unless_null("rollout.max_turns")),
    choice("use_vllm", "rollout.engine", {True: {"rollout.engine": "vllm"}, False: {"rollout.engine": "native"}}),
    choice(
        "vllm_importance_sampling_correction",
        "loss.mismatch.kind",
        {True: {}, False: {"loss.mismatch.kind": "none"}},
        "true is Keel's default",
    ),
    Alias("vllm_importance_sampling_mode", "loss.mismatch", "kind and level, e.g. sequence_mask", _vllm_mode),
    *(
        Alias(name, "loss.mismatch.cap", "null leaves Keel's", unless_null("loss.mismatch.cap"))
        for name in ("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap")
    ),
    Alias("vllm_importance_sampling_clip_min", "loss.mismatch.floor", "with loss.mismatch.kind=icepop", _clip_min),
    choice(
        "multi_objective_aggregation",
        "reward.aggregate",
        {
            "sum_then_normalize": {"reward.aggregate": "sum"},
            "normalize_then_sum": {"reward.aggregate": "normalised_sum"},
        },
    ),
    Alias("per_device_train_batch_size", "rollout.prompts_per_step", "completions × accumulation / group", _per_device),
    harmless("gradient_accumulation_steps", "counted in rollout.prompts_per_step; microbatch_tokens cuts the batch"),
    Alias(
        "steps_per_generation",
        "optim.minibatches",
        "steps_per_generation / gradient_accumulation_steps; counted in rollout.prompts_per_step too",
        lambda value, settings: {} if value is None else trl_steps.minibatches(settings),
    ),
    Alias(
        "generation_batch_size",
        "rollout.prompts_per_step",
        "completions / num_generations, minibatches",
        _generation_batch,
    ),
    choice(
        "lr_scheduler_type",
        "optim.schedule",
        {
            **{name: {"optim.schedule": name} for name in ("constant", "linear", "cosine")},
            "constant_with_warmup": {"optim.schedule": "constant"},
        },
    ),
    Alias(
        "warmup_steps",
        "optim.warmup_steps",
        trl_steps.COUNTED + "; below 1 a share of max_steps",
        trl_steps.in_batches("warmup_steps", "optim.warmup_steps"),
    ),
    Alias(
        "warmup_ratio",
        "optim.warmup_steps",
        "× max_steps, in batches",
        trl_steps.in_batches("warmup_ratio", "optim.warmup_steps"),
    ),
    Alias("adam_beta1", "optim.betas", "the first of two", trl_steps.betas),
    Alias("adam_beta2", "optim.betas", "the second of two", trl_steps.betas),
    Alias("adam_epsilon", "optim.eps"),
    Alias("weight_decay", "optim.weight_decay"),
    Alias("max_grad_norm", "optim.max_grad_norm"),
    choice(
        "optim",
        "optim.optimizer",
        {name: {"optim.optimizer": "adamw"} for name in ("adamw_torch", "adamw_torch_fused")}
        | {name: {"optim.optimizer": "adamw8bit"} for name in ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")},
        "as a word; Keel's optim is a section",
    ),
    Alias("bf16", "optim.precision", "true is bfloat16", _precision("bfloat16")),
    Alias("fp16", "optim.precision", "true is float16", _precision("float16")),
    Alias("gradient_checkpointing", "model.gradient_checkpointing"),
    Alias("torch_compile", "model.compile"),
    Alias("trust_remote_code", "model.trust_remote_code"),
    Alias("model_name_or_path", "model.name"),
    Alias("dataset_name", "data.path", 'with a dataset_config as "name,config"', _dataset_name),
    Alias("dataset_config", "data.path", "the part of data.path behind the comma", _dataset_config),
    Alias("dataset_train_split", "data.split"),
    Alias("dataset_test_split", "task.eval_split"),
    harmless("dataset_streaming", "data are read whole", False),
    Alias("output_dir", "run.dir", "its last part is run.name, unless that is given", output_dir),
    Alias("run_name", "run.name"),
    Alias(
        "save_steps",
        "checkpoint.every",
        trl_steps.COUNTED,
        trl_steps.while_by_steps("save_steps", "checkpoint.every", "save_strategy"),
    ),
    Alias("save_strategy", "checkpoint.every", "steps; no is a checkpoint at the end", trl_steps.save_strategy),
    Alias(
        "save_total_limit",
        "checkpoint.keep",
        "null keeps all in TRL; Keel keeps 3 unless checkpoint.keep says more",
        unless_null("checkpoint.keep"),
    ),
    Alias(
        "eval_steps",
        "eval.every",
        trl_steps.COUNTED,
        trl_steps.while_by_steps("eval_steps", "eval.every", "eval_strategy", "evaluation_strategy"),
    ),
    *(
        Alias(name, "eval.every", "no is 0: at the start and the end only", trl_steps.eval_strategy)
        for name in ("eval_strategy", "evaluation_strategy")
    ),
    *(Alias(name, "log", "tensorboard, wandb, none", _report_to) for name in ("report_to", "log_with")),
    harmless("disable_dropout", "dropout is off unless model.dropout=true", True),
    harmless("remove_unused_columns", "columns are named in data.columns"),
    harmless("logging_steps", "every step is logged"),
    harmless("log_completions", "rollouts.jsonl holds the completions; log.rollouts_every sets how often"),
    harmless("num_completions_to_print", "rollouts.jsonl holds the completions"),
    harmless("shuffle_dataset", "problems are drawn by seed and step", True),
    harmless("repetition_penalty", "the sampled distribution is the policy's own", 1.0),
    harmless("top_entropy_quantile", "all tokens are trained", 1.0),
    harmless("cast_lm_head_to_fp32", "log-probabilities are always computed in fp32"),
    harmless("use_adaptive_entropy", "loss.entropy_coef is constant", False),
    Alias("num_train_epochs", "", "set run.max_steps; Keel counts steps, not passes over the data", trl_steps.epochs),
    *(
        Alias(
            name,
            f"model.lora.{option}",
            "read unless use_peft or use_lora is false or lora_rank 0",
            _of_adapter(option),
        )
        for name, option in (
            *(("lora_r", "r"), ("lora_alpha", "alpha"), ("lora_dropout", "dropout")),
            *(("target_modules", "targets"), ("lora_target_modules", "targets")),
        )
    ),
    *(Alias(name, "model.dtype") for name in ("torch_dtype", "dtype")),
    Alias("attn_implementation", "model.attn_implementation"),
    *(
        choice(name, "model.lora", {True: {"model.lora": {}}, False: {}}, "true is LoRA of rank 16, as in TRL")
        for name in ("use_peft", "use_lora")
    ),
    Alias("train_dataset", "data.path", "a file or hub name"),
    Alias("eval_dataset", "task.eval_path", "a file or hub name"),
    *no_counterpart(
        "rewards are named in rewards: [{name, weight}], by hand; a function of yours is module:attr", "reward_funcs"
    ),
    *no_counterpart("LoRA is model.lora: {r, alpha, dropout, targets}, by hand", "peft_config"),
    *no_counterpart("the tokenizer comes with model.name", "processing_class"),
    *no_counterpart("give them to keel.train(callbacks=[…])", "callbacks"),
    *no_counterpart("tools belong to the task", "tools"),
    *no_counterpart("give each reward its weight in rewards: [{name, weight}]", "reward_weights"),
    *no_counterpart("completions a problem at evaluation are eval.k", "num_generations_eval"),
    *no_counterpart("the reference is part of the run; choose it with reference.kind", "ref_model"),
    *no_counterpart("mixed precision and loading are set by model.dtype and optim.precision", "model_init_kwargs"),
    *no_counterpart("use rollout.temperature, top_p, top_k, min_p and stop", "generation_kwargs"),
    *no_counterpart("set data.chat_template", "chat_template_kwargs"),
    *no_counterpart("loss.mismatch and kl.collect_max leave out what is off-policy", "off_policy_mask_threshold"),
    *no_counterpart(
        "that loss is not built in: a loss of your own is loss.loss_type=module:attr",
        *("vespo_k_pos", "vespo_k_neg", "vespo_lambda_pos", "vespo_lambda_neg"),
    ),
    *no_counterpart(
        "loss.entropy_coef is constant", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"
    ),
    *no_counterpart("mixture-of-experts balancing is not built in", "router_aux_loss_coef"),
    *no_counterpart(
        "settings of the vLLM engine itself have no options here",
        *("vllm_mode", "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_structured_outputs_regex"),
        *("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port"),
        *("vllm_gpu_memory_utilization", "vllm_max_model_length"),
    ),
    *no_counterpart(
        "the native engine does its own batching and caching",
        *("cache_implementation", "use_transformers_paged", "use_transformers_continuous_batching"),
        *("transformers_continuous_batching_config", "pad_to_multiple_of", "ds3_gather_for_generation"),
    ),
    *no_counterpart("nothing is uploaded", "log_completions_hub_repo"),
    *TRL_PARALLEL,
    *no_counterpart("weights are spread by PyTorch's FSDP2: parallel.sharding, parallel.offload", "deepspeed"),
    *no_counterpart("a layer at a time is sharded; what can be chosen is in parallel", "fsdp_config"),
    harmless("push_to_hub", "nothing is uploaded", False),
    harmless("do_train", "a run trains", True),
    harmless("eval_on_start", "a run is evaluated before it trains, always", True),
    harmless("logging_strategy", "every step is logged"),
    harmless("logging_first_step", "every step is logged"),
    harmless("dataloader_num_workers", "data are read once, whole"),
    harmless("per_device_eval_batch_size", "eval.samples problems are evaluated at a time"),
    *no_counterpart("images are not supported", "log_multimodal"),
    *no_counterpart("rollouts.jsonl names the problem of every completion", "log_unique_prompts"),
]
