"""Exploration: sampling options that leave none or only noise, an entropy that is gone or rises."""

from __future__ import annotations

import math

from keel.doctor.advice import either, setting, stronger, times, unfiltered
from keel.doctor.checks.base import (
    RECENT,
    SMALL_VOCABULARY,
    CheckResults,
    Unchecked,
    clear,
    equal_groups,
    level,
    not_recorded,
    opt,
    reward_rose,
    reward_trend,
    saturated,
    shape_of,
    solved,
)
from keel.doctor.findings import Options, finding
from keel.doctor.history import History, Series
from keel.doctor.shapes import AGAIN, LEAST, course, median, turns
from keel.doctor.thresholds import Thresholds


def temperature(history: History, thresholds: Thresholds) -> CheckResults:
    """Sampling that leaves nothing to explore, or nothing but noise."""
    yield from _cold(history, thresholds)
    yield from _hot(history, thresholds)


def _cold(history: History, thresholds: Thresholds) -> CheckResults:
    """Groups of copies, and sampling options or an entropy from the first step on that make them."""
    code, equal, entropy = "rollout/temperature", equal_groups(history), history.get("entropy/mean")
    greedy = _greedy(history, thresholds)
    if equal is None and entropy is None:
        yield not_recorded(code, "the entropy or the share of groups without spread")
        return
    if solved(history, thresholds) or saturated(history, thresholds):
        return
    share = equal.mean if equal is not None else math.nan
    first = median(entropy.finite.head(RECENT)) if entropy is not None else math.nan
    copies = share > thresholds["same_groups"] or (equal is None and first < thresholds["entropy_rise_least"])
    sharp = entropy is not None and max(entropy.finite.head(RECENT).values) < thresholds["entropy_collapse"]
    if not (greedy and copies) and not (sharp and share > thresholds["zero_variance_groups"]):
        return
    figures = [f"{100 * share:.0f} % of the groups had equal rewards over {equal.span}"] if equal is not None else []
    figures += [f"the entropy is {first:.2g} nats per token over its first steps"] if entropy is not None else []
    back = unfiltered(history.config, history.source) if greedy.startswith("top") else {}
    yield finding(
        code,
        ", ".join(filter(None, (*figures, greedy))),
        "the sampler is greedy or next to it: completions of a group are copies, and so are their rewards",
        setting("set {}", back or {opt(history, "rollout.temperature"): 1.0}),
    )


def _greedy(history: History, thresholds: Thresholds) -> str:
    """The sampling option that leaves the likeliest token alone; "" where there is none."""
    temperature, top_p = history.figure("rollout.temperature"), history.figure("rollout.top_p")
    if temperature is not None and temperature < thresholds["temperature_cold"]:
        return f"the temperature is {temperature:g}"
    if history.figure("rollout.top_k") == 1:
        return "top_k is 1"
    if top_p is not None and 0 < top_p < thresholds["exploration_least"]:
        return f"top_p is {top_p:g}"
    return ""


def _hot(history: History, thresholds: Thresholds) -> CheckResults:
    """Noise from the first step on, by an entropy that no trained model has, or a temperature that no recipe has."""
    entropy, temperature = history.get("entropy/mean"), history.figure("rollout.temperature")
    if reward_rose(history, thresholds) or solved(history, thresholds) or saturated(history, thresholds):
        return
    first = median(entropy.finite.head(RECENT)) if entropy is not None else 0.0
    blind = thresholds["entropy_uniform_share"] * math.log(history.vocabulary or SMALL_VOCABULARY)
    noise = first > min(thresholds["entropy_noise"], blind)
    configured = temperature is not None and temperature >= thresholds["temperature_hot"]
    guessed = temperature is None and noise and first <= blind
    if not guessed and not configured:
        return
    equal = equal_groups(history)
    silent = equal is not None and equal.mean > thresholds["same_groups"]
    figures = [f"the temperature is {temperature:g}"] if temperature is not None else []
    figures += [f"the entropy is {first:.3g} nats per token over its first steps"] if entropy is not None else []
    gain = reward_trend(history)
    yield finding(
        "rollout/temperature",
        ", ".join((*figures, *([gain.text] if gain is not None else []))),
        "sampling so hot that each token is one of hundreds: what is written is noise, whatever the policy knows"
        + (", unless the weights were not loaded as they should be" if guessed else ""),
        setting("set {}", {opt(history, "rollout.temperature"): 1.0}),
        severity="error" if noise or silent else "warning",
    )


