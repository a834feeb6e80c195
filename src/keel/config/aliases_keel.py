"""Keel's own short names, as data."""

from __future__ import annotations

from typing import Any

from keel.base.errors import KeelError
from keel.config.alias import Alias, Options, Settings, first_set
from keel.config.trl_steps import max_steps
from keel.config.verl_values import VERL_KL


def _target_kl(value: Any, settings: Settings) -> Options:
    """A target needs a controller that steers: PPO's step rule where none was named."""
    name = first_set(settings, "kl.controller.name", default="fixed")
    if name in ("warmup", "linear", "cosine"):
        raise KeelError(f"target_kl has no meaning with kl.controller.name={name}, which follows the step: use step")
    return {**({"kl.controller.name": "step"} if name == "fixed" else {}), "kl.controller.target": value}


def _kl_warmup(value: Any, settings: Settings) -> Options:
    """Every controller warms up by `warmup_steps`, but `warmup` itself calls it `steps`."""
    warmup = settings.get("kl.controller.name") == "warmup"
    return {"kl.controller.steps" if warmup else "kl.controller.warmup_steps": value}


def _datasets(value: Any, settings: Settings) -> Options:
    paths = [part.strip() for part in value.split(";") if part.strip()] if isinstance(value, str) else value
    return {"data.path": paths[0] if isinstance(paths, list) and len(paths) == 1 else paths}


def _kl_penalty(value: Any, settings: Settings) -> Options:
    """A number is the coefficient; verl and TRL's PPO name an estimator by it."""
    if str(value) in VERL_KL:
        estimator = VERL_KL[str(value)]["kl.estimator"]
        raise KeelError(f"kl_penalty={value} names an estimator: set kl.estimator={estimator}, and kl.beta above 0")
    return {"kl.beta": value}


KEEL = [
    *(Alias(name, "kl.beta") for name in ("kl_beta", "kl_coef", "beta")),
    Alias(
        "kl_penalty", "kl.beta", "a number; where it names an estimator it is refused with kl.estimator", _kl_penalty
    ),
    Alias("target_kl", "kl.controller.target", "also sets kl.controller.name=step where β would be fixed", _target_kl),
    Alias("kl_warmup_steps", "kl.controller.warmup_steps", "", _kl_warmup),
    Alias("reward_warmup_steps", "reward.warmup_steps"),
    Alias("batch_size", "rollout.prompts_per_step", "problems a step, each with num_generations completions"),
    Alias("num_generations", "rollout.num_generations"),
    Alias(
        "max_steps", "run.max_steps", "batches; beside TRL's names for several updates a batch, its updates", max_steps
    ),
    Alias("datasets", "data.path", "several are joined by semicolons", _datasets),
    Alias("seed", "run.seed"),
]
