"""The sampler against the trainer, as far as a log can tell: a gap that grows is stale weights, another is not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from keel.doctor.advice import either, setting, times, unfiltered
from keel.doctor.checks.base import RECENT, CheckResults, Unchecked, not_recorded
from keel.doctor.findings import Advice, Severity, finding
from keel.doctor.history import LARGEST, History, Series
from keel.doctor.thresholds import Thresholds


def sampler(history: History, thresholds: Thresholds) -> CheckResults:
    """KL(sampler‖policy) or the log-probability gap: its size now, and against the first step.

    Before the first update even an engine that is never synced has the trainer's weights, so what is there at step 1 is
    no stale weight, and what came later and was not there may be. A mean over the first steps would hold drift already.
    """
    codes = ("sampler/stale", "sampler/temperature", "sampler/filter", "sampler/precision")
    gaps, gap = _gaps(history, thresholds), history.get("logp/sampler_gap_max")
    if not gaps:
        yield from _few_samples(history, thresholds)
    if not gaps and gap is None:
        for code in codes:
            yield not_recorded(code, "the sampler's log-probabilities beside the trainer's")
        return
    if not gaps:
        for code in codes:
            yield Unchecked(code, "only the largest gap of a token was recorded, which one rare token decides")
        return
    size = max(gaps, key=lambda gap: gap.series.tail(RECENT).mean / gap.warning)
    first, now = size.series.head(1), size.series.tail(RECENT)
    grew = len(size.series) > 1 and now.mean > thresholds["sampler_gap_growth"] * max(
        first.mean, thresholds["sampler_rounding"]
    )
    behind = _left_behind(history, now) if size.name == KL else None
    ahead = history.figure("rollout.max_staleness") or _policy_age(history)
    never_synced = grew and not ahead and behind is not None and behind > thresholds["sampler_never_synced"]
    if now.mean <= size.warning and not never_synced:
        yield from _few_samples(history, thresholds)
        return
    worst = f"; the largest gap of a token is {gap.top()[1]:.3g} nats (step {gap.top()[0]})" if gap is not None else ""
    evidence = (
        f"{size.name} is {now.mean:.3g}{size.unit} over {now.span} and was {first.mean:.3g} over "
        f"{first.span}{worst}"
        + (f"; it is {100 * behind:.0f} % of what the policy has moved" if never_synced and behind is not None else "")
    )
    if ahead and (grew or _policy_age(history) > thresholds["sample_age"]):
        yield finding(
            "sampler/too-old",
            evidence,
            f"samples may be {ahead:.3g} steps old, and in these the policy moves further than weights can repair",
            either(
                setting("set {}", {"rollout.max_staleness": int(ahead) - 1} if history.source == "keel" else {}),
                times(history.config, "optim.learning_rate", 0.5, "half of", history.source),
            ),
        )
        return
    if grew:
        yield finding(
            "sampler/stale",
            evidence,
            "the gap grows as the policy moves: the sampler keeps weights that the trainer has left",
            "sync the engine after every update, adapters included; keel doctor on the configuration shows whether a "
            "sync reaches it",
        )
        return
    severity: Severity = "error" if now.mean > size.error else "warning"
    since = (
        "the gap is there from the first step, so it is not the weights"
        if first.steps[0] <= 1
        else f"the gap is there since the log begins, at step {first.steps[0]:.0f}; if not stale weights, it is"
    )
    usual = sorted(size.series.finite.values)[len(size.series.finite) // 10]
    if now.mean > thresholds["sampler_gap_growth"] ** 2 * max(usual, thresholds["sampler_rounding"]):
        yield finding(
            "sampler/mismatch",
            f"{evidence}; at one step in ten or more it is {usual:.2g} or less",
            "the gap comes and goes, so that it is neither precision nor an option: some of the engine's workers have "
            "other weights, or some requests go elsewhere",
            "compare the weights of all workers after a sync; see which requests of a step are off",
            severity=severity,
        )
        return
    if impossible := _impossible(history):
        yield finding(
            "sampler/mismatch",
            evidence,
            f"{since}: at every one of the last steps a token that one side drew is {impossible:.3g} nats or more less "
            "likely to the other, which neither temperature nor rounding does: other tokens, prompts that were cut or "
            "shifted, or experts that are chosen otherwise",
            "compare the log-probabilities of one completion, token by token, from both",
            severity=severity,
        )
        return
    code, cause = _constant_cause(history, large=now.mean > size.error)
    yield finding(
        code,
        evidence,
        f"{since}: {cause}",
        either(
            setting("set {}", unfiltered(history.config, history.source)),
            "take log-probabilities at the sampling temperature and before any filter, in the trainer's precision",
            _weighed(history),
            joined="; ",
        ),
        guess=code == "sampler/temperature",
        severity=severity,
    )


KL = "KL(sampler‖policy)"
IMPOSSIBLE = 15.0  # nats by which no usual temperature moves a token that was drawn
AGES = ("staleness/mean", "other/off_policy/mean")


@dataclass(frozen=True)
class _Gap:
    """A measure of the distance between sampler and policy, with the limits that it has."""

    name: str
    unit: str
    series: Series
    warning: float
    error: float


def _gaps(history: History, thresholds: Thresholds) -> list[_Gap]:
    """All that was recorded, each in a unit that has a limit; what overflows in its unit is the largest number."""
    limits = thresholds["sampler_kl_warning"], thresholds["sampler_kl_error"]
    probability = thresholds["sampler_probability_warning"], thresholds["sampler_probability_error"]
    ways: list[tuple[str, str, str, Callable[[float], float], tuple[float, float]]] = [
        ("kl/sampler_policy/k3/mean", KL, " nats per token", abs, limits),
        # differences of log-probabilities are heavy-tailed: of Laplace's, the mean square is twice the squared mean
        ("logp/sampler_gap_mean", f"{KL}, from the mean gap,", " nats per token", lambda gap: gap * gap, limits),
        (
            "sampler/multiplicative_error",
            f"{KL}, from the mean of exp |gap|,",
            " nats per token",
            lambda ratio: math.log(max(1.0, ratio)) ** 2,
            limits,
        ),
        ("kl/sampler_policy/k1/mean", f"{KL} (k1)", " nats per token", abs, limits),
        ("kl/policy_sampler/k3/mean", "KL(policy‖sampler)", " nats per token", abs, limits),
        # of two distributions that are near each other it is a quarter of their KL
        ("sampler/js_divergence", f"{KL}, from Jensen and Shannon's,", " nats per token", lambda js: 4 * js, limits),
        ("sampler/probability_gap_mean", "the mean difference of sampled tokens' probabilities", "", abs, probability),
    ]
    return [
        _Gap(name, unit, Series.of((s, min(size(v), LARGEST)) for s, v in zip(*_points(series), strict=True)), *limit)
        for metric, name, unit, size, limit in ways
        if (series := history.get(metric)) is not None
    ]


def _points(series: Series) -> tuple[tuple[float, ...], tuple[float, ...]]:
    return series.finite.steps, series.finite.values


def _policy_age(history: History) -> float:
    """Steps that samples are old on average, where the log says so."""
    ages = [series.mean for name in AGES if (series := history.get(name)) is not None]
    return max(ages, default=0.0)


def _few_samples(history: History, thresholds: Thresholds) -> CheckResults:
    """Importance weights of which few count, or probabilities that do not go together."""

    def now(name: str, sound: float) -> float:
        series = history.get(name)
        return series.finite.tail(RECENT).mean if series is not None else sound

    ess, together = now("mismatch/ess", now("ratio/ess", 1.0)), now("sampler/correlation", 1.0)
    ratio, rejected = now("ratio/sampler_mean", 1.0), now("mismatch/rejected_fraction", 0.0)
    if ess < thresholds["mismatch_ess"]:
        figure = f"the effective sample size of the importance weights is {100 * ess:.0f} % of the samples"
    elif together < thresholds["sampler_correlation"]:
        figure = f"sampler's and trainer's probabilities correlate by {together:.3g} only"
    elif abs(ratio - 1) > thresholds["sampler_ratio"]:
        figure = f"the importance weights of policy over sampler have a mean of {ratio:.3g}, where 1 is right"
    elif rejected > thresholds["sampler_rejected"]:
        figure = f"{100 * rejected:.0f} % of what was sampled is left out for its importance weight"
    else:
        return
    yield finding(
        "sampler/mismatch",
        figure,
        "sampler and trainer disagree on what was sampled: weights, precision, temperature, filters, or the tokens",
        "compare the log-probabilities of one completion, token by token, from both",
        severity="warning",
    )


def _weighed(history: History) -> Advice:
    """The correction by truncated weights, where it is not on: it holds what remains."""
    off = history.source == "keel" and history.option("loss.mismatch.kind") == "none"
    return setting("{} holds what remains", {"loss.mismatch.kind": "truncate"} if off else {})


def _left_behind(history: History, gap: Series) -> float | None:
    """KL(sampler‖policy) over KL(policy‖reference) of the same steps: near 1 for an engine that was never synced."""
    if history.kl is None:
        return None
    moved = history.kl[1].tail(RECENT).mean
    return gap.mean / moved if moved > 0 else None


def _impossible(history: History) -> float:
    """The least of the last steps' largest gaps of a token, where no usual temperature makes one; else 0."""
    gap, heat = history.get("logp/sampler_gap_max"), history.figure("rollout.temperature") or 1.0
    largest = gap.tail(RECENT).finite.values if gap is not None else ()
    return least if (least := min(largest, default=0.0)) > IMPOSSIBLE * max(heat, 1 / heat) else 0.0