def collapse(history: History, thresholds: Thresholds) -> CheckResults:
    """Entropy gone without the task being solved."""
    code, series = "entropy/collapse", history.get("entropy/mean")
    if series is None:
        yield not_recorded(code, "the entropy")
        return
    if len(series) < 2 * RECENT:
        yield Unchecked(code, f"{len(series)} steps are too few: {2 * RECENT} are needed")
        return
    first, now = series.finite.head(3).mean, series.finite.tail(RECENT)
    low = thresholds["entropy_collapse"]
    if clear(course(series), thresholds):  # what noise does not explain is gone before nothing at all is left
        low = thresholds["entropy_rise_least"]
    gone = now.mean < min(low, thresholds["entropy_collapse_share"] * first)
    best = solved(history, thresholds) or saturated(history, thresholds)
    above = [step for step, value in zip(series.finite.steps, series.finite.values, strict=True) if value >= low]
    since = history.since(max(above)) if above else history  # what was gained on the way is no gain of what is left
    judged = since if (left := since.get("reward/mean")) is not None and len(left.finite) >= LEAST else history
    if gone and not best and not reward_rose(judged, thresholds):
        yield finding(
            code,
            f"entropy fell from {first:.3g} to {now.mean:.3g} nats per token ({now.span})",
            "the policy repeats one answer, so groups have no spread left to learn from",
            either(
                stronger(history.config, history.source),
                setting("{}", _wider(history)),
                setting("{}", {} if history.source != "keel" or history.option("loss.entropy_coef") else BONUS),
                times(history.config, "optim.learning_rate", 0.5, "half of", history.source),
            ),
        )


def _swinging(history: History, thresholds: Thresholds) -> CheckResults:
    """Entropy that goes up and down by a multiple of itself, again and again."""
    series = history.get("entropy/mean")
    values = series.finite.values if series is not None else ()
    if series is None or min(values) <= 0 or max(values) < thresholds["entropy_rise_least"]:
        return
    logarithm = Series(series.finite.steps, tuple(map(math.log, values)))
    times_turned, chance = turns(logarithm, math.log(thresholds["entropy_swing"]))
    if times_turned < AGAIN or chance > level(thresholds):
        return
    bonus = _bonus(history)
    yield finding(
        "entropy/too-strong" if bonus else "entropy/rising",
        f"entropy goes up and down {times_turned} times by more than {thresholds['entropy_swing']:g} times, between "
        f"{min(values):.3g} and {max(values):.3g} nats per token over {series.span} (chance of such a turn under "
        f"noise: {chance:.1g})" + (f"; the bonus has a coefficient of {bonus:g}" if bonus else ""),
        "something answers to the entropy too strongly or too late, as a bonus that is steered, or updates overshoot: "
        "the policy is by turns next to noise and next to one answer",
        either(
            setting("set {}", {opt(history, "loss.entropy_coef"): 0} if bonus else {}),
            times(history.config, "optim.learning_rate", 0.3, "a third of", history.source),
            stronger(history.config, history.source),
        ),
    )


def _bonus(history: History) -> float | None:
    """The coefficient of a bonus on entropy: the last that was logged, or the configured one."""
    logged = history.get("entropy/coefficient")
    return logged.finite.values[-1] if logged is not None else history.figure("loss.entropy_coef")


def rising(history: History, thresholds: Thresholds) -> CheckResults:
    """Entropy above its start, beyond noise, without a gain; or one that swings."""
    yield from _swinging(history, thresholds)
    code = "entropy/rising"
    shape = shape_of(history, code, "entropy/mean", "the entropy")
    if isinstance(shape, Unchecked):
        yield shape
        return
    series, change = shape
    first, now = series.finite.head(RECENT).mean, series.finite.tail(RECENT).mean
    far = now > thresholds["entropy_rise"] * first and now - first > thresholds["entropy_rise_least"]
    if not far or change.size <= 0 or not clear(change, thresholds) or reward_rose(history, thresholds):
        return
    bonus = _bonus(history)
    rules = bonus is not None and bonus >= thresholds["entropy_bonus_least"]
    trend_text = f"; {reward.text}" if (reward := reward_trend(history)) is not None else ""
    evidence = (
        f"entropy rises from {first:.3g} to {now:.3g} nats per token over {series.span} (chance under noise: "
        f"{change.chance:.1g}){trend_text}"
    )
    if rules:
        yield finding(
            "entropy/too-strong",
            f"{evidence}; the bonus has a coefficient of {bonus:g}",
            "the bonus pays more for noise than the reward does for answers",
            either(
                setting("set {}", {opt(history, "loss.entropy_coef"): 0}),
                times(history.config, "loss.entropy_coef", 0.1, "a tenth of", history.source),
            ),
        )
        return
    yield finding(
        code,
        evidence,
        "the policy drifts into noise: advantages that are mostly noise, too large updates, a bonus on entropy, or "
        "sampling hotter than what is scored",
        either(
            times(history.config, "optim.learning_rate", 0.3, "a third of", history.source),
            stronger(history.config, history.source),
            "read the completions",
        ),
    )


BONUS = {"loss.entropy_coef": 0.001}


def _wider(history: History) -> Options:
    """DAPO's upper limit, for losses that clip ratios and have a lower one."""
    clips = history.option("loss.loss_type") in ("grpo", "dr_grpo", "dapo", "bnpo")
    wide = (history.figure("loss.epsilon_high") or 0.0) >= 0.28
    return {"loss.epsilon_high": 0.28} if history.source == "keel" and clips and not wide else {}


CHECKS = (temperature, collapse, rising)
