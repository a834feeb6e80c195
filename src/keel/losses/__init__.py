"""Policy losses as pure functions: advantages, terms, reductions, sampler mismatch, the objective."""

from typing import TYPE_CHECKING

from keel.base.moved import refuse_renamed
from keel.losses.advantages import advantages, centred, deviation, group_statistics, zero_variance
from keel.losses.inputs import Limits, LossInputs, PolicyTerm
from keel.losses.mismatch import behaviour_logp, mismatch_ratio, mismatch_weights
from keel.losses.objective import (
    Counts,
    Objective,
    global_denominators,
    kl_penalty,
    kl_term,
    objective,
    vocabulary_kl,
    with_policy_mask,
)
from keel.losses.options import LossOptions, MismatchOptions
from keel.losses.policy import (
    LOSSES,
    Recipe,
    check_loss,
    declared_options,
    get_loss,
    loss_defaults,
    policy_term,
    resolve_limits,
    scale_rewards,
)
from keel.losses.reductions import REDUCTIONS, Denominators, count_denominators

if not TYPE_CHECKING:  # type checkers see the names that are there
    __getattr__ = refuse_renamed(
        __name__,
        {
            "LossSpec": "keel.losses.LossOptions",
            "KLSpec": "keel.kl.KLOptions",
            "MismatchSpec": "keel.losses.MismatchOptions",
            "summed_kl": "keel.losses.vocabulary_kl",
        },
    )

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
    "behaviour_logp",
    "centred",
    "check_loss",
    "count_denominators",
    "declared_options",
    "deviation",
    "get_loss",
    "global_denominators",
    "group_statistics",
    "kl_penalty",
    "kl_term",
    "loss_defaults",
    "mismatch_ratio",
    "mismatch_weights",
    "objective",
    "policy_term",
    "resolve_limits",
    "scale_rewards",
    "vocabulary_kl",
    "with_policy_mask",
    "zero_variance",
]
