"""The reported KL at any β: mean, standard error and range of every estimator; also by position in the context."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from keel.base.metrics import Number, python_numbers
from keel.kl.estimators import get_estimator
from keel.kl.ratios import DEFAULT_CLAMP, check_mask, clamp_straight_through, log_ratio, select

REPORTED = ("k1", "k2", "k3")
REFERENCE = "ref"  # the default anchor in metric names


@dataclass(frozen=True)
class MaskIndex:
    """The true entries of a mask `[B, T]`: their indices `[N]` in the flattened mask, and the rows `[C]` that have any.

    Build it on the CPU together with the mask. On a device, counting the entries would synchronise.
    """

    tokens: Tensor
    rows: Tensor

    @classmethod
    def of(cls, mask: Tensor) -> MaskIndex:
        return cls(mask.flatten().nonzero().squeeze(-1), mask.any(-1).nonzero().squeeze(-1))

    def select(self, values: Tensor) -> Tensor:
        """Select the values `[N]` from `[B, T]`."""
        return values.detach().flatten().index_select(0, self.tokens)

    def mean(self, values: Tensor) -> Number:
        """The mean of the selected values in fp64; 0 for an empty mask."""
        return self.select(values).double().mean() if len(self.tokens) else 0.0


def token_statistics(values: Tensor, action_mask: Tensor) -> dict[str, float]:
    """mean, se, min, max, p95 of per-token values `[B, T]` over the mask; all 0 for an empty mask.

    The mean is over tokens. Tokens of one completion are not independent, so the standard error is clustered by
    completion: se² = B/(B−1) · Σ_b (Σ_t (x − mean))² / N² with N tokens in total (a ratio estimator). With only one
    completion, its tokens count as independent.
    """
    return _plain(_token_statistics(values, action_mask, MaskIndex.of(action_mask)))


def _plain(statistics: dict[str, Number]) -> dict[str, float]:
    return dict(zip(statistics, python_numbers(statistics.values()), strict=True))


def _token_statistics(
    values: Tensor, action_mask: Tensor, index: MaskIndex, weights: Tensor | None = None
) -> dict[str, Number]:
    """`token_statistics` as tensors. With `weights` w: mean and se of w·x, and the weighted p95 of x."""
    check_mask(action_mask, values.shape)
    chosen = index.select(values).double()
    if chosen.numel() == 0:
        return dict.fromkeys(("mean", "se", "min", "max", "p95"), 0.0)
    terms = values if weights is None else weights.double() * select(values.detach().double(), action_mask)
    summed = chosen if weights is None else index.select(terms)
    mean = summed.mean()
    residual = select(terms.detach().double() - mean, action_mask).sum(-1)[index.rows]
    clusters = residual.numel()
    if clusters > 1:
        se = (clusters / (clusters - 1) * residual.square().sum()).sqrt() / summed.numel()
    else:
        se = summed.std(correction=min(1, summed.numel() - 1)) / summed.numel() ** 0.5
    if weights is not None:
        p95 = _weighted_quantile(chosen, index.select(weights).double(), 0.95)
    else:
        p95 = torch.quantile(chosen, 0.95) if chosen.numel() <= 2**24 else _p95(chosen)
    return {"mean": mean, "se": se, "min": chosen.min(), "max": chosen.max(), "p95": p95}


def _weighted_quantile(values: Tensor, weights: Tensor, q: float) -> Tensor:
    """The smallest value at which the cumulative weight reaches the fraction q of the total."""
    ordered, order = values.sort()
    reached = weights[order].cumsum(0)
    return ordered[torch.searchsorted(reached, q * reached[-1:]).clamp_max(len(ordered) - 1)].squeeze(0)


def _sequence_statistics(values: Tensor, action_mask: Tensor, index: MaskIndex) -> dict[str, Number]:
    """Sum per-token values `[B, T]` per completion; mean, se and p95 over completions. One completion has se 0."""
    sums = select(values.detach().double(), action_mask).sum(-1)[index.rows]
    if sums.numel() == 0:
        return dict.fromkeys(("mean", "se", "p95"), 0.0)
    se = sums.std(correction=min(1, sums.numel() - 1)) / sums.numel() ** 0.5
    return {"mean": sums.mean(), "se": se, "p95": torch.quantile(sums, 0.95)}


def _p95(values: Tensor) -> Tensor:
    """The 95th percentile, by kthvalue, because torch.quantile refuses more than 2²⁴ values."""
    return values.kthvalue(max(1, int(0.95 * values.numel()))).values


def measure_kl(
    logp: Tensor,
    ref_logp: Tensor,
    action_mask: Tensor,
    *,
    exact_kl: Tensor | None = None,
    clamp: float | None = DEFAULT_CLAMP,
    weights: Tensor | None = None,
) -> dict[str, float]:
    """The KL metrics on samples from the policy.

    They are `kl/policy_ref/<k1|k2|k3|exact>/<mean|se|min|max|p95>`, `kl/policy_ref/sequence/<mean|se|p95>`, the clamped
    fraction, and `kl/policy_ref/overlap`, the overlap of the distributions, Σ min(π, p) = E[min(1, p/π)].

    For samples from another policy μ, pass `weights` w = π/μ `[B, T]`: E_μ[w·k] = E_π[k] at each prefix. The exact KL
    is conditional on the prefix and needs no weights.
    """
    index = MaskIndex.of(action_mask)
    return _plain(kl_statistics(logp, ref_logp, action_mask, index, exact_kl=exact_kl, clamp=clamp, weights=weights))


def metric_of(name: str, anchor: str) -> str:
    """Rename a reference's metric for another anchor, such as `kl/policy_teacher/…` or `kl/beta_teacher`."""
    if anchor == REFERENCE:
        return name
    own = re.sub(rf"(?<=[/_]){REFERENCE}(?=[/_])", anchor, name)
    return own if own != name else f"{name}_{anchor}"


