"""Policy losses as pure functions: advantages, terms, reductions, sampler mismatch, the objective."""

from keel.losses.advantages import advantages, centred, deviation, group_statistics, zero_variance
from keel.losses.inputs import Limits, LossInputs, PolicyTerm
from keel.losses.mismatch import mismatch_weights
from keel.losses.objective import (
    Counts,
    Objective,
    global_denominators,
    kl_term,
    objective,
    summed_kl,
    with_policy_mask,
)
from keel.losses.options import LossOptions, MismatchOptions
from keel.losses.policy import (
    LOSSES,
    Recipe,
    check_loss,
    get_loss,
    loss_defaults,
    own_options,
    policy_term,
    resolve_limits,
    scale_rewards,
)
from keel.losses.reductions import REDUCTIONS, Denominators, count_denominators

__all__ = [
    "LOSSES",
    "REDUCTIONS",
    "Counts",
    "Denominators",
    "Limits",
    "LossInputs",
    "LossOptions",
    "MismatchOptions",
    "Objective",
    "PolicyTerm",
    "Recipe",
    "advantages",
    "centred",
    "check_loss",
    "count_denominators",
    "deviation",
    "get_loss",
    "global_denominators",
    "group_statistics",
    "kl_term",
    "loss_defaults",
    "mismatch_weights",
    "objective",
    "own_options",
    "policy_term",
    "resolve_limits",
    "scale_rewards",
    "summed_kl",
    "with_policy_mask",
    "zero_variance",
]
