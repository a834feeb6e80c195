"""Exploration: sampling options that leave none or only noise, an entropy that is gone or rises."""

from __future__ import annotations

import math

from keel.doctor.advice import either, setting, unfiltered
from keel.doctor.checks.base import (
    RECENT,
    SMALL_VOCABULARY,
    CheckResults,
    Log,
    Missing,
    check,
    joined,
    not_shown,
    percent,
)
from keel.doctor.findings import finding
from keel.doctor.shapes import LEAST, course, median, trend

BONUS = {"loss.entropy_coef": 0.001}


@check("rollout/temperature")
def cold(log: Log) -> CheckResults:
    """Groups of copies, and sampling options or an entropy from the first step on that make them."""
    equal, entropy = log.equal_groups, log.get("entropy/mean")
    if equal is None and entropy is None:
        raise not_shown("the entropy or the share of groups without spread")
    share = equal.mean if equal is not None else math.nan
    start = entropy.finite.head(RECENT) if entropy is not None else None
    first, greedy = median(start) if start is not None else math.nan, _greedy(log)
    copies = share > log.limits["same_groups"] or (equal is None and first < log.limits["entropy_rise_least"])
    sharp = start is not None and max(start.values) < log.limits["entropy_collapse"]
    if log.solved or (not (greedy and copies) and not (sharp and share > log.limits["zero_variance_groups"])):
        return
    back = unfiltered(log.config, log.source) if greedy.startswith("top") else {}
    yield finding(
        "rollout/temperature",
        joined(
            f"{percent(share)} of the groups had equal rewards over {equal.span}" if equal is not None else None,
            f"the entropy is {first:.2g} nats per token over its first steps" if entropy is not None else None,
            greedy,
            by=", ",
        ),
        "the sampler is greedy or next to it: completions of a group are copies, and so are their rewards",
        setting("set {}", back or {log.opt("rollout.temperature"): 1.0}),
    )


def _greedy(log: Log) -> str:
    """The sampling option that leaves the likeliest token alone; "" where there is none."""
    temperature, top_p = log.figure("rollout.temperature"), log.figure("rollout.top_p")
    if temperature is not None and temperature < log.limits["temperature_cold"]:
        return f"the temperature is {temperature:g}"
    if log.figure("rollout.top_k") == 1:
        return "top_k is 1"
    return f"top_p is {top_p:g}" if top_p is not None and 0 < top_p < log.limits["exploration_least"] else ""


@check()
def hot(log: Log) -> CheckResults:
    """Noise from the first step on, by an entropy that no trained model has, or a temperature that no recipe has."""
    entropy, temperature = log.get("entropy/mean"), log.figure("rollout.temperature")
    first = median(entropy.finite.head(RECENT)) if entropy is not None else 0.0
    blind = log.limits["entropy_uniform_share"] * math.log(log.vocabulary or SMALL_VOCABULARY)
    noise = first > min(log.limits["entropy_noise"], blind)
    configured = temperature is not None and temperature >= log.limits["temperature_hot"]
    guessed = temperature is None and noise and first <= blind
    if log.rose or log.solved or not (guessed or configured):
        return
    silent = log.equal_groups is not None and log.equal_groups.mean > log.limits["same_groups"]
    yield finding(
        "rollout/temperature",
        joined(
            f"the temperature is {temperature:g}" if temperature is not None else None,
            f"the entropy is {first:.3g} nats per token over its first steps" if entropy is not None else None,
            log.gain,
            by=", ",
        ),
        "sampling so hot that each token is one of hundreds: what is written is noise, whatever the policy knows"
        + (", unless the weights were not loaded as they should be" if guessed else ""),
        setting("set {}", {log.opt("rollout.temperature"): 1.0}),
        severity="error" if noise or silent else "warning",
    )


@check("entropy/collapse")
def collapse(log: Log) -> CheckResults:
    """Entropy gone without the task being solved."""
    series = log.need("entropy/mean", "the entropy")
    if len(series) < 2 * RECENT:
        raise Missing(f"{len(series)} steps are too few: {2 * RECENT} are needed")
    first, now = series.finite.head(3).mean, series.finite.tail(RECENT)
    # what noise does not explain is gone before nothing at all is left
    low = log.limits["entropy_rise_least" if log.clear(course(series)) else "entropy_collapse"]
    gone = now.mean < min(low, log.limits["entropy_collapse_share"] * first)
    above = series.finite.where(lambda value: value >= low)
    since = log.since(max(above)) if above else log  # what was gained on the way is no gain of what is left
    judged = since if (left := since.get("reward/mean")) is not None and len(left.finite) >= LEAST else log
    if not gone or log.solved or judged.rose:
        return
    clips = log.option("loss.loss_type") in ("grpo", "dr_grpo", "dapo", "bnpo")  # DAPO's upper limit
    wider = clips and (log.figure("loss.epsilon_high") or 0.0) < 0.28
    yield finding(
        "entropy/collapse",
        f"entropy fell from {first:.3g} to {now.mean:.3g} nats per token ({now.span})",
        "the policy repeats one answer, so groups have no spread left to learn from",
        either(
            log.stronger,
            log.keel({"loss.epsilon_high": 0.28} if wider else {}),
            log.keel({} if log.option("loss.entropy_coef") else BONUS),
            log.rate(0.5, "half of"),
        ),
    )


def _bonus(log: Log) -> float | None:
    """The coefficient of a bonus on entropy: the last that was logged, or the configured one."""
    logged = log.get("entropy/coefficient")
    return logged.finite.values[-1] if logged is not None else log.figure("loss.entropy_coef")


@check("entropy/rising")
def rising(log: Log) -> CheckResults:
    """Entropy above its start, beyond noise, without a gain."""
    series, change = log.shape("entropy/mean", "the entropy", trend)
    first, now = series.finite.head(RECENT).mean, series.finite.tail(RECENT).mean
    far = now > log.limits["entropy_rise"] * first and now - first > log.limits["entropy_rise_least"]
    if not far or change.size <= 0 or not log.clear(change) or log.rose:
        return
    bonus = _bonus(log) or 0.0
    evidence = joined(
        f"entropy rises from {first:.3g} to {now:.3g} nats per token over {series.span} (chance under noise: "
        f"{change.chance:.1g})",
        log.gain,
    )
    if bonus >= log.limits["entropy_bonus_least"]:
        yield finding(
            "entropy/too-strong",
            f"{evidence}; the bonus has a coefficient of {bonus:g}",
            "the bonus pays more for noise than the reward does for answers",
            either(
                setting("set {}", {log.opt("loss.entropy_coef"): 0}), log.times("loss.entropy_coef", 0.1, "a tenth of")
            ),
        )
    else:
        yield finding(
            "entropy/rising",
            evidence,
            "the policy drifts into noise: advantages that are mostly noise, too large updates, a bonus on entropy, or "
            "sampling hotter than what is scored",
            either(log.rate(0.3, "a third of"), log.stronger, "read the completions"),
        )
