"""The sampler against the trainer, from the log: a growing gap means stale weights, a constant one another cause."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from keel.doctor.advice import either, setting
from keel.doctor.checks.base import RECENT, CheckResults, Level, Log, Missing, check, joined, levels, not_shown, percent
from keel.doctor.findings import Advice, Finding, Severity, finding
from keel.doctor.history import LARGEST, Series
from keel.doctor.thresholds import Thresholds

KL = "KL(sampler‖policy)"
COMPARE = "compare the log-probabilities of sampler and trainer for one completion, token by token"
IMPOSSIBLE = 15.0  # nats; changing a usual temperature changes a sampled token's log-probability by less
AGES = ("staleness/mean", "other/off_policy/mean")
DEPTH = "kl/sampler_policy/depth_"  # metric prefix, followed by the first token of a stretch
SIGMAS = 4.0  # standard errors between the deepest stretch and the first


@dataclass(frozen=True)
class _Gap:
    """A measure of the distance between sampler and policy, with its limits."""

    name: str
    unit: str
    series: Series
    warning: float
    error: float


# The name, unit and conversion to KL of each gap metric. Probabilities have other limits.
GAPS: dict[str, tuple[str, str, Callable[[float], float]]] = {
    "kl/sampler_policy/k3/mean": (KL, " nats per token", abs),
    # log-probability gaps are heavy-tailed: for a Laplace distribution the mean square is twice the squared mean
    "logp/sampler_gap_mean": (f"{KL}, from the mean gap,", " nats per token", lambda gap: gap * gap),
    "sampler/multiplicative_error": (
        f"{KL}, from the mean of exp |gap|,",
        " nats per token",
        lambda ratio: math.log(max(1.0, ratio)) ** 2,
    ),
    "kl/sampler_policy/k1/mean": (f"{KL} (k1)", " nats per token", abs),
    "kl/policy_sampler/k3/mean": ("KL(policy‖sampler)", " nats per token", abs),
    # for nearby distributions, JS is a quarter of the KL
    "sampler/js_divergence": (f"{KL}, from Jensen and Shannon's,", " nats per token", lambda js: 4 * js),
    "sampler/probability_gap_mean": ("the mean difference of sampled tokens' probabilities", "", abs),
}


def _largest_gap(log: Log) -> _Gap | None:
    """The recorded gap that exceeds its limit most. Overflowing values become LARGEST."""
    gaps = [
        _Gap(
            name,
            unit,
            series.finite.mapped(lambda value, size=size: min(size(value), LARGEST)),  # type: ignore[misc]
            *(log.limits[f"sampler_{'kl' if unit else 'probability'}_{grade}"] for grade in ("warning", "error")),
        )
        for metric, (name, unit, size) in GAPS.items()
        if (series := log.get(metric)) is not None
    ]
    return max(gaps, key=lambda gap: gap.series.tail(RECENT).mean / gap.warning, default=None)


@check("sampler/stale", "sampler/temperature", "sampler/filter", "sampler/precision")
def sampler(log: Log) -> CheckResults:
    """KL(sampler‖policy) or the log-probability gap: its current size, and its growth since the first step.

    Before the first update, an engine that never syncs still has the trainer's weights. A gap at step 1 therefore has
    another cause than stale weights, while a later one may be due to them. The first step is not averaged with later
    ones, which may include drift.
    """
    size, gap = _largest_gap(log), log.get("logp/sampler_gap_max")
    if size is None:
        if gap is None:
            raise not_shown("the sampler's log-probabilities beside the trainer's")
        raise Missing("only the largest gap of a token was recorded, and one rare token can decide it")
    first, now = size.series.head(1), size.series.tail(RECENT)
    growth, rounding = log.limits["sampler_gap_growth"], log.limits["sampler_rounding"]
    grew = len(size.series) > 1 and now.mean > growth * max(first.mean, rounding)
    # the ratio is near 1 for an engine that never syncs
    moved = log.kl[1].tail(RECENT).mean if log.kl is not None and size.name == KL else 0.0
    behind = now.mean / moved if moved > 0 else 0.0
    age = max((series.mean for name in AGES if (series := log.get(name)) is not None), default=0.0)
    ahead = log.figure("rollout.max_staleness") or age
    never_synced = grew and not ahead and behind > log.limits["sampler_never_synced"]
    if now.mean <= size.warning and not never_synced:
        return
    evidence = joined(
        f"{size.name} is {now.mean:.3g}{size.unit} over {now.span} and was {first.mean:.3g} over {first.span}",
        f"the largest gap of a token is {gap.top()[1]:.3g} nats (step {gap.top()[0]})" if gap is not None else None,
        f"it is {percent(behind)} of KL(policy‖reference)" if never_synced else None,
    )
    severity: Severity | None = "error" if now.mean > size.error else "warning"
    usual = sorted(size.series.finite.values)[len(size.series.finite) // 10]
    largest = min(gap.tail(RECENT).finite.values, default=0.0) if gap is not None else 0.0
    heat = log.figure("rollout.temperature") or 1.0
    advice: Advice | str = COMPARE
    since = (
        "the gap exists from the first step, so stale weights are not the cause"
        if first.steps[0] <= 1
        else f"the gap exists since the log begins, at step {first.steps[0]:.0f}, so stale weights may be the cause"
    )
    code = "sampler/mismatch"
    if ahead and (grew or age > log.limits["sample_age"]):
        code, severity = "sampler/too-old", None
        cause = (
            f"samples may be {ahead:.3g} steps old, and the policy moves too far in them for importance weights to "
            "correct"
        )
        fresher = {"rollout.max_staleness": int(ahead) - 1} if log.source == "keel" else {}
        advice = either(setting("set {}", fresher), log.rate(0.5, "half of"))
    elif grew:
        code, severity = "sampler/stale", None
        cause = "the gap grows as the policy moves: the sampler has old weights"
        advice = (
            "sync the engine after every update, adapters included; keel doctor on the configuration shows whether a "
            "sync changes its weights"
        )
    elif now.mean > growth**2 * max(usual, rounding):
        evidence += f"; at one step in ten it is {usual:.2g} or less"
        cause = (
            "the gap is not constant, so neither precision nor an option is the cause: some of the engine's workers "
            "have other weights, or some requests go to another model"
        )
        advice = "compare the weights of all workers after a sync, and find the requests of a step that are wrong"
    elif largest > IMPOSSIBLE * max(heat, 1 / heat):
        cause = (
            f"{since}: at each of the last steps one token's log-probabilities differ by {largest:.3g} nats or more, "
            "which neither temperature nor rounding explains; possible causes are other tokens, prompts that were cut "
            "or shifted, or another choice of experts"
        )
    else:
        code, cause = _constant_cause(log, large=now.mean > size.error)
        cause, off = f"{since}; likely: {cause}", log.source == "keel" and log.option("loss.mismatch.kind") == "none"
        advice = either(
            log.unfiltered,
            "take log-probabilities at the sampling temperature and before any filter, in the trainer's precision",
            setting("{} limits the effect of the rest", {"loss.mismatch.kind": "truncate"} if off else {}),
            joined="; ",
        )
    yield finding(code, evidence, cause, advice, severity, guess=code == "sampler/temperature")


def _constant_cause(log: Log, *, large: bool) -> tuple[str, str]:
    """The most likely of several causes that a log cannot distinguish, by the options."""
    top_p, top_k, min_p = (log.figure(f"rollout.{name}") for name in ("top_p", "top_k", "min_p"))
    if (top_p or 1) < 1 or (top_k or 0) > 0 or (min_p or 0) > 0:
        return "sampler/filter", f"top_p={top_p}, top_k={top_k}, min_p={min_p} change the sampler's probabilities"
    temperature = log.figure("rollout.temperature")
    if temperature is not None and temperature != 1:
        return "sampler/temperature", f"temperature {temperature:g} may be applied in only one of sampler and trainer"
    if large:
        return "sampler/mismatch", (
            "the gap is too large for rounding; another temperature or filter, other weights, another tokenizer, or "
            "probabilities of other tokens can cause it"
        )
    return "sampler/precision", "sampler and trainer differ in precision or kernels, or in temperature or filters"


def _from_one(ratio: float) -> float:
    return abs(ratio - 1)


def _explained(log: Log) -> bool:
    """Whether the check of the log-probability gap already reports it."""
    return any(isinstance(result, Finding) for result in sampler(log))


Weight = tuple[str, Callable[[float], float], bool, str]
FEW: Weight = (
    "mismatch_ess",
    float,
    True,
    "the effective sample size of the importance weights is {share} of the samples",
)
WEIGHTS: dict[str, Weight] = {  # metrics of importance weights: their limits and texts
    "mismatch/ess": FEW,
    "ratio/ess": FEW,
    "sampler/correlation": (
        "sampler_correlation",
        float,
        True,
        "the probabilities of sampler and trainer correlate by only {mean}",
    ),
    "ratio/sampler_mean": ("sampler_ratio", _from_one, False, "the mean importance weight differs from 1 by {mean}"),
    "mismatch/rejected_fraction": (
        "sampler_rejected",
        float,
        False,
        "{share} of the tokens are left out because of their importance weight",
    ),
}
levels(
    "sampler",
    *(
        Level(
            "sampler/mismatch",
            metric,
            limit,
            evidence,
            "sampler and trainer differ in weights, precision, temperature, filters, or tokens",
            COMPARE,
            below=below,
            severity="warning",
            of=of,
            unless=_explained,
        )
        for metric, (limit, of, below, evidence) in WEIGHTS.items()
    ),
    Level(
        "sampler/unreported",
        "mismatch/unreported_fraction",
        0.0,
        "the engine reported no log-probability for {share} of the sampled tokens",
        "without the sampler's log-probabilities its difference from the policy is neither measured nor corrected",
        "let the engine return sample_logp (and filtered_logp under filters) for every token it samples",
    ),
    Level(
        "sampler/filter",
        "rollout/kept_mass/mean",
        "filtered_mass",
        "filters remove {share} of the probability over {span}",
        "tokens that the filters remove are never sampled: a mean at a state is biased by at most that share of its "
        "largest value",
        lambda log: log.unfiltered,
        severity="warning",
        of=lambda kept: 1 - kept,
    ),
)


@check()
def depth(log: Log) -> CheckResults:
    """KL(sampler‖policy) of the last steps, by position in the context."""
    stretches: dict[int, tuple[float, float]] = {}
    for name in log.series:
        if match := re.fullmatch(rf"{DEPTH}(\d+)/mean", name):
            se = log.get(f"{DEPTH}{match[1]}/se")
            if se is not None and log.get(name) is not None:
                steps = min(RECENT, len(se))  # each step is an independent sample
                stretches[int(match[1])] = log.now(name), se.tail(RECENT).mean / max(1, steps) ** 0.5
    if (found := growing(stretches, log.limits)) is not None:
        yield found


def growing(stretches: Mapping[int, tuple[float, float]], thresholds: Thresholds) -> Finding | None:
    """The finding if the KL at the deepest positions is far above the first, from `{start: (mean, standard error)}`."""
    if len(stretches) < 2:
        return None
    first, deepest = min(stretches), max(stretches)
    (near, near_se), (far, far_se) = stretches[first], stretches[deepest]
    apart = far - near > SIGMAS * (near_se**2 + far_se**2) ** 0.5
    grows = far > thresholds["sampler_gap_growth"] * max(near, thresholds["sampler_rounding"])
    if not (apart and grows and far > thresholds["sampler_depth_kl"]):
        return None
    rows = ", ".join(f"from token {start} on {mean:.2g}" for start, (mean, _) in sorted(stretches.items()))
    return finding(
        "sampler/depth",
        f"KL(sampler‖policy) in nats per token: {rows}",
        "the gap grows with the depth of the context: sampler and trainer use different positions, or the sampler's KV "
        "cache loses precision",
        "compare rotary scaling, context length and positions of padded prompts on both sides (rope_scaling, "
        "rope_theta, max_model_len), and sample with kv_cache_dtype=auto",
    )
