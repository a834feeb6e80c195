"""Conversions of peers' KL terms and of their counts of prompts, completions, updates and steps.

Keel's steps are batches of rollouts. TRL's steps are optimizer updates, and one batch may have several. TRL raises
`global_step` once per `gradient_accumulation_steps` slices, and generates once per `steps_per_generation` ×
`num_iterations` slices (GRPOTrainer 1.16, `_prepare_inputs`). So one batch has num_iterations × minibatches updates
with minibatches = steps_per_generation / gradient_accumulation_steps.
"""

from __future__ import annotations

import math
from typing import Any

from keel.base import yaml_text as text
from keel.base.errors import KeelError
from keel.config.peer_values import (
    BETA,
    DISTILS,
    IN_LOSS,
    IN_REWARD,
    OWN,
    A,
    D,
    Given,
    Options,
    choice,
    data,
    group_size,
    number,
    whole,
)


def _is_on(given: Given, coefficient: str) -> bool:
    """Whether a switch of verl's KL term is on. It needs a coefficient, and excludes the other switch and a teacher."""
    if given.get(DISTILS) is True:
        if given.boolean():
            raise given.refused(f"{DISTILS} already adds a KL term; set both terms by hand")
        return False
    if given.get(IN_LOSS) is True and given.get(IN_REWARD) is True:
        raise KeelError(f"{IN_LOSS} and {IN_REWARD} are both true: Keel applies the penalty once, set kl.placement")
    on = given.boolean()
    if on and given.first(coefficient, *BETA) is None:
        raise KeelError(f"{given.name} is true, so set {coefficient} or kl.beta (verl's default is 0.001)")
    return on


def beta(given: Given) -> Options:
    """The coefficient. With TRL's teacher it is the weight that selects the divergence, and the coefficient is 1."""
    if given.settings.keys().isdisjoint(("lmbda", "teacher_model_name_or_path", "teacher_model")):
        return given.to(given.value)
    weight = number(given.name, given.value, "with a teacher, give a number from 0 to 1")
    if not 0 <= weight <= 1:
        raise KeelError(
            f"beta is {weight:g}: with a teacher, beta selects the divergence, so give a number from 0 to 1"
        )
    exact = {0.0: "exact_reverse", 1.0: "exact"}.get(weight)
    estimator = {"kl.estimator": exact} if exact else {"kl.estimator": "jsd", "kl.jsd_weight": weight}
    return {**given.to(1.0), **estimator}


def distillation_mode(given: Given) -> Options:
    """verl's estimator of the KL to the teacher. Without use_policy_gradient, verl differentiates its value."""
    scored = given.get(D + "use_policy_gradient") is True
    return {**choice(given), **({} if scored else gradient(given))}


def distillation_coef(given: Given) -> Options:
    """The coefficient of the divergence, which verl reads only together with rewards; otherwise it is 1."""
    return given.to(1.0 if given.get(D + "use_task_rewards") is False else given.value)


def use_kl_loss(given: Given) -> Options:
    """The penalty in the loss, with the loss's reduction."""
    if _is_on(given, A + "kl_loss_coef"):
        return {"kl.placement": "loss", "kl.reduction": "loss"}
    return {} if given.get(IN_REWARD) is True or given.get(DISTILS) is True else {"kl.beta": 0.0}


def use_kl_in_reward(given: Given) -> Options:
    """The penalty in the reward."""
    if _is_on(given, "algorithm.kl_ctrl.kl_coef"):
        return {"kl.placement": "reward"}
    return {} if IN_LOSS in given.settings or given.get(DISTILS) is True else {"kl.beta": 0.0}


def use_kl_penalty(given: Given) -> Options:
    """A switch in addition to the coefficient; Keel has only the coefficient."""
    if not given.boolean():
        return {"kl.beta": 0.0}
    beta = given.first(*BETA, A + "kl_loss_coef", *data()["same"]["kl.beta"]["other"].split())
    if not beta:
        raise KeelError(f"use_kl_penalty is true but β is {beta or 0}: set kl.beta above 0, such as kl.beta=0.01")
    return {}


