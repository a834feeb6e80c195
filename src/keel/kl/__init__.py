"""The KL term as pure functions of torch tensors: estimators, gradient forms, placement, facts, controllers."""

from typing import TYPE_CHECKING

from keel.base import lazy_attributes

if TYPE_CHECKING:
    from keel.kl.controllers import (
        CONTROLLERS,
        BetaController,
        KLState,
        build_controller,
        controller_from_options,
        get_controller,
    )
    from keel.kl.estimators import (
        ESTIMATORS,
        absolute,
        estimate,
        get_estimator,
        k1,
        k2,
        k3,
        masked_mean,
        straight_through,
        weighted_estimate,
        with_form,
    )
    from keel.kl.exact import exact_kl, topk_kl, topk_kl_unbiased
    from keel.kl.facts import FACTS, Fact, GradientForm, Pairing, advise, check_pairing, find_fact, parse_gradient
    from keel.kl.measure import measure_kl, token_statistics
    from keel.kl.options import DEFAULT_CLAMP, KLOptions, check_kl
    from keel.kl.placement import advantage_penalty, kl_loss, kl_score_loss, reward_penalty
    from keel.kl.ratios import LogRatio, importance_ratio, log_ratio
    from keel.kl.sequence import k1_to_go, k2_sequence, k3_sequence, rao_blackwell, reward_to_go, sequence_estimate
else:
    __getattr__ = lazy_attributes(
        __name__, "options facts controllers estimators exact measure placement ratios sequence"
    )

__all__ = [
    "CONTROLLERS",
    "DEFAULT_CLAMP",
    "ESTIMATORS",
    "FACTS",
    "BetaController",
    "Fact",
    "GradientForm",
    "KLOptions",
    "KLState",
    "LogRatio",
    "Pairing",
    "absolute",
    "advantage_penalty",
    "advise",
    "build_controller",
    "check_kl",
    "check_pairing",
    "controller_from_options",
    "estimate",
    "exact_kl",
    "find_fact",
    "get_controller",
    "get_estimator",
    "importance_ratio",
    "k1",
    "k1_to_go",
    "k2",
    "k2_sequence",
    "k3",
    "k3_sequence",
    "kl_loss",
    "kl_score_loss",
    "log_ratio",
    "masked_mean",
    "measure_kl",
    "parse_gradient",
    "rao_blackwell",
    "reward_penalty",
    "reward_to_go",
    "sequence_estimate",
    "straight_through",
    "token_statistics",
    "topk_kl",
    "topk_kl_unbiased",
    "weighted_estimate",
    "with_form",
]
