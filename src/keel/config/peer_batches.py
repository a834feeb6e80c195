"""Peers' options that count prompts, completions, updates or steps.

TRL's steps are optimizer updates, of which one batch of rollouts may serve several; Keel counts batches. TRL raises
`global_step` once per `gradient_accumulation_steps` slices, and generates once per `steps_per_generation` ×
`num_iterations` slices (GRPOTrainer 1.16, `_prepare_inputs`). So one batch has num_iterations × minibatches updates
with minibatches = steps_per_generation / gradient_accumulation_steps.
"""

from __future__ import annotations

import math
from typing import Any

from keel.base.errors import KeelError
from keel.config.peer_values import A, Given, Options, group_size, number, whole


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
                f"gradient_accumulation_steps={accumulated} spans several generations of {batch} slices: set "
                "rollout.prompts_per_step and optim.minibatches by hand"
            )
        return accumulated, accumulated  # one update on several batches that the same policy sampled
    if batch % accumulated:
        raise KeelError(
            f"a generation of {batch} slices is not a multiple of gradient_accumulation_steps={accumulated}: set "
            "optim.minibatches by hand"
        )
    return batch, accumulated


def trl_minibatches(given: Given) -> Options:
    """Updates per pass over a batch."""
    batch, accumulated = slices(given)
    return {"optim.minibatches": batch // accumulated} if batch > accumulated else {}


def per_device(given: Given) -> Options:
    """TRL counts completions: per device × slices of a batch of rollouts."""
    completions = whole(given.name, given.value)
    if given.get("generation_batch_size") is not None:
        return {}  # it gives the total
    (steps, _), group = slices(given), group_size(given.settings)
    prompts, remainder = divmod(completions * steps, group)
    if remainder:
        raise KeelError(
            f"{given.name}={given.value} × {steps} accumulated is {completions * steps} completions, which is not a "
            f"multiple of num_generations={group}: set rollout.prompts_per_step"
        )
    return given.to(prompts)


def generation_batch(given: Given) -> Options:
    """All completions of a batch of rollouts."""
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
    of_groups = f"in groups of {group} are rollout.prompts_per_step={groups}"
    raise KeelError(
        f"rollout_batch_size={batch} counts prompts in OpenRLHF and completions elsewhere: {batch} prompts are "
        f"rollout.prompts_per_step={batch}, {batch} completions "
        + (f"are not a multiple of rollout.num_generations={group}" if remainder else of_groups)
    )


def train_batch(given: Given) -> Options:
    """OpenRLHF counts the completions of an update, verl the prompts of a step."""
    if "rollout_batch_size" not in given.settings or not given.is_openrlhf:
        raise KeelError(
            f"train_batch_size={given.value} counts prompts of a step in verl and completions of an update elsewhere: "
            "set rollout.prompts_per_step for the first, optim.minibatches (updates per step) for the second"
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
        f"max_epochs={given.value} counts passes over a batch of rollouts in OpenRLHF, over the data elsewhere: set "
        f"loss.num_iterations={given.value} for the first, run.max_steps (steps) for the second"
    )


def _batches(given: Given, name: str, value: Any) -> int:
    """A number of TRL's steps, or a share of max_steps below 1, in batches."""
    steps = number(name, value, "give a number of steps")
    if 0 < steps < 1:
        total = given.first("max_steps", "run.max_steps")
        if total is None or number("max_steps", total, "give a whole number") < 1:
            raise KeelError(
                f"{name}={value:g} is a share of the steps, but max_steps is not given: give run.max_steps, or set the "
                "steps by hand"
            )
        steps = math.ceil(steps * total)
        if given.get("max_steps") is None:  # the total is already in batches
            return int(steps)
    if steps != int(steps):
        raise KeelError(f"{name} is {value}: give a whole number of steps, or a share below 1")
    batch, accumulated = slices(given)
    return math.ceil(int(steps) / (given.count("num_iterations", 1) * (batch // accumulated)))


def in_batches(given: Given) -> Options:
    """A number of steps under TRL's name."""
    return given.to(_batches(given, given.name, given.value))


def max_steps(given: Given) -> Options:
    """TRL's -1 leaves the length to num_train_epochs."""
    value = given.value
    counted = isinstance(value, int | float) and not isinstance(value, bool) and value > 1 and value == int(value)
    return in_batches(given) if counted else given.to(value)


def by_steps(given: Given) -> Options:
    """A period that TRL reads only while its strategy is `steps`."""
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
    """Read only if no number of steps is given."""
    total = given.first("trainer.total_training_steps", "max_steps", "run.max_steps")
    if total is None or total == -1:
        raise given.refused("Keel counts steps, not passes over the data; set run.max_steps by hand")
    return {}


def verl_warmup(given: Given) -> Options:
    """A share of the steps, which verl reads if lr_warmup_steps is negative or not given."""
    steps = given.get(A + "optim.lr_warmup_steps")
    ratio = number(given.name, given.value, "give a share of the steps")
    if ratio == 0 or (isinstance(steps, int) and steps >= 0):
        return {}
    total = given.first("trainer.total_training_steps", "run.max_steps", "max_steps")
    if total is None:
        raise KeelError(
            f"{given.name}={given.value} is a share of the steps, but trainer.total_training_steps is not given: set "
            "optim.warmup_steps by hand"
        )
    return given.to(int(ratio * total))