def coefficient(given: Given) -> Options:
    """The coefficient. An estimator's name is refused: verl and TRL's PPO use this option for the estimator."""
    if str(given.value) in given.values:
        use = f"set kl.estimator={given.values[str(given.value)]}, and kl.beta above 0"
        raise KeelError(f"{given.name}={given.value} names an estimator: {use}")
    return given.to(given.value)


def kl_in_reward(given: Given) -> Options:
    """OpenRLHF's penalty is k1 in the reward, unless use_kl_loss is set."""
    if given.get(IN_LOSS) is True or not given.settings.keys() & (OWN - {"init_kl_coef"}):
        return given.to(given.value)
    estimator = {} if "kl_estimator" in given.settings else {"kl.estimator": "k1"}
    return {**given.to(given.value), "kl.placement": "reward", **estimator}


def target_kl(given: Given) -> Options:
    """A target KL needs a feedback controller; the default is PPO's step rule."""
    name = given.first("kl.controller.name", default="fixed")
    if name in ("warmup", "linear", "cosine"):
        raise KeelError(
            f"target_kl has no effect with kl.controller.name={name}, whose β depends only on the step: set "
            "kl.controller.name=step"
        )
    return {**({"kl.controller.name": "step"} if name == "fixed" else {}), **given.to(given.value)}


def kl_warmup(given: Given) -> Options:
    """The warm-up of β: `warmup_steps` of every controller except `warmup`, where it is `steps`."""
    warmup = given.get("kl.controller.name") == "warmup"
    return {"kl.controller.steps": given.value} if warmup else given.to(given.value)


def reference_every(given: Given) -> Options:
    """The update period of a moving reference, whose kind must be given."""
    if given.get("reference.kind") in ("ema", "snapshot"):
        return given.to(given.value)
    raise KeelError(
        f"{given.name}={text.dump(given.value)} needs a reference that is updated: set "
        "reference.kind=snapshot (a copy) or ema (a moving average) too"
    )


def horizon(given: Given) -> Options:
    """The horizon of the adaptive controller."""
    if given.get("kl_target") is None and given.get("kl.controller.name") != "ziegler":
        raise KeelError(f"{given.name}={given.value} needs the adaptive controller: set kl.controller.name=ziegler too")
    return given.to(given.value)


def mismatch_kind(given: Given) -> Options:
    """TRL's token_truncate, token_mask, sequence_truncate or sequence_mask; a mask with two limits is icepop."""
    level, _, kind = str(given.value).partition("_")
    if level not in ("token", "sequence") or kind not in ("truncate", "mask"):
        raise given.refused("use token or sequence, truncate or mask")
    both = kind == "mask" and given.get("vllm_importance_sampling_clip_min") is not None
    return {"loss.mismatch.kind": "icepop" if both else kind, "loss.mismatch.level": level}


def mismatch_floor(given: Given) -> Options:
    """A lower limit, which only masked weights have."""
    if str(given.get("vllm_importance_sampling_mode")).endswith("_truncate"):
        raise given.refused(
            "truncation has only an upper limit, loss.mismatch.cap; for both limits use loss.mismatch.kind=icepop"
        )
    return given.to(given.value)


def gradient(given: Given) -> Options:
    """The gradient of an estimator in a peer's loss: that of its value, or k2's if its name ends in +."""
    return {"kl.gradient": "k2" if str(given.value).endswith("+") else "plain"}


