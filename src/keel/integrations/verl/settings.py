"""The plugin's settings: `keel.kl` of verl's configuration, checked, and the options of verl that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf, open_dict

from keel.base.errors import KeelError
from keel.base.options import read_options
from keel.integrations.verl import MODE
from keel.kl import BetaController, KLOptions, Pairing, check_kl, controller_from_options
from keel.kl.facts import POLICY_REF
from keel.verify.custom import estimator_facts

# The reduction of `keel.losses.reductions` that equals each loss_agg_mode of verl.
REDUCTIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    **dict.fromkeys(("token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm"), "constant"),
}
VERLS_MODE = "sync"  # the mode of verl that `keel_sync` extends


@dataclass(frozen=True)
class VerlSettings:
    """Keel's options, checked against verl's."""

    kl: KLOptions
    pairing: Pairing
    controller: BetaController

    @property
    def in_reward(self) -> bool:
        return self.kl.placement == "reward"


def settle(config: Any) -> VerlSettings:
    """Keel's options. Also sets the options of verl that they need: its mode, and a reference."""
    kl = _read(config)
    _check_verl_options(config)
    _check_done_here(kl)
    check_kl(kl, estimator_facts(kl.estimator))
    actor = config.actor_rollout_ref.actor
    if actor.loss_agg_mode not in REDUCTIONS:
        raise KeelError(
            f"actor.loss_agg_mode={actor.loss_agg_mode} is not supported: use one of {', '.join(REDUCTIONS)}"
        )
    if actor.loss_agg_mode == "token-sum" and kl.level == "sequence":
        raise KeelError(
            "kl.level=sequence is a mean over sequences, but actor.loss_agg_mode=token-sum has no denominator: "
            "use kl.level=token, or loss_agg_mode=seq-mean-token-sum"
        )
    pairing = kl.pairing(
        REDUCTIONS[actor.loss_agg_mode], off_policy=off_policy(config), facts=estimator_facts(kl.estimator)
    )
    controller = controller_from_options(kl, config.data.train_batch_size * config.actor_rollout_ref.rollout.n)
    with open_dict(config):
        config.trainer.v1.trainer_mode = VERLS_MODE
        # either option makes verl build the reference and score with it
        if kl.placement == "reward":
            config.algorithm.use_kl_in_reward, config.algorithm.kl_penalty = True, "k1"
        else:
            actor.use_kl_loss = True
    return VerlSettings(kl, pairing, controller)


def _read(config: Any) -> KLOptions:
    given = _section(config.get("keel"), "keel")
    for name in given:
        if name != "kl":
            raise KeelError(
                f"keel.{name} is not supported inside verl, only Keel's section kl is: leave it out, or train "
                "with keel train"
            )
    kl = read_options(KLOptions, _section(given.get("kl"), "keel.kl"), "kl")
    if "beta" not in kl.model_fields_set:
        raise KeelError("kl.beta is not given: set +keel.kl.beta=…, or +keel.kl.beta=0.0 to measure without a penalty")
    if not kl.penalizes and kl.measure_every == 0:
        raise KeelError(
            "kl.beta is 0 and kl.measure_every is 0, so Keel has nothing to do: set +keel.kl.measure_every=1"
        )
    return kl


def _section(given: Any, name: str) -> Mapping[str, Any]:
    """A section as plain values; empty if not given."""
    values = OmegaConf.to_container(given, resolve=True) if OmegaConf.is_config(given) else given
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise KeelError(f"{name} is {values!r}: expected a section, as +keel.kl.beta=… gives")
    return values


def _check_verl_options(config: Any) -> None:
    """Refuse options of verl that Keel's replace, or that the plugin does not support."""
    actor = config.actor_rollout_ref.actor
    if config.trainer.v1.trainer_mode != MODE:
        raise KeelError(f"trainer.v1.trainer_mode={config.trainer.v1.trainer_mode} is not Keel's: set {MODE}")
    if actor.use_kl_loss:
        raise KeelError(
            "actor.use_kl_loss is verl's own KL term: set actor_rollout_ref.actor.use_kl_loss=False and "
            f"+keel.kl.beta={actor.kl_loss_coef:g}"
        )
    if config.algorithm.get("use_kl_in_reward", False):
        raise KeelError(
            "algorithm.use_kl_in_reward is verl's own KL term: set it to False, and +keel.kl.placement=reward "
            f"+keel.kl.estimator=k1 +keel.kl.beta={config.algorithm.kl_ctrl.kl_coef:g}"
        )
    distillation = config.get("distillation")
    if distillation is not None and distillation.get("enabled", False):
        raise KeelError("distillation has its own loss in verl: set distillation.enabled=False")


def _check_done_here(kl: KLOptions) -> None:
    """Refuse KL options that are not supported inside verl."""
    if kl.needs_exact:
        raise KeelError(
            "the exact KL needs the logits of both models, but verl's engines only give log-probabilities: "
            "use kl.estimator=k3 and kl.exact=false, or train with keel train"
        )
    for name, given in (("budget", kl.budget), ("collect_max", kl.collect_max), ("teacher", kl.teacher)):
        if given is not None:
            raise KeelError(f"kl.{name} is not supported inside verl: leave it out, or train with keel train")
    if kl.placement != "reward":
        return
    if kl.estimator != "k1":
        raise KeelError(
            f"kl.estimator={kl.estimator} in the reward: verl computes that KL itself, and only k1 has the right "
            "gradient there; use kl.estimator=k1, or kl.placement=advantage"
        )
    for name in ("log_ratio_clamp", "ratio_cap", "level"):
        if name in kl.model_fields_set:
            raise KeelError(f"kl.{name} has no effect on a KL in the reward, which verl computes itself: leave it out")


def off_policy(config: Any) -> bool:
    """Whether a batch of rollouts is used for several updates, or has only the sampler's log-probabilities."""
    actor = config.actor_rollout_ref.actor
    several = actor.ppo_epochs > 1 or config.data.train_batch_size > actor.ppo_mini_batch_size
    return bool(several or _correction(config, "bypass_mode"))


def _correction(config: Any, name: str) -> Any:
    """An option of verl's correction for the mismatch between sampler and trainer."""
    return (config.algorithm.get("rollout_correction") or {}).get(name)


def notes_on(settings: VerlSettings, config: Any) -> list[str]:
    """Notes on allowed options with unexpected effects, one sentence each."""
    notes, rollout = [], config.actor_rollout_ref.rollout
    if settings.kl.penalizes and settings.pairing.expected_gradient != POLICY_REF:
        notes.append(settings.pairing.note)
    if settings.in_reward and config.algorithm.get("norm_adv_by_std_in_grpo", True):
        notes.append(
            "norm_adv_by_std_in_grpo divides the penalty together with the reward, so the coefficient is β over the "
            "group's deviation: set it to False, or kl.placement=advantage"
        )
    if rollout.get("top_p", 1.0) < 1 or rollout.get("top_k", -1) > 0:
        notes.append("rollout.top_p and top_k truncate the sampling distribution: the KL of the full policy is biased")
    if _correction(config, "bypass_mode"):
        notes.append(
            "rollout_correction.bypass_mode uses the sampler's log-probabilities for the policy's: the measured KL, "
            "which controls β, is the sampler's"
        )
    if _correction(config, "rollout_rs"):
        notes.append(
            "rollout_correction.rollout_rs removes rejected tokens from the KL term too; they are still measured"
        )
    return notes
