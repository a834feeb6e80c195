"""KL as it is reported: every estimator, its spread and its standard error, whatever β is."""

from __future__ import annotations

import torch
from torch import Tensor

from keel.kl.estimators import get_estimator
from keel.kl.ratios import DEFAULT_CLAMP, check_mask, log_ratio, select

REPORTED = ("k1", "k2", "k3")


def token_statistics(values: Tensor, action_mask: Tensor) -> dict[str, float]:
    """mean, se, min, max, p95 of per-token values `[B, T]` over the mask; all 0 where it is empty.

    The mean is over tokens. Tokens of one completion are not independent, so its standard error treats the
    completion as the unit: se² = B/(B−1) · Σ_b (Σ_t (x − mean))² / N², N tokens in all (a ratio estimator). With one
    completion there is nothing to compare it with: its tokens are then taken as independent.
    """
    check_mask(action_mask, values.shape)
    chosen = values.detach()[action_mask].double()
    if chosen.numel() == 0:
        return dict.fromkeys(("mean", "se", "min", "max", "p95"), 0.0)
    mean = chosen.mean()
    residual = select(values.detach().double() - mean, action_mask).sum(-1)[action_mask.any(-1)]
    clusters = residual.numel()
    if clusters > 1:
        se = (clusters / (clusters - 1) * residual.square().sum()).sqrt() / chosen.numel()
    else:
        se = chosen.std(correction=min(1, chosen.numel() - 1)) / chosen.numel() ** 0.5
    return {
        "mean": mean.item(),
        "se": se.item(),
        "min": chosen.min().item(),
        "max": chosen.max().item(),
        "p95": torch.quantile(chosen, 0.95).item() if chosen.numel() <= 2**24 else _p95(chosen),
    }


def sequence_statistics(values: Tensor, action_mask: Tensor) -> dict[str, float]:
    """mean, se, p95 over completions of the sum of per-token values `[B, T]`; a single completion has no spread."""
    sums = select(values.detach().double(), action_mask).sum(-1)[action_mask.any(-1)]
    if sums.numel() == 0:
        return dict.fromkeys(("mean", "se", "p95"), 0.0)
    se = sums.std(correction=min(1, sums.numel() - 1)) / sums.numel() ** 0.5
    return {"mean": sums.mean().item(), "se": se.item(), "p95": torch.quantile(sums, 0.95).item()}


def _p95(values: Tensor) -> float:
    """torch.quantile refuses more than 2²⁴ values; kthvalue does not."""
    return values.kthvalue(max(1, int(0.95 * values.numel()))).values.item()


def measure_kl(
    logp: Tensor,
    ref_logp: Tensor,
    action_mask: Tensor,
    *,
    exact_kl: Tensor | None = None,
    clamp: float | None = DEFAULT_CLAMP,
) -> dict[str, float]:
    """`kl/policy_ref/<k1|k2|k3|exact>/<mean|se|min|max|p95>` and `…/sequence/<mean|se|p95>` on samples from the policy,
    and the clamped fraction."""
    ratio = log_ratio(logp.detach(), ref_logp.detach(), action_mask, clamp)
    metrics: dict[str, float] = {}
    for name in REPORTED:
        for statistic, value in token_statistics(get_estimator(name)(ratio.d), action_mask).items():
            metrics[f"kl/policy_ref/{name}/{statistic}"] = value
    if exact_kl is not None:
        for statistic, value in token_statistics(exact_kl, action_mask).items():
            metrics[f"kl/policy_ref/exact/{statistic}"] = value
    for statistic, value in sequence_statistics(-ratio.d, action_mask).items():
        metrics[f"kl/policy_ref/sequence/{statistic}"] = value
    metrics["kl/clamped_fraction"] = (ratio.clamped & action_mask).sum().item() / max(1, int(action_mask.sum()))
    return metrics
