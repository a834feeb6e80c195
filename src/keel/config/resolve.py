"""What `null` and `auto` come to: the specifications that losses and KL read, from a configuration."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from keel.config.schema import Config

if TYPE_CHECKING:
    from keel.losses import KLSpec, LossSpec, MismatchSpec


def loss_spec(config: Config) -> LossSpec:
    """The policy loss with its limits; None where the loss's own default holds."""
    from keel.losses import LossSpec

    loss = config.loss
    return LossSpec(
        loss_type=loss.loss_type,
        epsilon=loss.epsilon,
        epsilon_high=loss.epsilon_high,
        delta=loss.delta,
        importance_sampling_level=loss.importance_sampling_level,
        entropy_coef=loss.entropy_coef,
        sapo_temperature_pos=loss.sapo_temperature_pos,
        sapo_temperature_neg=loss.sapo_temperature_neg,
    )


def kl_spec(config: Config) -> KLSpec:
    """The KL penalty as configured; its `pairing(off_policy=config.off_policy)` is the checked choice."""
    from keel.losses import KLSpec

    kl = config.kl
    return KLSpec(
        estimator=kl.estimator,
        gradient=kl.gradient,
        placement=kl.placement,
        level=kl.level,
        reduction=kl.reduction,
        log_ratio_clamp=kl.log_ratio_clamp,
        ratio_cap=kl.ratio_cap,
        allow_biased=kl.allow_biased or not kl.penalizes,  # no penalty: no gradient that could be wrong
    )


def mismatch_spec(config: Config) -> MismatchSpec:
    """The correction of the sampler's mismatch."""
    from keel.losses import MismatchSpec

    mismatch = config.loss.mismatch
    return MismatchSpec(mismatch.kind, mismatch.cap, mismatch.floor, mismatch.level)


def scale_rewards(config: Config) -> str:
    """How advantages are scaled: as asked for, or as the loss's paper does."""
    from keel.losses.policy import get_recipe

    return config.loss.scale_rewards or get_recipe(config.loss.loss_type).scale_rewards


def controller_params(config: Config) -> dict[str, Any]:
    """Arguments for `keel.kl.build_controller`: name, beta, the controller's own, and the episodes of a step.

    Ziegler's rule counts episodes; a run knows how many a step has, so nobody has to say it twice.
    """
    from keel.kl import CONTROLLERS

    name, params = config.kl.controller.name, config.kl.controller.params
    make = CONTROLLERS.get(name)
    if make is not None and "episodes_per_step" in inspect.signature(make).parameters:
        episodes = config.rollout.prompts_per_step * config.rollout.num_generations
        params = {"episodes_per_step": episodes, **params}
    return {"name": name, "beta": config.kl.beta, **params}


def resolved(config: Config) -> dict[str, Any]:
    """Dotted option → the value that its `null` or `auto` stands for in this configuration."""
    from keel.losses import resolve_limits

    limits = resolve_limits(loss_spec(config))
    found: dict[str, Any] = {}
    if config.loss.loss_type not in ("sapo", "policy_gradient", "cispo") and config.loss.epsilon is None:
        found["loss.epsilon"] = limits.low
    if config.loss.loss_type not in ("sapo", "policy_gradient") and config.loss.epsilon_high is None:
        found["loss.epsilon_high"] = limits.high
    if config.loss.importance_sampling_level is None:
        found["loss.importance_sampling_level"] = limits.level
    if config.loss.scale_rewards is None:
        found["loss.scale_rewards"] = scale_rewards(config)
    if config.kl.gradient == "auto":
        spec = replace(kl_spec(config), allow_biased=True)  # at β = 0 any pairing may stand
        pairing = spec.pairing(loss_spec(config), off_policy=config.off_policy)
        found["kl.gradient"] = (
            str(pairing.form) if pairing.placement == "loss" and pairing.level == "token" else "its own"
        )
    if config.kl.needs_exact and not config.kl.exact:
        found["kl.exact"] = True
    if config.reference.kind == "auto":
        found["reference.kind"] = "adapter_off" if config.model.lora else "frozen"
    if config.optim.decay_steps is None and config.optim.schedule != "constant":
        found["optim.decay_steps"] = config.run.max_steps
    if config.eval.temperature is None:
        found["eval.temperature"] = config.rollout.temperature
    return found
