"""Conversions of verl's values whose meaning depends on other settings."""

from __future__ import annotations

from typing import Any

from keel.base.errors import KeelError
from keel.config.alias import Convert, Options, Settings, boolean, choice, first_set, number

A, R, M = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
IN_LOSS, IN_REWARD = A + "use_kl_loss", "algorithm.use_kl_in_reward"
LORA_RANK = M + "lora_rank"
BETA = ("kl.beta", "beta", "kl_beta", "kl_coef", "kl_penalty", "init_kl_coef")


def _is_on(name: str, value: Any, coefficient: str, settings: Settings) -> bool:
    """Whether a switch of verl's KL term is on; then its coefficient has to be there, and the other switch off."""
    if settings.get(IN_LOSS) is True and settings.get(IN_REWARD) is True:
        raise KeelError(f"{IN_LOSS} and {IN_REWARD} are both true: Keel's penalty enters once, set kl.placement")
    on = boolean(name, value)
    if on and first_set(settings, coefficient, *BETA) is None:
        raise KeelError(f"{name} is true without {coefficient}: give it or kl.beta (verl's own is 0.001)")
    return on


def use_kl_loss(value: Any, settings: Settings) -> Options:
    """The penalty in the loss, reduced like it."""
    if _is_on(IN_LOSS, value, A + "kl_loss_coef", settings):
        return {"kl.placement": "loss", "kl.reduction": "loss"}
    return {} if settings.get(IN_REWARD) is True else {"kl.beta": 0.0}


def use_kl_in_reward(value: Any, settings: Settings) -> Options:
    """The penalty in the reward."""
    if _is_on(IN_REWARD, value, "algorithm.kl_ctrl.kl_coef", settings):
        return {"kl.placement": "reward"}
    return {} if settings.get(IN_LOSS) is True or IN_LOSS in settings else {"kl.beta": 0.0}


def when(option: str, convert: Convert | None) -> Convert:
    """An option that verl reads only while the switch `option` is on."""
    return lambda value, settings: {} if settings.get(option) is False or convert is None else convert(value, settings)


def when_adaptive(target: str) -> Convert:
    """A parameter of the controller that steers β."""

    def convert(value: Any, settings: Settings) -> Options:
        adaptive = settings.get("algorithm.kl_ctrl.type") == "adaptive" and settings.get(IN_REWARD) is not False
        return {target: value} if adaptive else {}

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
kl_type = choice(A + "kl_loss_type", "kl.estimator", VERL_KL).convert
penalty_type = choice(
    "algorithm.kl_penalty", "kl.estimator", {key: {"kl.estimator": v["kl.estimator"]} for key, v in VERL_KL.items()}
).convert


def adv_estimator(value: Any, settings: Settings) -> Options:
    """verl's own default, gae, is PPO's and learns a critic."""
    if value == "grpo":
        return {"loss.baseline": "group_mean"}
    if value == "rloo":
        return {"loss.baseline": "leave_one_out", "loss.scale_rewards": "none"}
    reason = "it needs a critic; " if value == "gae" else ""
    raise KeelError(f"algorithm.adv_estimator={value} has no counterpart: {reason}known: grpo, rloo")


def norm_adv(value: Any, settings: Settings) -> Options:
    """Only verl's grpo divides by the standard deviation."""
    by_std = boolean("algorithm.norm_adv_by_std_in_grpo", value)
    if settings.get("algorithm.adv_estimator") == "rloo":
        return {}
    return {"loss.scale_rewards": "group" if by_std else "none"}


def warmup(value: Any, settings: Settings) -> Options:
    """A share of the steps, which verl reads where lr_warmup_steps is negative or not given."""
    steps = settings.get(A + "optim.lr_warmup_steps")
    ratio = number(A + "optim.lr_warmup_steps_ratio", value, "give a share of the steps")
    if ratio == 0 or (isinstance(steps, int) and steps >= 0):
        return {}
    total = first_set(settings, "trainer.total_training_steps", "run.max_steps", "max_steps")
    if total is None:
        raise KeelError(
            f"{A}optim.lr_warmup_steps_ratio={value} is a share of the steps, and trainer.total_training_steps is not "
            "given: set optim.warmup_steps by hand"
        )
    return {"optim.warmup_steps": int(ratio * total)}


