"""The sampler against the policy: what it reports, what it draws, and what explains the difference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from keel.base.thresholds import Thresholds
from keel.base.types import Group
from keel.lab.doctor.advice import either, setting
from keel.lab.doctor.advice import unfiltered as whole_distribution
from keel.lab.doctor.findings import Finding, Severity, finding
from keel.lab.doctor.probes.alternatives import Alternative, alternatives, applied, filter_odds
from keel.lab.doctor.probes.alternatives import fitted as fitted_alternative
from keel.lab.doctor.probes.draws import (
    Draws,
    best_temperature,
    draws,
    filters,
    tail_masses,
    tightest,
    unfiltered,
    uniform_p_value,
)
from keel.lab.doctor.probes.gap import (
    bf16_scores,
    close,
    in_half_precision,
    largest,
    quantized_scores,
    reports_close,
    rounded_weights,
    rounding_explains,
    without_first,
)
from keel.lab.doctor.probes.masks import batch_draws, foreign
from keel.lab.doctor.probes.noise import NOISE_STEP, noise_findings
from keel.lab.doctor.probes.result import ProbeResult
from keel.lab.doctor.setup import ProbeSetup
from keel.rollout.sampling import SamplingParams

_TARGET_TOKENS = 1500  # tokens
_TIMES = 3  # as many where the first ones leave a doubt
_FURTHER = range(6, 6 + 6 * _TIMES)
_TEMPERATURES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.5)  # that go with a filter
_OTHERS = 2  # other ways to draw that are tried
_PRICE = 5.0  # nats: what a further parameter has to be worth
_TRIED, _ELEMENTS = 2000, 20_000_000  # tokens, and tokens × vocabulary, that explanations are tried on
_FEW = 20  # tokens that tell whether draws are sound
_EXPLAINED_SHARE = 0.3  # of a gap that may be left by what explains it


def probe_sampler(setup: ProbeSetup, thresholds: Thresholds) -> ProbeResult:
    """The gap between the engine's log-probabilities and the policy's, and whether its tokens are the policy's."""
    drawn = batch_draws(setup).where(~foreign(setup, thresholds))
    reported = drawn.where(~drawn.sample_logp.isnan())
    plain = unfiltered(setup.sampling)
    figures: dict[str, float] = {}
    findings: list[Finding] = []
    unchecked: list[str] = []
    if not len(reported):
        unchecked.append("sampler/*: the engine reports no log-probabilities")
    else:
        gap = reported.sample_logp - reported.logp(plain)
        figures = {"gap_max": largest(gap), "gap_mean": float(gap.abs().mean()), "kl_sampler": float(gap.mean())}
        if not reports_close(setup, gap, thresholds):
            findings.append(_reported(setup, reported, gap, thresholds))
            setup.shared["reported"] = findings[-1].code
    if setup.sampling.filtered:
        findings += _after_filters(setup, drawn, thresholds)
    repeated = [*noise_findings(setup, thresholds)]
    findings += repeated
    more = _sample_more(setup, thresholds)
    ends = setup.policy.eos_ids
    chance, others, odds = _draw_statistics(more, setup.sampling, ends)
    doubt, alarm = thresholds["sampler_doubt"], thresholds["sampler_draws"]
    if chance < doubt or odds > -math.log(doubt):  # a doubt: decide on other draws, and more of them
        more = _sample_more(setup, thresholds, rounds=_FURTHER)
        chance, others, odds = _draw_statistics(more, setup.sampling, ends)
    figures |= {"draws": float(len(more)), "draws_chance": chance, "other_odds": odds}
    if any(finding.severity == "error" for finding in repeated):
        unchecked.append("sampler/filter: draws that repeat each other tell nothing of their distribution")
    elif setup.shared.get("chosen actions"):
        unchecked.append("sampler/filter: actions are only a part of what was drawn, or more than that (see mask/*)")
    elif chance < alarm or odds > -math.log(alarm):
        findings.append(_drawn(more, setup, chance, others, odds, thresholds))
    elif setup.sampling.filtered:
        findings.append(_configured(setup, more, thresholds))
    lines = (
        f"sampler: {len(reported)} log-probabilities within {figures.get('gap_max', 0.0):.2g} nats of the policy's; "
        f"{len(more)} drawn tokens are the policy's with chance {chance:.2g}",
    )
    return ProbeResult("sampler", _one_per_code(findings), figures, lines, tuple(unchecked))


