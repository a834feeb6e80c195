"""Peers' options of the KL term, its controller, its reference, and the correction of the sampler's mismatch."""

from __future__ import annotations

from keel.base.errors import KeelError
from keel.config import text
from keel.config.peer_values import BETA, DISTILS, IN_LOSS, IN_REWARD, OWN, A, D, Given, Options, choice, data, number


def _is_on(given: Given, coefficient: str) -> bool:
    """Whether a switch of verl's KL term is on; then it needs its coefficient, and the other switch must be off."""
    if given.get(IN_LOSS) is True and given.get(IN_REWARD) is True:
        raise KeelError(f"{IN_LOSS} and {IN_REWARD} are both true: Keel applies the penalty once, set kl.placement")
    on = given.boolean()
    if on and given.first(coefficient, *BETA) is None:
        raise KeelError(f"{given.name} is true without {coefficient}: give it or kl.beta (verl's default is 0.001)")
    return on


def beta(given: Given) -> Options:
    """A coefficient; with TRL's teacher, the weight that selects the divergence, whose coefficient is 1."""
    if given.settings.keys().isdisjoint(("lmbda", "teacher_model_name_or_path", "teacher_model")):
        return given.to(given.value)
    weight = number(given.name, given.value, "with a teacher it is between 0 and 1")
    if not 0 <= weight <= 1:
        raise KeelError(f"beta is {weight:g}: with a teacher it selects the divergence, from 0 to 1")
    exact = {0.0: "exact_reverse", 1.0: "exact"}.get(weight)
    estimator = {"kl.estimator": exact} if exact else {"kl.estimator": "jsd", "kl.jsd_weight": weight}
    return {**given.to(1.0), **estimator}


def distillation_mode(given: Given) -> Options:
    """verl's estimator of the KL to the teacher; as a loss, verl differentiates its value."""
    scored = given.get(D + "use_policy_gradient") is True
    return {**choice(given), **({} if scored else gradient(given))}


def distillation_coef(given: Given) -> Options:
    """The coefficient of the divergence, which verl reads only together with rewards; otherwise it is 1."""
    return given.to(1.0 if given.get(D + "use_task_rewards") is False else given.value)


def use_kl_loss(given: Given) -> Options:
    """The penalty in the loss, with the loss's reduction."""
    if given.get(DISTILS) is True:
        return _beside_teacher(given)
    if _is_on(given, A + "kl_loss_coef"):
        return {"kl.placement": "loss", "kl.reduction": "loss"}
    return {} if given.get(IN_REWARD) is True else {"kl.beta": 0.0}


def use_kl_in_reward(given: Given) -> Options:
    """The penalty in the reward."""
    if given.get(DISTILS) is True:
        return _beside_teacher(given)
    if _is_on(given, "algorithm.kl_ctrl.kl_coef"):
        return {"kl.placement": "reward"}
    return {} if IN_LOSS in given.settings else {"kl.beta": 0.0}


def _beside_teacher(given: Given) -> Options:
    """Refuse a penalty together with the divergence to the teacher, which would be a second KL term."""
    if given.boolean():
        raise given.refused(f"with {DISTILS} it is a second KL term; set both by hand")
    return {}


def use_kl_penalty(given: Given) -> Options:
    """A switch in addition to the coefficient; Keel has only the coefficient."""
    if not given.boolean():
        return {"kl.beta": 0.0}
    beta = given.first(*BETA, A + "kl_loss_coef", *data()["same"]["kl.beta"]["other"].split())
    if not beta:
        raise KeelError(f"use_kl_penalty is true but β is {beta or 0}: set kl.beta above 0, such as kl.beta=0.01")
    return {}


def coefficient(given: Given) -> Options:
    """A number is the coefficient; in verl and TRL's PPO the name selects an estimator."""
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
            f"target_kl has no effect with kl.controller.name={name}, whose β depends on the step: use step"
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
        f"{given.name}={text.dump(given.value)} needs a reference that follows the policy: give "
        "reference.kind=snapshot (a copy) or ema (an average) too"
    )


def horizon(given: Given) -> Options:
    """The horizon of the adaptive controller."""
    if given.get("kl_target") is None and given.get("kl.controller.name") != "ziegler":
        fix = "belongs to the adaptive controller: set kl.controller.name=ziegler too"
        raise KeelError(f"the horizon {given.value} {fix}")
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
            "truncated weights have only an upper limit, loss.mismatch.cap; masked ones have both, "
            "loss.mismatch.kind=icepop"
        )
    return given.to(given.value)


def gradient(given: Given) -> Options:
    """The estimator in a peer's loss, which differentiates its value; a + means k2's gradient with another value."""
    return {"kl.gradient": "k2" if str(given.value).endswith("+") else "plain"}
