"""Policy losses as pure functions: advantages, terms, reductions, sampler mismatch, the objective."""

from keel.losses.advantages import advantages, centred, deviation, group_statistics, zero_variance
from keel.losses.mismatch import MismatchSpec, mismatch_weights
from keel.losses.objective import (
    Counts,
    KLSpec,
    Objective,
    global_denominators,
    kl_term,
    objective,
    summed_kl,
    with_policy_mask,
)
from keel.losses.policy import LOSSES, LossSpec, PolicyTerm, policy_term, resolve_limits
from keel.losses.reductions import REDUCTIONS, Denominators, count_denominators

__all__ = [
    "LOSSES",
    "REDUCTIONS",
    "Counts",
    "Denominators",
    "KLSpec",
    "LossSpec",
    "MismatchSpec",
    "Objective",
    "PolicyTerm",
    "advantages",
    "centred",
    "count_denominators",
    "deviation",
    "global_denominators",
    "group_statistics",
    "kl_term",
    "mismatch_weights",
    "objective",
    "policy_term",
    "resolve_limits",
    "summed_kl",
    "with_policy_mask",
    "zero_variance",
]
