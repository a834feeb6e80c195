"""TRL's units: its steps are optimizer updates, of which one batch of rollouts may serve several; Keel counts batches.

TRL raises `global_step` once per `gradient_accumulation_steps` slices, and generates once per `steps_per_generation` ×
`num_iterations` slices (GRPOTrainer 1.16, `_prepare_inputs`). So one batch has num_iterations × minibatches updates
with minibatches = steps_per_generation / gradient_accumulation_steps.
"""

from __future__ import annotations

import math
from typing import Any

from keel.base.errors import KeelError
from keel.config.alias import Convert, Options, Settings, first_set, number, whole

COUNTED = "TRL counts updates, Keel batches: divided by num_iterations × minibatches, rounded up"


def _positive_int(settings: Settings, name: str, default: int) -> int:
    return whole(name, first_set(settings, name, default=default))


def slices(settings: Settings) -> tuple[int, int]:
    """(slices of a batch of rollouts, slices of an update), in micro-batches of per_device_train_batch_size."""
    accumulated = _positive_int(settings, "gradient_accumulation_steps", 1)
    if settings.get("generation_batch_size") is not None:
        per_device = _positive_int(settings, "per_device_train_batch_size", 8)
        batch, remainder = divmod(_positive_int(settings, "generation_batch_size", 1), per_device)
        if remainder or not batch:
            raise KeelError(f"generation_batch_size is no multiple of per_device_train_batch_size={per_device}")
    else:
        batch = _positive_int(settings, "steps_per_generation", accumulated)
    if batch < accumulated:
        if accumulated % batch or _positive_int(settings, "num_iterations", 1) > 1:
            raise KeelError(
                f"gradient_accumulation_steps={accumulated} spans several generations of {batch} slices: set "
                "rollout.prompts_per_step and optim.minibatches by hand"
            )
        return accumulated, accumulated  # one update on several batches of one and the same policy
    if batch % accumulated:
        raise KeelError(
            f"a generation of {batch} slices is no multiple of gradient_accumulation_steps={accumulated}: set "
            "optim.minibatches by hand"
        )
    return batch, accumulated


def minibatches(settings: Settings) -> Options:
    """Updates that one pass over a batch is cut into."""
    batch, accumulated = slices(settings)
    return {"optim.minibatches": batch // accumulated} if batch > accumulated else {}


def updates_per_batch(settings: Settings) -> int:
    """Updates that TRL makes on a batch of rollouts, by its own names; 1 where none of them is given."""
    batch, accumulated = slices(settings)
    return _positive_int(settings, "num_iterations", 1) * (batch // accumulated)


def _batches(name: str, value: Any, settings: Settings) -> int:
    """A number of TRL's steps, or a share of max_steps below 1, in batches."""
    steps = number(name, value, "give a number of steps")
    if 0 < steps < 1:
        total = first_set(settings, "max_steps", "run.max_steps")
        if total is None or number("max_steps", total, "give a whole number") < 1:
            raise KeelError(
                f"{name}={value:g} is a share of the steps, and max_steps is not given: give run.max_steps, or set the "
                "steps by hand"
            )
        steps = math.ceil(steps * total)
        if settings.get("max_steps") is None:  # the total is in batches already
            return int(steps)
    if steps != int(steps):
        raise KeelError(f"{name} is {value}: give a whole number of steps, or a share below 1")
    return math.ceil(int(steps) / updates_per_batch(settings))


def max_steps(value: Any, settings: Settings) -> Options:
    """TRL's -1 leaves the length to num_train_epochs."""
    if isinstance(value, int | float) and not isinstance(value, bool) and value > 1 and value == int(value):
        return {"run.max_steps": _batches("max_steps", value, settings)}
    return {"run.max_steps": value}


def in_batches(name: str, target: str) -> Convert:
    """A number of steps under TRL's name."""
    return lambda value, settings: {} if value is None else {target: _batches(name, value, settings)}


def while_by_steps(name: str, target: str, *strategies: str) -> Convert:
    """A period that TRL reads only while its strategy is `steps`."""

    def convert(value: Any, settings: Settings) -> Options:
        strategy = first_set(settings, *strategies, default="steps")
        if value == -1:  # OpenRLHF's never
            return {target: 0} if target == "eval.every" else {}
        return {} if value is None or strategy != "steps" else {target: _batches(name, value, settings)}

    return convert


def eval_strategy(value: Any, settings: Settings) -> Options:
    """Whether TRL evaluates; YAML reads a bare `no` as false."""
    if value in ("no", False):
        return {"eval.every": 0}
    if value == "steps":
        return {}
    raise KeelError(f"eval_strategy={value} has no counterpart: set eval.every by hand, in steps")


def save_strategy(value: Any, settings: Settings) -> Options:
    """Keel always writes the last step, so `no` is a checkpoint at the end."""
    if value == "steps":
        return {}
    total = settings.get("max_steps")
    if value in ("no", False) and isinstance(total, int) and total > 0:
        return {"checkpoint.every": _batches("max_steps", total, settings)}
    raise KeelError(f"save_strategy={value} has no counterpart: set checkpoint.every by hand, in steps")


def betas(value: Any, settings: Settings) -> Options:
    """AdamW's two rates are one option."""
    pair = [first_set(settings, "adam_beta1", default=0.9), first_set(settings, "adam_beta2", default=0.999)]
    return {"optim.betas": pair}


def epochs(value: Any, settings: Settings) -> Options:
    """TRL reads it only where max_steps does not say how long to train."""
    total = first_set(settings, "max_steps", "run.max_steps")
    if total is None or total == -1:
        raise KeelError(
            f"num_train_epochs={value} has no counterpart: Keel counts steps, not passes over the data; set "
            "run.max_steps by hand"
        )
    return {}
