"""The distribution that tokens were drawn from, if it is not the policy's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from keel.doctor.advice import setting
from keel.doctor.advice import unfiltered as whole_distribution
from keel.doctor.draws import (
    Draws,
    best_temperature,
    chance_of,
    filters,
    tightest,
    unfiltered,
)
from keel.doctor.findings import Finding, Severity, finding
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.probes.alternatives import Alternative, alternatives, applied
from keel.doctor.thresholds import Thresholds
from keel.rollout.sampling import SamplingParams

_TEMPERATURES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5)  # temperatures that are combined with a filter
_OTHERS = 2  # number of other alternatives that are tried
_PRICE = 5.0  # nats of log-likelihood that each further parameter must gain
_TRIED, _ELEMENTS = 2000, 20_000_000  # limits on tokens, and on tokens × vocabulary, for testing explanations


@dataclass(frozen=True)
class Explanation:
    """One tested distribution: the log-likelihood of the tokens under it, and its p-value."""

    code: str
    name: str
    cause: str
    logp: float  # log-likelihood of all tokens, in nats
    drawn: Draws
    params: SamplingParams

    @cached_property
    def chance(self) -> float:
        return chance_of(self.drawn, self.params)

    def explains(self, thresholds: Thresholds, ends: Iterable[int]) -> bool:
        """Whether the tokens are consistent with this distribution, so that no other one is needed."""
        if self.chance <= thresholds["sampler_explained"]:
            return False
        left = replace(self.drawn, logits=self.drawn.distribution(self.params))
        return alternatives(left, SamplingParams(), ends)[1] < -math.log(thresholds["sampler_explained"])


def _explanation(code: str, name: str, cause: str, drawn: Draws, params: SamplingParams, free: int = 1) -> Explanation:
    """Test one explanation. Each further `free` parameter must improve the likelihood by `_PRICE`."""
    logp = -_unlikelihood(drawn, params) - _PRICE * (free - 1)
    return Explanation(code, name, cause, logp, drawn, params)


def _explanations(more: Draws, sampling: SamplingParams, others: Sequence[Alternative]) -> Iterator[Explanation]:
    plain = unfiltered(sampling)
    cause = "the engine samples otherwise than it is configured to, so that the samples are not the policy's"
    fitted = best_temperature(plain, lambda params: _unlikelihood(more, params))
    warm = replace(plain, temperature=fitted)
    yield _explanation("sampler/temperature", f"temperature {fitted:.3g}", cause, more, warm)
    for name, params in (*filters(plain), *tightest(more, plain)):
        yield _explanation("sampler/filter", name, cause, more, params)
    for temperature in _TEMPERATURES:
        for name, params in tightest(more, replace(plain, temperature=temperature)):
            both = f"temperature {temperature:g} with {name}"
            yield _explanation("sampler/filter", both, cause, more, params, free=2)
    kinds = {other.name.partition(" of ")[0].partition(" (")[0]: other for other in reversed(others)}
    for other in sorted(kinds.values(), key=lambda other: -other.gain)[:_OTHERS]:
        yield _explanation("sampler/filter", other.name, other.cause, applied(more, other, plain), plain)


def drawn_finding(
    more: Draws, setup: KeelSubject, chance: float, others: Sequence[Alternative], odds: float, thresholds: Thresholds
) -> Finding:
    """The finding for the most likely distribution that the tokens do not reject."""
    sampling = setup.sampling
    size = f"{len(more)} drawn tokens come from the policy's distribution with chance {chance:.1g}"
    if chance >= thresholds["sampler_draws"]:
        size = f"{len(more)} drawn tokens are e^{odds:.3g} times likelier under other ways to draw"
    small = more.where(torch.arange(len(more), device=more.tokens.device) < min(_TRIED, _ELEMENTS // setup.vocabulary))
    tried = sorted(_explanations(small, sampling, others), key=lambda entry: -entry.logp)
    better = (entry for entry in tried if entry.logp > -_unlikelihood(small, sampling))
    if setup.shared.get("reported") == "sampler/mismatch":  # no known distribution explains the reported values
        better = (entry for entry in better if _agrees(entry, small, sampling, thresholds))
    best = next((entry for entry in better if entry.explains(thresholds, setup.policy.eos_ids)), None)
    if best is not None:
        configured = (
            f"rollout says temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, top_k {sampling.top_k}"
        )
        return finding(
            best.code,
            f"{size}; {best.name} explains them (chance {best.chance:.2g}), while {configured}",
            best.cause,
            "pass rollout.temperature, top_p, top_k and min_p on to the engine as they are, and no penalties, bans or "
            "least length (repetition_penalty=1): engines take defaults of their own from generation_config.json",
        )
    nearest = "; ".join(f"{entry.name}: chance {entry.chance:.1g}" for entry in tried[:3])
    return finding(
        "sampler/mismatch",
        f"{size}; nothing that was tried explains them ({nearest})",
        "the engine does not sample from this policy: other weights, another prompt, or its own way of drawing",
        "check the engine's weights and the tokens it is given (Request.tokens, never encoded again)",
    )


def _agrees(entry: Explanation, drawn: Draws, sampling: SamplingParams, thresholds: Thresholds) -> bool:
    """Whether the reported values fit the policy, or at least are closer to this explanation than halfway."""
    reported = drawn.sample_logp.isfinite()
    policy, own = drawn.logp(unfiltered(sampling)), entry.drawn.logp(entry.params)
    before, after = (float((drawn.sample_logp - logp)[reported].abs().nan_to_num(0.0).mean()) for logp in (policy, own))
    return not before > thresholds["scoring_gap_half"] or after <= before / 2


def _unlikelihood(drawn: Draws, params: SamplingParams) -> float:
    return -float(drawn.logp(params).nan_to_num(neginf=-1e9).sum())


def configured_finding(setup: KeelSubject, more: Draws, thresholds: Thresholds) -> Finding:
    """Filters in the configuration: the samples are not the policy's own distribution."""
    sampling = setup.sampling
    lost = more.logp(sampling) - more.logp(unfiltered(sampling))
    kl, cut = float(lost[torch.isfinite(lost)].mean()), 1 - float((-lost).exp().mean())
    return finding(
        "sampler/filter",
        f"rollout.top_p={sampling.top_p:g}, top_k={sampling.top_k}, min_p={sampling.min_p:g} cut off "
        f"{100 * cut:.1f} % of the probability on average: KL(sampler‖policy) is {kl:.3g} nats per token",
        "completions come from the filtered distribution, ratios and KL are of the unfiltered policy",
        setting("set {} for training", whole_distribution(setup.config.to_dict())),
        severity=_severity(kl, thresholds) if cut > thresholds["filtered_mass"] else "note",
    )


def _severity(kl: float, thresholds: Thresholds) -> Severity:
    if kl > thresholds["sampler_kl_error"]:
        return "error"
    return "warning" if kl > thresholds["sampler_kl_warning"] else "note"
