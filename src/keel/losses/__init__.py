"""Policy losses as pure functions: advantages, terms, reductions, sampler mismatch, the objective."""

from typing import TYPE_CHECKING

from keel.base import lazy_attributes

if TYPE_CHECKING:
    from keel.losses.advantages import advantages, centred, deviation, group_statistics, zero_variance
    from keel.losses.mismatch import behaviour_logp, mismatch_ratio, mismatch_weights
    from keel.losses.objective import (
        Counts,
        KLTerm,
        Objective,
        global_denominators,
        kl_penalty,
        kl_term,
        objective,
        policy_term,
        vocabulary_kl,
        with_policy_mask,
    )
    from keel.losses.options import LossOptions, MismatchOptions
    from keel.losses.policy import LossInputs, PolicyTerm
    from keel.losses.recipes import (
        LOSSES,
        Limits,
        Recipe,
        check_loss,
        declared_options,
        get_loss,
        loss_defaults,
        resolve_limits,
        scale_rewards,
    )
    from keel.losses.reductions import REDUCTIONS, Denominators, count_denominators
else:
    __getattr__ = lazy_attributes(__name__, "options recipes advantages mismatch objective policy reductions")

__all__ = [
    "LOSSES",
    "REDUCTIONS",
    "Counts",
    "Denominators",
    "KLTerm",
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
