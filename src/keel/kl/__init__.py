"""KL as pure functions on torch tensors: estimators, gradient forms, sequence level."""

from keel.kl.estimators import ESTIMATORS, absolute, estimate, k1, k2, k3, masked_mean
from keel.kl.exact import exact_kl, topk_kl, topk_kl_unbiased
from keel.kl.gradients import GradientForm, parse_gradient, straight_through, weighted_estimate
from keel.kl.ratios import DEFAULT_CLAMP, LogRatio, importance_ratio, log_ratio
from keel.kl.sequence import k1_to_go, k2_sequence, k3_sequence, rao_blackwell, reward_to_go, sequence_estimate

__all__ = [
    "DEFAULT_CLAMP",
    "ESTIMATORS",
    "GradientForm",
    "LogRatio",
    "absolute",
    "estimate",
    "exact_kl",
    "importance_ratio",
    "k1",
    "k1_to_go",
    "k2",
    "k2_sequence",
    "k3",
    "k3_sequence",
    "log_ratio",
    "masked_mean",
    "parse_gradient",
    "rao_blackwell",
    "reward_to_go",
    "sequence_estimate",
    "straight_through",
    "topk_kl",
    "topk_kl_unbiased",
    "weighted_estimate",
]