def epochs(value: Any, settings: Settings) -> Options:
    """verl reads it only where total_training_steps does not say how long to train."""
    if first_set(settings, "trainer.total_training_steps", "run.max_steps", "max_steps") is None:
        raise KeelError(
            f"trainer.total_epochs={value} has no counterpart: Keel counts steps, not passes over the data; set "
            "run.max_steps by hand"
        )
    return {}


def custom_reward(value: Any, settings: Settings) -> Options:
    """verl's reward function takes other arguments than Keel's, so that it has to be wrapped."""
    path = settings.get("custom_reward_function.path")
    name = settings.get("custom_reward_function.name", "compute_score")
    if path is None:
        return {}
    module = str(path).rpartition("/")[2].removesuffix(".py")
    raise KeelError(
        f"verl calls {name}(data_source, solution_str, ground_truth, extra_info), Keel reward(problem, text): wrap it "
        f"and name it by hand, rewards: [{{name: {module}:reward}}]"
    )


def optimizer_offload(value: Any, settings: Settings) -> Options:
    """Moments in main memory; FSDP moves them with the weights."""
    both = settings.get(A + "fsdp_config.param_offload") is True
    return {"parallel.offload" if both else "optim.offload": value}


def truncation(value: Any, settings: Settings) -> Options:
    """verl drops too long prompts first, so that its rule for them never acts."""
    if value in ("right", "middle"):
        raise KeelError(f"data.truncation={value} has no counterpart: use left, drop or error")
    return {"data.truncation": "drop" if settings.get("data.filter_overlong_prompts") is True else value}


def minibatches(value: Any, settings: Settings) -> Options:
    """verl sets the problems of an update, Keel the updates of a batch."""
    batch = first_set(settings, "data.train_batch_size", "rollout.prompts_per_step", default=16)
    minibatches, remainder = divmod(int(batch), int(number(A + "ppo_mini_batch_size", value, "give a whole number")))
    if remainder or not minibatches:
        raise KeelError(
            f"{A}ppo_mini_batch_size={value} does not divide {batch} problems a step: set optim.minibatches"
        )
    return {"optim.minibatches": minibatches}


def val_sampling(value: Any, settings: Settings) -> Options:
    """Greedy where it is off, unless a temperature is set."""
    samples = boolean(R + "val_kwargs.do_sample", value)
    return {} if samples or R + "val_kwargs.temperature" in settings else {"eval.temperature": 0.0}


def pass_at(value: Any, settings: Settings) -> Options:
    """Completions of a problem at evaluation."""
    return {"eval.k": [1] if value == 1 else [1, value]}


def lora_rank(value: Any, settings: Settings) -> Options:
    """verl's 0 is no adapter."""
    return {"model.lora.r": value} if value else {}


def lora_alpha(value: Any, settings: Settings) -> Options:
    """Read where there is an adapter."""
    return {"model.lora.alpha": value} if settings.get(LORA_RANK) else {}


def top_k(value: Any, settings: Settings) -> Options:
    """verl's -1 is all tokens."""
    return {"rollout.top_k": max(0, value) if isinstance(value, int) else value}


def positive_or(target: str, otherwise: Options) -> Convert:
    """The value where it is a positive number, else these options."""
    return lambda value, settings: {target: value} if isinstance(value, int) and value > 0 else otherwise


def logger(value: Any, settings: Settings) -> Options:
    """verl's list of loggers."""
    loggers = {value} if isinstance(value, str) else set(value or [])
    unknown = loggers - {"console", "wandb", "tensorboard", "file"}
    if unknown:
        raise KeelError(f"trainer.logger={sorted(unknown)[0]} has no counterpart: known: console, tensorboard, wandb")
    project = first_set(settings, "trainer.project_name", default="keel")
    return {
        "log.tensorboard": "tensorboard" in loggers,
        **({"log.wandb": {"project": project}} if "wandb" in loggers else {}),
    }
