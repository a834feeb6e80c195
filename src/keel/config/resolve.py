"""What `null` and `auto` come to, across the rooms of a configuration."""

from __future__ import annotations

from typing import Any

from keel.config.schema import Config
from keel.kl import Pairing
from keel.losses import get_loss, loss_defaults
from keel.verify.own import estimator_facts


def kl_pairing(config: Config, *, off_policy: bool | None = None) -> Pairing:
    """The checked pairing of the KL term under this loss; `off_policy` where a run knows more than its options say."""
    return config.kl.pairing(
        get_loss(config.loss.loss_type).reduction,
        off_policy=config.off_policy if off_policy is None else off_policy,
        facts=estimator_facts(config.kl.estimator),
    )


def resolved(config: Config) -> dict[str, Any]:
    """Dotted option → the value that its `null` or `auto` stands for in this configuration."""
    stands_for = {f"loss.{name}": value for name, value in loss_defaults(config.loss).items()}
    if config.kl.gradient == "auto":
        pairing = kl_pairing(config)
        in_loss = pairing.placement == "loss" and pairing.level == "token"
        stands_for["kl.gradient"] = str(pairing.form) if in_loss else "its own"
    if config.kl.needs_exact and not config.kl.exact:
        stands_for["kl.exact"] = True
    if config.reference.kind == "auto":
        stands_for["reference.kind"] = "adapter_off" if config.model.lora else "frozen"
    if config.optim.decay_steps is None and config.optim.schedule != "constant":
        stands_for["optim.decay_steps"] = config.run.max_steps
    if config.eval.temperature is None:
        stands_for["eval.temperature"] = config.rollout.temperature
    return stands_for