def _one_per_code(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """What is reported and what is drawn often have one cause: it is named once."""
    return tuple({finding.code: finding for finding in reversed(findings)}.values())[::-1]


def _draw_statistics(
    more: Draws, sampling: SamplingParams, ends: Iterable[int]
) -> tuple[float, list[Alternative], float]:
    """The chance of these draws under the policy; other ways to draw, and the evidence for any of them in nats."""
    chance = uniform_p_value(tail_masses(more, sampling))
    if sampling.filtered:  # beyond the configured filters; a token that they rule out is the chance's matter
        inside = more.logp(sampling).isfinite()
        more, sampling = replace(more, logits=more.distribution(sampling)).where(inside), SamplingParams()
    others, odds = alternatives(more, sampling, ends)
    both = torch.tensor([odds, filter_odds(more, sampling)], dtype=torch.float64)
    return chance, others, float(both.logsumexp(0)) - math.log(2)


def _sample_more(setup: ProbeSetup, thresholds: Thresholds, rounds: range = range(6)) -> Draws:
    """Enough tokens beside the batch's own to tell two distributions apart; other rounds draw other ones."""
    groups: list[Group] = []
    excluded = foreign(setup, thresholds)
    target = _TARGET_TOKENS * (1 if rounds.start == 0 else _TIMES)
    length = max(1, int(setup.mask.sum()) // len(setup.mask))
    count = min(64, max(8, -(-_TARGET_TOKENS // (4 * length))))
    wide = replace(setup.sampling, num_generations=count)
    total = 0
    for number in rounds:
        step = NOISE_STEP + number
        problems = setup.run.task.sample(4, seed=setup.config.run.seed, step=step)
        groups += setup.collect(problems, step=step, sampling=wide)
        total = sum(sum(c.action) for group in groups for c in group.completions)
        if total >= target:
            break
    fresh = draws(setup, groups)
    if not bool(excluded.any()):
        return fresh
    excluded_tokens = set(batch_draws(setup).tokens[excluded].tolist())  # leave out what looks like the foreign text
    return fresh.where(torch.tensor([int(t) not in excluded_tokens for t in fresh.tokens], device=fresh.tokens.device))


def _reported(setup: ProbeSetup, reported: Draws, gap: Tensor, thresholds: Thresholds) -> Finding:
    """Recompute the reported log-probabilities under each hypothesis; the first that closes the gap is the cause."""
    plain = unfiltered(setup.sampling)
    size = (
        f"the engine's log-probabilities are off by up to {largest(gap):.3g} nats ({float(gap.abs().mean()):.3g} mean)"
    )
    limit = max(0.02 * float(gap.abs().mean()), 1e-4)

    def residual(params: SamplingParams) -> float:
        return float((reported.sample_logp - reported.logp(params)).abs().nan_to_num(torch.inf).mean())

    for temperature in (1.0, best_temperature(plain, residual)):
        if residual(replace(plain, temperature=temperature)) <= limit:
            return finding(
                "sampler/temperature",
                f"{size}; it closes at temperature {temperature:.3g}, rollout.temperature is {plain.temperature:g}",
                "the engine reports log-probabilities that are not at the sampling temperature",
                "let the engine return log_softmax(logits / temperature) of the drawn token (vLLM: "
                "logprobs_mode=processed_logprobs)",
            )
    for name, params in filters(setup.sampling):
        if residual(params) <= limit:
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
    if len(reported) == len(setup.mask[setup.mask]) and _after_shorter(setup, reported, limit):
        return finding(
            "sampler/mismatch",
            f"{size}; the gap closes when each prompt loses its first token",
            "the engine shortens or shifts the prompt: it continues another text than the trainer scores",
            "give the engine Request.tokens as they are, never decoded and encoded again, with nothing cut off",
        )
    rounded = (bf16_scores(setup) - setup.forward_logp())[setup.mask]
    rounding = float(rounded.abs().mean())
    alike = rounding_explains(gap, rounded, thresholds) if len(gap) == len(rounded) else None
    if alike or (alike is None and float(gap.abs().mean()) <= thresholds["precision_times"] * rounding):
        kl = float((gap.exp() - 1 - gap).mean())
        worth = kl > thresholds["sampler_kl_warning"]
        return finding(
            "sampler/precision",
            f"{size}, KL about {kl:.2g} nats per token; bfloat16 alone gives a gap of {rounding:.3g} on average",
            "sampler and trainer run the same weights in different precision or kernels",
            "run the engine in the trainer's type, or keep loss.mismatch on",
            severity="warning" if worth else "note",
        )
    held_in = _held_in(setup, reported, gap) if len(gap) == len(rounded) else None
    if held_in is not None:
        return finding(
            "sampler/precision",
            f"{size}; {held_in}",
            "the engine holds the weights in a narrower type than the trainer",
            "let the engine hold the trainer's type (no quantization), or keep loss.mismatch on",
            severity="error" if float(gap.abs().mean()) > thresholds["precision_error"] else "warning",
        )
    return finding(
        "sampler/mismatch",
        size + (_pattern(reported, plain) or _where(setup, reported, gap, thresholds)),
        "what the engine reports is not the policy's log-probability of the drawn token: neither temperature, filters "
        "nor precision explains it",
        "check the engine's log-probabilities (natural logarithm, the drawn token's own, not shifted, the "
        "trainer's weights)",
    )


def _after_filters(setup: ProbeSetup, drawn: Draws, thresholds: Thresholds) -> list[Finding]:
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


def _held_in(setup: ProbeSetup, reported: Draws, gap: Tensor) -> str | None:
    """The type of weights that takes most of the gap away, as text."""
    size = float(gap.abs().mean())
    left = {}
    for name, rounded in rounded_weights().items():
        scored = quantized_scores(setup, rounded)[setup.mask].double()
        left[name] = float((reported.sample_logp - scored).abs().mean())
    best = min(left, key=left.__getitem__)
    if left[best] > _EXPLAINED_SHARE * size:
        return None
    return f"weights held in {best} leave {left[best]:.2g} of {size:.2g} nats"


def _where(setup: ProbeSetup, reported: Draws, gap: Tensor, thresholds: Thresholds) -> str:
    """On which tokens the gap lies, where it is not on all of them: from a place on, or at one token."""
    assert reported.position is not None
    limit = thresholds["scoring_gap_half" if in_half_precision(setup) else "scoring_gap"]
    off = gap.abs().nan_to_num(torch.inf) > limit
    lengths = torch.tensor(reported.prompts, device=off.device)[reported.row]
    for where, places in (("the text", lengths + reported.position), ("the completion", reported.position)):
        first = int(places[off].min())
        before, after = places < first, places >= first
        if int(before.sum()) >= _FEW and float(off[after].double().mean()) > 0.5:
            return (
                f"; it begins at token {first + 1} of {where}, the {int(before.sum())} before it are right: a cache or "
                "positions that fail from there on"
            )
    tokens = reported.tokens[off].unique()
    if len(tokens) <= 2 and bool(off[torch.isin(reported.tokens, tokens)].all()) and not bool(off.all()):
        return f"; all of it at {', '.join(repr(setup.policy.tokenizer.decode([t])) for t in tokens.tolist())}"
    share = float(off.double().mean())
    return f"; {100 * share:.0f} % of the tokens are off, the others are right" if share < 0.9 else ""


def _pattern(reported: Draws, plain: SamplingParams) -> str:
    """What the reported numbers look like, as text."""
    true = reported.logp(plain)
    if bool((reported.sample_logp == 0).all()):
        return "; all of them are 0"
    factor = float((reported.sample_logp * true).sum() / true.square().sum().clamp_min(1e-12))
    off = float((reported.sample_logp - factor * true).abs().mean())
    if abs(factor - 1) > 0.01 and off <= 0.01 * float(true.abs().mean()):
        return f"; they are {factor:.3g} times the right ones"
    for shift, where in ((1, "next"), (-1, "previous")):
        neighbour = true.roll(-shift)
        same = reported.row == reported.row.roll(-shift)
        if bool(same.any()) and float((reported.sample_logp - neighbour)[same].abs().mean()) <= 1e-3:
            return f"; they are those of the {where} token"
    return ""


def _after_shorter(setup: ProbeSetup, reported: Draws, limit: float) -> bool:
    """Whether what was reported is the policy's after prompts without their first token."""
    shorter = setup.forward_logp(without_first(setup.groups))[setup.mask].double()
    return float((reported.sample_logp - shorter).abs().mean()) <= limit


@dataclass(frozen=True)
class _Explanation:
    """A way to draw that was tried: how likely it makes the tokens, and with what chance they are its own."""

    code: str
    name: str
    cause: str
    logp: float  # of all tokens, in nats
    chance: float
    drawn: Draws
    params: SamplingParams

    def explains(self, thresholds: Thresholds, ends: Iterable[int]) -> bool:
        """Whether the tokens let it stand, and so leave nothing for another way to draw."""
        if self.chance <= thresholds["sampler_explained"]:
            return False
        left = replace(self.drawn, logits=self.drawn.distribution(self.params))
        return alternatives(left, SamplingParams(), ends)[1] < -math.log(thresholds["sampler_explained"])


def _explanation(code: str, name: str, cause: str, drawn: Draws, params: SamplingParams, free: int = 1) -> _Explanation:
    """One explanation; a parameter that is `free` beyond the first has to be worth its price."""
    logp = -_unlikelihood(drawn, params) - _PRICE * (free - 1)
    return _Explanation(code, name, cause, logp, uniform_p_value(tail_masses(drawn, params)), drawn, params)


def _explanations(more: Draws, sampling: SamplingParams, others: Sequence[Alternative]) -> Iterator[_Explanation]:
    plain = unfiltered(sampling)
    told = "the engine samples otherwise than it is told, so that the samples are not the policy's"
    fitted = best_temperature(plain, lambda params: _unlikelihood(more, params))
    warm = replace(plain, temperature=fitted)
    yield _explanation("sampler/temperature", f"temperature {fitted:.3g}", told, more, warm)
    for name, params in (*filters(plain), *tightest(more, plain)):
        yield _explanation("sampler/filter", name, told, more, params)
    for temperature in _TEMPERATURES:
        for name, params in tightest(more, replace(plain, temperature=temperature)):
            both = f"temperature {temperature:g} with {name}"
            yield _explanation("sampler/filter", both, told, more, params, free=2)
    kinds = {other.name.partition(" of ")[0].partition(" (")[0]: other for other in reversed(others)}
    likely = sorted(kinds.values(), key=lambda other: -other.gain)[:_OTHERS]
    for other in (fitted_alternative(more, other, plain) for other in likely):
        yield _explanation("sampler/filter", other.name, other.cause, applied(more, other, plain), plain)


def _drawn(
    more: Draws, setup: ProbeSetup, chance: float, others: Sequence[Alternative], odds: float, thresholds: Thresholds
) -> Finding:
    """Which distribution the tokens were drawn from: the likeliest of those that the tokens do not rule out."""
    sampling = setup.sampling
    size = f"{len(more)} drawn tokens come from the policy's distribution with chance {chance:.1g}"
    if chance >= thresholds["sampler_draws"]:
        size = f"{len(more)} drawn tokens are e^{odds:.3g} times likelier under other ways to draw"
    small = more.where(torch.arange(len(more), device=more.tokens.device) < min(_TRIED, _ELEMENTS // setup.vocabulary))
    tried = sorted(_explanations(small, sampling, others), key=lambda entry: -entry.logp)
    better = (entry for entry in tried if entry.logp > -_unlikelihood(small, sampling))
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
    nearest = "; ".join(f"{entry.name}: chance {entry.chance:.1g}" for entry in _one_a_kind(tried)[:3])
    return finding(
        "sampler/mismatch",
        f"{size}; nothing that was tried explains them ({nearest}){_begins(more, sampling, thresholds)}",
        "the engine does not sample from this policy: other weights, another prompt, or its own way of drawing",
        "check the engine's weights and the tokens it is given (Request.tokens, never encoded again)",
    )


def _one_a_kind(tried: Sequence[_Explanation]) -> list[_Explanation]:
    """The best of each kind, by the first words of its name."""
    return list({entry.name.split()[0]: entry for entry in reversed(tried)}.values())[::-1]


def _begins(more: Draws, sampling: SamplingParams, thresholds: Thresholds) -> str:
    """From which token of a completion, or of the text, the draws are not the policy's, as text."""
    if more.position is None:
        return ""
    masses = tail_masses(more, sampling)
    lengths = torch.tensor(more.prompts, device=more.position.device)[more.row]
    for where, places in (("the completion", more.position), ("the text", lengths + more.position)):
        for edge in places.unique().tolist():
            before = masses[places < edge]
            if len(before) < _FEW:
                continue
            if uniform_p_value(before) < thresholds["sampler_doubt"]:
                break
            if uniform_p_value(masses[places == edge]) < thresholds["sampler_explained"] / len(places.unique()):
                return f"; it begins at token {int(edge) + 1} of {where}, and the {len(before)} before it are sound"
    return ""


def _unlikelihood(drawn: Draws, params: SamplingParams) -> float:
    return -float(drawn.logp(params).nan_to_num(neginf=-1e9).sum())


def _configured(setup: ProbeSetup, more: Draws, thresholds: Thresholds) -> Finding:
    """Filters that the configuration itself asks for: the samples are not the policy's own."""
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
