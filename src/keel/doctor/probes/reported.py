"""Check the log-probabilities that the engine reports, and explain their gap to the policy's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from keel.base.types import Group
from keel.doctor.advice import either, setting
from keel.doctor.advice import unfiltered as whole_distribution
from keel.doctor.draws import Draws, batch_draws, best_temperature, draws, filters, unfiltered
from keel.doctor.findings import Finding, finding
from keel.doctor.gap import (
    average,
    close,
    closed,
    in_float32,
    in_half_precision,
    largest,
    quantized,
    rounded_weights,
    rounding_explains,
)
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.thresholds import Thresholds
from keel.rollout.sampling import SamplingParams

_EXPLAINED_SHARE = 0.3  # largest remaining share of an explained gap


@dataclass(frozen=True)
class Reports:
    """The engine's log-probabilities for the tokens that `keep` `[N]` selects, with the policy's own."""

    setup: KeelSubject
    groups: Sequence[Group]
    drawn: Draws
    keep: Tensor

    @classmethod
    def of(cls, setup: KeelSubject, groups: Sequence[Group], keep: Tensor | None = None) -> Reports:
        every = batch_draws(setup) if groups is setup.groups else draws(setup, groups)
        known = ~every.sample_logp.isnan() if keep is None else keep & ~every.sample_logp.isnan()
        return cls(setup, groups, every.where(known), known)

    @cached_property
    def gap(self) -> Tensor:
        return self.drawn.sample_logp - self.drawn.logp(unfiltered(self.setup.sampling))

    @property
    def size(self) -> float:
        return average(self.gap)

    def scored(self) -> Tensor:
        """The policy's log-probabilities `[N]` of these tokens with its current weights."""
        return draws(self.setup, self.groups).where(self.keep).logp(unfiltered(self.setup.sampling))

    @cached_property
    def rounding(self) -> Tensor:
        """The rounding error of bfloat16 for these tokens `[N]`; for 16-bit weights, their difference from fp32."""
        own = self.drawn.logp(unfiltered(self.setup.sampling))
        if self.setup.policy.dtype != torch.float32:
            with in_float32(self.setup):
                return own - self.scored()
        with torch.autocast(self.setup.policy.device.type, dtype=torch.bfloat16):
            return self.scored() - own

    def close(self, thresholds: Thresholds, gap: Tensor | None = None) -> bool:
        """Whether the gap is rounding. If only training's passes run in 16 bits, their rounding is the limit."""
        differences = self.gap if gap is None else gap
        if not in_half_precision(self.setup) or self.setup.policy.dtype != torch.float32:
            return close(self.setup, differences)
        rounded = max(thresholds["scoring_gap"], thresholds["precision_times"] * average(self.rounding))
        return average(differences) <= min(thresholds["scoring_gap_half"], rounded)


def reported_finding(reports: Reports, thresholds: Thresholds) -> Finding:
    """The finding for the hypothesis that best closes the gap of the reported log-probabilities."""
    setup, reported, gap = reports.setup, reports.drawn, reports.gap
    plain = unfiltered(setup.sampling)
    size = f"the engine's log-probabilities are off by up to {largest(gap):.3g} nats ({reports.size:.3g} mean)"
    limit = closed(setup, reports.size)

    def residual(params: SamplingParams) -> float:
        return average(reported.sample_logp - reported.logp(params))

    warm = replace(plain, temperature=best_temperature(plain, residual))
    ways = [("", replace(plain, temperature=1.0)), ("", warm), *filters(setup.sampling)]
    left = {name or f"temperature {params.temperature:.3g}": (residual(params), bool(name)) for name, params in ways}
    name, (least, is_filter) = min(left.items(), key=lambda entry: entry[1][0])
    if least <= limit and not is_filter:
        return finding(
            "sampler/temperature",
            f"{size}; the gap closes at {name}, while rollout.temperature is {plain.temperature:g}",
            "the engine does not compute log-probabilities at the sampling temperature",
            "let the engine return log_softmax(logits / temperature) of the drawn token (vLLM: "
            "logprobs_mode=processed_logprobs)",
        )
    if least <= limit:
        return finding(
            "sampler/filter",
            f"{size}; the gap closes under {name}",
            "the engine reports log-probabilities after filtering, while the trainer computes them before filtering",
            either(
                "return unfiltered log-probabilities in sample_logp",
                setting("set {}", whole_distribution(setup.config.to_dict())),
                joined=", and ",
            ),
        )
    if rounding_explains(gap, reports.rounding, thresholds):
        kl = float((gap.exp() - 1 - gap).mean())
        worth = kl > thresholds["sampler_kl_warning"]
        return finding(
            "sampler/precision",
            f"{size}, KL about {kl:.2g} nats per token; bfloat16 alone gives a gap of {average(reports.rounding):.3g} "
            "on average",
            "sampler and trainer run the same weights in different precision or kernels",
            "run the engine in the trainer's dtype, or keep loss.mismatch on",
            severity="warning" if worth else "note",
        )
    held_in = _held_in(reports)
    if held_in is not None:
        return finding(
            "sampler/precision",
            f"{size}; {held_in}",
            "the engine stores the weights in a narrower type than the trainer",
            "let the engine use the trainer's type (no quantization), or keep loss.mismatch on",
            severity="error" if reports.size > thresholds["precision_error"] else "warning",
        )
    return finding(
        "sampler/mismatch",
        size,
        "the engine does not report the policy's log-probability of the drawn token; temperature, filters and "
        "precision do not explain the difference",
        "check the engine's log-probabilities (natural logarithm, the drawn token's own, not shifted, the "
        "trainer's weights)",
    )


def filtered_findings(setup: KeelSubject, drawn: Draws) -> list[Finding]:
    """Check filtered_logp, which importance weights are computed from, under the configured filters."""
    assert drawn.filtered_logp is not None
    gap = drawn.filtered_logp - drawn.logp(setup.sampling)
    gap = gap[gap.isfinite()]  # tokens that the filters exclude are reported by the test of draws
    if close(setup, gap):
        return []
    return [
        finding(
            "sampler/filter",
            f"under the configured filters the engine's filtered_logp is off by up to {largest(gap):.3g} nats",
            "filtered_logp does not match the sampling distribution, and importance weights are computed from it",
            "return the drawn token's log-probability among the tokens that the filters keep, or NaN if it is unknown",
        )
    ]


def _held_in(reports: Reports) -> str | None:
    """The weight type whose rounding closes most of the gap, as text."""
    left = {}
    for name, rounded in rounded_weights().items():
        with quantized(reports.setup, rounded):
            left[name] = average(reports.drawn.sample_logp - reports.scored())
    best = min(left, key=left.__getitem__)
    if left[best] > _EXPLAINED_SHARE * reports.size:
        return None
    return f"with the weights in {best}, {left[best]:.2g} of {reports.size:.2g} nats remain"
