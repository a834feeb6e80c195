"""KL as it is reported: every estimator, its spread and its standard error, whatever β is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from keel.base.metrics import Number, python_numbers
from keel.kl.estimators import get_estimator
from keel.kl.ratios import DEFAULT_CLAMP, check_mask, log_ratio, select

REPORTED = ("k1", "k2", "k3")


@dataclass(frozen=True)
class MaskIndex:
    """Where a mask `[B, T]` is true: tokens `[N]` of the flattened mask, rows `[C]` that have any.

    Whoever made the mask in main memory makes this there too: a device is waited for to learn how many there are.
    """

    tokens: Tensor
    rows: Tensor

    @classmethod
    def of(cls, mask: Tensor) -> MaskIndex:
        return cls(mask.flatten().nonzero().squeeze(-1), mask.any(-1).nonzero().squeeze(-1))

    def select(self, values: Tensor) -> Tensor:
        """The values `[N]` of `[B, T]`."""
        return values.detach().flatten().index_select(0, self.tokens)

    def mean(self, values: Tensor) -> Number:
        """Their mean in fp64; 0 where there are none."""
        return self.select(values).double().mean() if len(self.tokens) else 0.0


def token_statistics(values: Tensor, action_mask: Tensor) -> dict[str, float]:
    """mean, se, min, max, p95 of per-token values `[B, T]` over the mask; all 0 where it is empty.

    The mean is over tokens. Tokens of one completion are not independent, so its standard error treats the
    completion as the unit: se² = B/(B−1) · Σ_b (Σ_t (x − mean))² / N², N tokens in all (a ratio estimator). With one
    completion there is nothing to compare it with: its tokens are then taken as independent.
    """
    return _plain(_token_statistics(values, action_mask, MaskIndex.of(action_mask)))


def _plain(statistics: dict[str, Number]) -> dict[str, float]:
    return dict(zip(statistics, python_numbers(statistics.values()), strict=True))


def _token_statistics(values: Tensor, action_mask: Tensor, index: MaskIndex) -> dict[str, Number]:
    check_mask(action_mask, values.shape)
    chosen = index.select(values).double()
    if chosen.numel() == 0:
        return dict.fromkeys(("mean", "se", "min", "max", "p95"), 0.0)
    mean = chosen.mean()
    residual = select(values.detach().double() - mean, action_mask).sum(-1)[index.rows]
    clusters = residual.numel()
    if clusters > 1:
        se = (clusters / (clusters - 1) * residual.square().sum()).sqrt() / chosen.numel()
    else:
        se = chosen.std(correction=min(1, chosen.numel() - 1)) / chosen.numel() ** 0.5
    p95 = torch.quantile(chosen, 0.95) if chosen.numel() <= 2**24 else _p95(chosen)
    return {"mean": mean, "se": se, "min": chosen.min(), "max": chosen.max(), "p95": p95}


def _sequence_statistics(values: Tensor, action_mask: Tensor, index: MaskIndex) -> dict[str, Number]:
    """mean, se, p95 over completions of the sum of per-token values `[B, T]`; a single completion has no spread."""
    sums = select(values.detach().double(), action_mask).sum(-1)[index.rows]
    if sums.numel() == 0:
        return dict.fromkeys(("mean", "se", "p95"), 0.0)
    se = sums.std(correction=min(1, sums.numel() - 1)) / sums.numel() ** 0.5
    return {"mean": sums.mean(), "se": se, "p95": torch.quantile(sums, 0.95)}


def _p95(values: Tensor) -> Tensor:
    """torch.quantile refuses more than 2²⁴ values; kthvalue does not."""
    return values.kthvalue(max(1, int(0.95 * values.numel()))).values


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
    index = MaskIndex.of(action_mask)
    return _plain(kl_statistics(logp, ref_logp, action_mask, index, exact_kl=exact_kl, clamp=clamp))


def kl_statistics(
    logp: Tensor,
    ref_logp: Tensor,
    action_mask: Tensor,
    index: MaskIndex,
    *,
    exact_kl: Tensor | None = None,
    clamp: float | None = DEFAULT_CLAMP,
) -> dict[str, Number]:
    """`measure_kl` as tensors on their device, given where its mask is true."""
    ratio = log_ratio(logp.detach(), ref_logp.detach(), action_mask, clamp)
    per_token = {name: get_estimator(name)(ratio.d) for name in REPORTED}
    per_token |= {} if exact_kl is None else {"exact": exact_kl}
    parts = {name: _token_statistics(values, action_mask, index) for name, values in per_token.items()}
    parts["sequence"] = _sequence_statistics(-ratio.d, action_mask, index)
    clamped = (ratio.clamped & action_mask).sum().double() / max(1, len(index.tokens))
    named = {f"kl/policy_ref/{name}/{key}": value for name, part in parts.items() for key, value in part.items()}
    return {**named, "kl/clamped_fraction": clamped}