def controlled_kl(metrics: Mapping[str, float], unit: str, anchor: str = REFERENCE) -> float | None:
    """The KL that a controller reads, in its unit: per token the exact KL or else k3, per sequence k1."""
    names = ("sequence",) if unit == "per_sequence" else ("exact", "k3")
    measured = (metrics.get(metric_of(f"kl/policy_ref/{name}/mean", anchor)) for name in names)
    return next((kl for kl in measured if kl is not None), None)


def kl_statistics(
    logp: Tensor,
    ref_logp: Tensor,
    action_mask: Tensor,
    index: MaskIndex,
    *,
    exact_kl: Tensor | None = None,
    clamp: float | None = DEFAULT_CLAMP,
    weights: Tensor | None = None,
) -> dict[str, Number]:
    """`measure_kl` with results as tensors on the device, given the mask's index."""
    ratio = log_ratio(logp.detach(), ref_logp.detach(), action_mask, clamp)
    per_token = {name: get_estimator(name)(ratio.d) for name in REPORTED}
    parts = {name: _token_statistics(values, action_mask, index, weights) for name, values in per_token.items()}
    parts |= {} if exact_kl is None else {"exact": _token_statistics(exact_kl, action_mask, index)}
    summed = -ratio.d if weights is None else -ratio.d * weights
    parts["sequence"] = _sequence_statistics(summed, action_mask, index)
    clamped = (ratio.clamped & action_mask).sum().double() / max(1, len(index.tokens))
    named = {f"kl/policy_ref/{name}/{key}": value for name, part in parts.items() for key, value in part.items()}
    shared = ratio.d.clamp_max(0).exp() * (1.0 if weights is None else weights)
    return {**named, "kl/policy_ref/overlap": index.mean(shared), "kl/clamped_fraction": clamped}


def prefix_gap(
    logp: Tensor,
    ref_logp: Tensor,
    sample_logp: Tensor,
    action_mask: Tensor,
    index: MaskIndex,
    *,
    clamp: float | None = DEFAULT_CLAMP,
) -> dict[str, Number]:
    """The error of a sequence's token-weighted KL that μ's prefixes cause: mean and se in nats per sequence.

    Σ_t (W_t − 1)·w_t·u_t with W_t = Π_{j<t} w_j. Its mean is E_π[Σ u] − E_μ[Σ w·u]. Added to the token-weighted KL of
    sequences, it gives the KL of the policy's own sequences.
    """
    log_w = -log_ratio(logp.detach(), sample_logp.detach(), action_mask, clamp=None).d
    before = clamp_straight_through(log_w.cumsum(-1) - log_w, DEFAULT_CLAMP)[0]
    u = -log_ratio(logp.detach(), ref_logp.detach(), action_mask, clamp).d
    terms = torch.expm1(before) * clamp_straight_through(log_w, DEFAULT_CLAMP)[0].exp() * u
    statistics = _sequence_statistics(terms, action_mask, index)
    return {f"kl/policy_ref/prefix_gap/{name}": statistics[name] for name in ("mean", "se")}


FIRST_BIN_TOKENS = 64  # the first bin ends here, the next at 128, 256, …
MIN_COMPLETIONS = 4  # bins with fewer completions are left out: they give no reliable standard error
METRIC_PREFIX = "kl/sampler_policy/depth_"  # followed by the bin's start, then /mean or /se


def depth_bin(position: Tensor) -> Tensor:
    """The start of each context position's bin: 0, 64, 128, 256, …"""
    doublings = (position.double() / FIRST_BIN_TOKENS).clamp_min(0.5).log2().floor()
    return torch.where(doublings < 0, 0, FIRST_BIN_TOKENS * 2**doublings).long()


def positions(prompts: Sequence[int] | Tensor, width: int, device: torch.device | None = None) -> Tensor:
    """The context position of each completion token `[B, T]`, given the prompts' lengths."""
    return torch.as_tensor(prompts, device=device)[:, None] + torch.arange(width, device=device)


def occupied_bins(where: Tensor, mask: Tensor) -> tuple[int, ...]:
    """The starts of the bins in which at least `MIN_COMPLETIONS` rows have a token of the mask."""
    own = depth_bin(where)
    starts = own[mask].unique().tolist()
    return tuple(start for start in starts if (mask & (own == start)).any(-1).sum() >= MIN_COMPLETIONS)


def mean_by_depth(
    values: Tensor, mask: Tensor, where: Tensor, starts: Sequence[int]
) -> dict[int, tuple[Number, Number]]:
    """Mean and standard error `{start: (mean, se)}` of values `[B, T]`, clustered by completion."""
    result: dict[int, tuple[Number, Number]] = {}
    own, values = depth_bin(where), values.detach().double()
    for start in starts:
        inside = mask & (own == start)
        count = inside.sum().clamp_min(1)
        mean = torch.where(inside, values, 0.0).sum() / count
        residual = torch.where(inside, values - mean, 0.0).sum(-1)
        rows = inside.any(-1).sum()
        squares = rows / (rows - 1).clamp_min(1) * residual.square().sum()
        result[start] = mean, squares.sqrt() / count
    return result


def depth_metrics(values: Tensor, mask: Tensor, where: Tensor, starts: Sequence[int]) -> dict[str, Number]:
    """`mean_by_depth` as metrics; empty if all tokens are in one bin."""
    if len(starts) < 2:
        return {}
    means = mean_by_depth(values, mask, where, starts)
    named = {f"{METRIC_PREFIX}{start}/mean": mean for start, (mean, _) in means.items()}
    return named | {f"{METRIC_PREFIX}{start}/se": se for start, (_, se) in means.items()}