def slices(given: Given) -> tuple[int, int]:
    """(slices of a batch of rollouts, slices of an update), in micro-batches of per_device_train_batch_size."""
    accumulated = given.count("gradient_accumulation_steps", 1)
    if given.get("generation_batch_size") is not None:
        per_device = given.count("per_device_train_batch_size", 8)
        batch, remainder = divmod(given.count("generation_batch_size", 1), per_device)
        if remainder or not batch:
            raise KeelError(f"generation_batch_size is not a multiple of per_device_train_batch_size={per_device}")
    else:
        batch = given.count("steps_per_generation", accumulated)
    if batch < accumulated:
        if accumulated % batch or given.count("num_iterations", 1) > 1:
            raise KeelError(
                f"gradient_accumulation_steps={accumulated} spans several generation batches of {batch} "
                "micro-batches: set rollout.prompts_per_step and optim.minibatches by hand"
            )
        return accumulated, accumulated  # one update on several batches that the same policy sampled
    if batch % accumulated:
        raise KeelError(
            f"the generation batch has {batch} micro-batches, which is not a multiple of "
            f"gradient_accumulation_steps={accumulated}: set optim.minibatches by hand"
        )
    return batch, accumulated


def trl_minibatches(given: Given) -> Options:
    """Updates per pass over a batch."""
    batch, accumulated = slices(given)
    return {"optim.minibatches": batch // accumulated} if batch > accumulated else {}


def per_device(given: Given) -> Options:
    """TRL sets the completions per device and slice; a batch of rollouts has several slices."""
    completions = whole(given.name, given.value)
    if given.get("generation_batch_size") is not None:
        return {}  # generation_batch_size gives the total
    (steps, _), group = slices(given), group_size(given.settings)
    prompts, remainder = divmod(completions * steps, group)
    if remainder:
        raise KeelError(
            f"{given.name}={given.value} × {steps} accumulation steps are {completions * steps} completions, not a "
            f"multiple of num_generations={group}: set rollout.prompts_per_step"
        )
    return given.to(prompts)


def generation_batch(given: Given) -> Options:
    """TRL counts the completions of a batch of rollouts."""
    group = group_size(given.settings)
    completions = slices(given)[0] * int(given.first("per_device_train_batch_size", default=8))
    if completions % group:
        raise KeelError(f"generation_batch_size={given.value} is not a multiple of num_generations={group}")
    return {**given.to(completions // group), **trl_minibatches(given)}


def verl_minibatches(given: Given) -> Options:
    """verl sets the problems per update, Keel the updates per batch."""
    batch = given.first("data.train_batch_size", "rollout.prompts_per_step", default=16)
    updates, remainder = divmod(int(batch), int(number(given.name, given.value, "give a whole number")))
    if remainder or not updates:
        raise KeelError(f"{given.name}={given.value} does not divide {batch} problems a step: set optim.minibatches")
    return given.to(updates)


def rollout_batch(given: Given) -> Options:
    """OpenRLHF counts prompts, other trainers completions."""
    if given.is_openrlhf:
        return given.to(given.value)
    batch, group = whole(given.name, given.value), group_size(given.settings)
    groups, remainder = divmod(batch, group)
    of_groups = f"for {batch} completions set rollout.prompts_per_step={groups}"
    raise KeelError(
        f"rollout_batch_size={batch} counts prompts in OpenRLHF and completions in other trainers: for {batch} prompts "
        f"set rollout.prompts_per_step={batch}; "
        + (f"{batch} completions are not a multiple of rollout.num_generations={group}" if remainder else of_groups)
    )


def train_batch(given: Given) -> Options:
    """OpenRLHF counts the completions of an update, verl the prompts of a step."""
    if "rollout_batch_size" not in given.settings or not given.is_openrlhf:
        raise KeelError(
            f"train_batch_size={given.value} is the prompts per step in verl and the completions per update in other "
            "trainers: set rollout.prompts_per_step, or optim.minibatches (updates per step)"
        )
    prompts = whole("rollout_batch_size", given.get("rollout_batch_size"))
    completions = prompts * group_size(given.settings, default=1)
    updates, remainder = divmod(completions, whole(given.name, given.value))
    if remainder or not updates:
        raise KeelError(
            f"train_batch_size={given.value} does not divide {completions} completions a step: set optim.minibatches"
        )
    return given.to(updates)


def batch_epochs(given: Given) -> Options:
    """Passes over a batch of rollouts in OpenRLHF; in other trainers passes over the data."""
    if given.is_openrlhf:
        return given.to(given.value)
    raise KeelError(
        f"max_epochs={given.value} counts passes over a batch of rollouts in OpenRLHF and passes over the data in "
        f"other trainers: set loss.num_iterations={given.value}, or the number of steps with run.max_steps"
    )


def _batches(given: Given, name: str, value: Any) -> int:
    """Convert a number of TRL's steps, or a share of max_steps below 1, to batches."""
    steps = number(name, value, "give a number of steps")
    if 0 < steps < 1:
        total = given.first("max_steps", "run.max_steps")
        if total is None or number("max_steps", total, "give a whole number") < 1:
            raise KeelError(
                f"{name}={value:g} is a fraction of the steps, but max_steps is not given: set run.max_steps, or set "
                "the number of steps by hand"
            )
        steps = math.ceil(steps * total)
        if given.get("max_steps") is None:  # the total is already in batches
            return int(steps)
    if steps != int(steps):
        raise KeelError(f"{name} is {value}: give a whole number of steps, or a fraction below 1")
    batch, accumulated = slices(given)
    return math.ceil(int(steps) / (given.count("num_iterations", 1) * (batch // accumulated)))


def in_batches(given: Given) -> Options:
    """Convert a number of TRL's steps to batches."""
    return given.to(_batches(given, given.name, given.value))


def max_steps(given: Given) -> Options:
    """The length of the run; with TRL's -1, num_train_epochs sets it."""
    value = given.value
    counted = isinstance(value, int | float) and not isinstance(value, bool) and value > 1 and value == int(value)
    return in_batches(given) if counted else given.to(value)


def by_steps(given: Given) -> Options:
    """A period in steps. TRL reads it only if the strategy is `steps`."""
    strategies = ("save_strategy",) if given.name == "save_steps" else ("eval_strategy", "evaluation_strategy")
    if given.value == -1:  # never, in OpenRLHF
        return given.to(0) if given.target == "eval.every" else {}
    return {} if given.value is None or given.first(*strategies, default="steps") != "steps" else in_batches(given)


def eval_strategy(given: Given) -> Options:
    """Whether TRL evaluates; YAML reads a bare `no` as false."""
    if given.value not in ("no", False, "steps"):
        raise given.refused("set eval.every by hand, in steps")
    return {} if given.value == "steps" else given.to(0)


def save_strategy(given: Given) -> Options:
    """Keel always writes the last step, so `no` is a checkpoint at the end."""
    total = given.get("max_steps")
    if given.value == "steps":
        return {}
    if given.value in ("no", False) and isinstance(total, int) and total > 0:
        return given.to(_batches(given, "max_steps", total))
    raise given.refused("set checkpoint.every by hand, in steps")


def epochs(given: Given) -> Options:
    """Passes over the data. A peer reads them only if no number of steps is given."""
    total = given.first("trainer.total_training_steps", "max_steps", "run.max_steps")
    if total is None or total == -1:
        raise given.refused("Keel counts steps, not passes over the data; set run.max_steps by hand")
    return {}


def verl_warmup(given: Given) -> Options:
    """A share of the steps. verl reads it if lr_warmup_steps is negative or not given."""
    steps = given.get(A + "optim.lr_warmup_steps")
    ratio = number(given.name, given.value, "give a fraction of the steps")
    if ratio == 0 or (isinstance(steps, int) and steps >= 0):
        return {}
    total = given.first("trainer.total_training_steps", "run.max_steps", "max_steps")
    if total is None:
        raise KeelError(
            f"{given.name}={given.value} is a fraction of the steps, but trainer.total_training_steps is not given: "
            "set optim.warmup_steps by hand"
        )
    return given.to(int(ratio * total))