def _constant_cause(history: History, *, large: bool) -> tuple[str, str]:
    """The likeliest of the causes that a log cannot tell apart, by the options."""
    top_p, top_k, min_p = (history.figure(f"rollout.{name}") for name in ("top_p", "top_k", "min_p"))
    if (top_p or 1) < 1 or (top_k or 0) > 0 or (min_p or 0) > 0:
        return "sampler/filter", f"top_p={top_p}, top_k={top_k}, min_p={min_p} change the sampler's probabilities"
    temperature = history.figure("rollout.temperature")
    if temperature is not None and temperature != 1:
        return "sampler/temperature", f"temperature {temperature:g} may be applied on one side only"
    if large:
        return "sampler/mismatch", (
            "rounding is no explanation at that size; another temperature or filter, other weights or another "
            "tokenizer, or probabilities of other tokens are"
        )
    return "sampler/precision", "another precision, other kernels, or another temperature or filter"


def reported(history: History, thresholds: Thresholds) -> CheckResults:
    """Tokens whose log-probability the engine did not report: their mismatch is neither measured nor corrected."""
    share = history.get("mismatch/unreported_fraction")
    if share is not None and share.tail(RECENT).mean > 0:
        yield finding(
            "sampler/unreported",
            f"for {100 * share.tail(RECENT).mean:.3g} % of the sampled tokens no log-probability was reported",
            "without the sampler's own numbers a difference from the policy is neither seen nor weighed",
            "let the engine return sample_logp (and filtered_logp under filters) for every token it samples",
        )


def filtered(history: History, thresholds: Thresholds) -> CheckResults:
    """The probability that configured filters cut off, which bounds the bias of every mean."""
    mass = history.get("rollout/kept_mass/mean")
    if mass is None:
        return
    cut = 1 - mass.tail(RECENT).mean
    if cut > thresholds["filtered_mass"]:
        yield finding(
            "sampler/filter",
            f"filters cut off {100 * cut:.3g} % of the probability over {mass.tail(RECENT).span}",
            "what the policy does outside of the kept support is never seen: a mean at a state is biased by at most "
            "that share of its largest value",
            setting("set {}", unfiltered(history.config, history.source)),
            severity="warning",
        )


CHECKS = (sampler, reported, filtered)
