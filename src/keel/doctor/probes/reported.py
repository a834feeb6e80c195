"""What an engine reports of the tokens that it drew, and what explains a gap to the policy's log-probabilities."""

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

_UNITS = (1.0, 0.5, 0.1, 0.01)  # nats that numbers may have been rounded to
_EXPLAINED_SHARE = 0.3  # of a gap that may be left by what explains it


@dataclass(frozen=True)
class Reports:
    """What the engine reported of tokens of these groups, those that `keep` `[N]` says, beside the policy's own."""

    setup: KeelSubject
    groups: Sequence[Group]
    drawn: Draws
    keep: Tensor

    @classmethod
    def of(cls, setup: KeelSubject, groups: Sequence[Group], keep: Tensor | None = None) -> Reports:
        every = batch_draws(setup) if groups is setup.groups else draws(setup, groups)
        told = ~every.sample_logp.isnan() if keep is None else keep & ~every.sample_logp.isnan()
        return cls(setup, groups, every.where(told), told)

    @cached_property
    def gap(self) -> Tensor:
        return self.drawn.sample_logp - self.drawn.logp(unfiltered(self.setup.sampling))

    @property
    def size(self) -> float:
        return average(self.gap)

    def scored(self) -> Tensor:
        """The policy's log-probabilities `[N]` of the same tokens with its weights as they are now."""
        return draws(self.setup, self.groups).where(self.keep).logp(unfiltered(self.setup.sampling))

    @cached_property
    def rounding(self) -> Tensor:
        """What bfloat16 makes of them `[N]`, against the policy's own; of weights of 16 bits, against those in fp32."""
        own = self.drawn.logp(unfiltered(self.setup.sampling))
        if self.setup.policy.dtype != torch.float32:
            with in_float32(self.setup):
                return own - self.scored()
        with torch.autocast(self.setup.policy.device.type, dtype=torch.bfloat16):
            return self.scored() - own

    def close(self, thresholds: Thresholds, gap: Tensor | None = None) -> bool:
        """Whether the gap, or this one, is rounding: where only training's passes run in 16 bits, as near as those."""
        differences = self.gap if gap is None else gap
        if not in_half_precision(self.setup) or self.setup.policy.dtype != torch.float32:
            return close(self.setup, differences, thresholds)
        rounded = max(thresholds["scoring_gap"], thresholds["precision_times"] * average(self.rounding))
        return average(differences) <= min(thresholds["scoring_gap_half"], rounded)


def reported_finding(reports: Reports, thresholds: Thresholds) -> Finding:
    """Recompute the reported log-probabilities under each hypothesis; the one that closes the gap best is the cause."""
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
            f"{size}; it closes at {name}, rollout.temperature is {plain.temperature:g}",
            "the engine reports log-probabilities that are not at the sampling temperature",
            "let the engine return log_softmax(logits / temperature) of the drawn token (vLLM: "
            "logprobs_mode=processed_logprobs)",
        )
    if least <= limit:
        return finding(
            "sampler/filter",
            f"{size}; the gap closes under {name}",
            "the engine reports log-probabilities after filtering, the trainer computes them before",
            either(
                "let sample_logp be the unfiltered one",
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
            "run the engine in the trainer's type, or keep loss.mismatch on",
            severity="warning" if worth else "note",
        )
    held_in = _held_in(reports)
    if held_in is not None:
        return finding(
            "sampler/precision",
            f"{size}; {held_in}",
            "the engine holds the weights in a narrower type than the trainer",
            "let the engine hold the trainer's type (no quantization), or keep loss.mismatch on",
            severity="error" if reports.size > thresholds["precision_error"] else "warning",
        )
    return finding(
        "sampler/mismatch",
        size + _pattern(reported, plain),
        "what the engine reports is not the policy's log-probability of the drawn token: neither temperature, filters "
        "nor precision explains it",
        "check the engine's log-probabilities (natural logarithm, the drawn token's own, not shifted, the "
        "trainer's weights)",
    )


def filtered_findings(setup: KeelSubject, drawn: Draws, thresholds: Thresholds) -> list[Finding]:
    """What is reported of the configured filters: the weights of the samples are taken from it."""
    assert drawn.filtered_logp is not None
    gap = drawn.filtered_logp - drawn.logp(setup.sampling)
    gap = gap[gap.isfinite()]  # a token that the filters rule out is the draws' finding
    if close(setup, gap, thresholds):
        return []
    return [
        finding(
            "sampler/filter",
            f"under the configured filters the engine's filtered_logp is off by up to {largest(gap):.3g} nats",
            "it is not of what the tokens were drawn from, and the weights of the samples are taken from it",
            "return the drawn token's log-probability among the tokens that the filters keep, or NaN where it is not "
            "known",
        )
    ]


def _held_in(reports: Reports) -> str | None:
    """The type of weights that takes most of the gap away, as text."""
    left = {}
    for name, rounded in rounded_weights().items():
        with quantized(reports.setup, rounded):
            left[name] = average(reports.drawn.sample_logp - reports.scored())
    best = min(left, key=left.__getitem__)
    if left[best] > _EXPLAINED_SHARE * reports.size:
        return None
    return f"weights held in {best} leave {left[best]:.2g} of {reports.size:.2g} nats"


def _pattern(reported: Draws, plain: SamplingParams) -> str:
    """What the reported numbers look like, as text."""
    true = reported.logp(plain)
    if bool((reported.sample_logp == 0).all()):
        return "; all of them are 0"
    factor = float((reported.sample_logp * true).sum() / true.square().sum().clamp_min(1e-12))
    off = float((reported.sample_logp - factor * true).abs().mean())
    if abs(factor - 1) > 0.01 and off <= 0.01 * float(true.abs().mean()):
        return f"; they are {factor:.3g} times the right ones"
    for unit in _UNITS:
        steps = reported.sample_logp / unit
        if largest(steps - steps.round()) < 1e-4 and largest(reported.sample_logp - true) < unit:
            return f"; they are the right ones in steps of {unit:g}"
    for shift, where in ((1, "next"), (-1, "previous")):
        neighbour = true.roll(-shift)
        same = reported.row == reported.row.roll(-shift)
        if bool(same.any()) and float((reported.sample_logp - neighbour)[same].abs().mean()) <= 1e-3:
            return f"; they are those of the {where} token"
    return ""
