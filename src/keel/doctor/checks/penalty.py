"""The KL term: too weak to see, too strong to learn under, of no use, or no penalty at all."""

from __future__ import annotations

import math

from keel.doctor.advice import either, setting, times, unpenalized, weaker
from keel.doctor.checks.base import (
    KL,
    RECENT,
    CheckResults,
    Unchecked,
    begins_late,
    clear,
    no_trend,
    not_recorded,
    opt,
    reward_flat,
    reward_size,
    reward_trend,
    saturated,
    solved,
    undecided,
)
from keel.doctor.findings import finding
from keel.doctor.formula import formula_of
from keel.doctor.history import History, Series
from keel.doctor.shapes import fall, median
from keel.doctor.shapes import trend as trend_of
from keel.doctor.thresholds import Thresholds

LEAST_HELD = 20  # steps under a β that no recipe has: a reward that does not rise need not be proven flat
DR_GRPO = "Dr. GRPO 2503.20783"  # as in keel.kl.facts.PAPERS, which would load torch


def not_learning(history: History, thresholds: Thresholds) -> CheckResults:
    """Hardly any KL and a flat reward over enough steps."""
    trend, least = reward_trend(history), int(thresholds["steps_to_judge"])
    if history.kl is None:
        yield not_recorded("kl/not-learning", KL)
        return
    if trend is None:
        yield no_trend("kl/not-learning", history)
        return
    name, series = history.kl
    few = Unchecked("kl/not-learning", f"{len(series)} steps are too few to call a reward flat: {least} are needed")
    if len(series) < (LEAST_HELD if _beyond_all(history, thresholds) else least):
        yield few
        return
    if history.moves_reference:
        yield Unchecked("kl/not-learning", "the reference moves with the policy, so a small KL is no standstill")
        return
    if (late := begins_late(series)) is not None:
        yield Unchecked("kl/not-learning", late)
        return
    now, flat = series.tail(RECENT), reward_flat(history, thresholds)
    if solved(history, thresholds) or saturated(history, thresholds) or now.mean < -thresholds["kl_no_move"]:
        return
    if (
        now.mean < thresholds["kl_not_learning"]
        and trend.z_score <= thresholds["flat_reward"]
        and _held(history, thresholds)
    ):
        force = (history.beta or 0.0) * math.sqrt(2 * max(0.0, now.mean))
        yield finding(
            "kl/too-strong",
            f"{name} is {now.mean:.3g} nats per token over {now.span}, and {trend.text}; β is {history.beta:.3g}, so "
            f"that its pull on a token is about β √(2 KL) = {force:.2g} against advantages of about 1",
            "the KL term holds the policy where it started: what rewards teach is undone as it is learned",
            weaker(history.config, history.source),
        )
        return
    if len(series) < least:
        yield few
        return
    course = trend_of(series)
    rising = clear(course, thresholds) and course is not None and course.size > thresholds["kl_at_start"]
    if now.mean < thresholds["kl_not_learning"] and flat and rising:
        yield Unchecked("kl/not-learning", f"the reward is flat, but {name} is rising: the policy moves")
    elif now.mean < thresholds["kl_not_learning"] and flat is None:
        yield undecided("kl/not-learning", history, thresholds)
    elif now.mean < thresholds["kl_not_learning"] and flat:
        yield finding(
            "kl/not-learning",
            f"{name} is {now.mean:.3g} nats per token over {now.span}, and {trend.text}",
            "updates are too small, the penalty too strong, or no group's rewards differ",
            either(
                either(
                    times(history.config, "optim.learning_rate", 10, "ten times", history.source),
                    weaker(history.config, history.source),
                ),
                "see reward/zero_variance_fraction first",
                joined="; ",
            ),
        )
    elif flat and median(series) > thresholds["kl_without_gain"] and _from_zero(series, thresholds):
        yield finding(
            "kl/not-learning",
            f"{name} went from 0 to {median(series):.3g} nats per token (median over {series.span}; {now.mean:.3g} at "
            f"the end), and {trend.text}",
            "the policy moves and gains nothing: what is paid does not depend on what it writes, as a reward that is "
            "chance or another problem's, or updates are mostly noise",
            either(
                "judge the same completions twice, and a right and a wrong answer by hand",
                times(history.config, "optim.learning_rate", 0.3, "a third of", history.source),
            ),
        )


def _from_zero(series: Series, thresholds: Thresholds) -> bool:
    """Whether all of the way that the KL has gone is in the log."""
    return series.finite.steps[0] <= 1 and abs(series.finite.values[0]) <= thresholds["kl_at_start"]


def _held(history: History, thresholds: Thresholds) -> bool:
    """Whether β is far beyond what recipes use, or pulls about as much as an advantage does."""
    beta, now = history.beta, history.kl[1].tail(RECENT).mean if history.kl is not None else 0.0
    force = (beta or 0.0) * math.sqrt(2 * max(0.0, now))
    return beta is not None and (beta >= thresholds["beta_strong"] or force >= thresholds["kl_force"])


def _beyond_all(history: History, thresholds: Thresholds) -> bool:
    """Whether β is ten times what is called strong, at most steps."""
    betas = history.get("kl/beta")
    beta = median(betas) if betas is not None else history.figure("kl.beta")
    return beta is not None and beta >= 10 * thresholds["beta_strong"]


def penalty(history: History, thresholds: Thresholds) -> CheckResults:
    """A penalty inside the reward that is larger than what rewards differ by."""
    raw, paid = history.get("reward/mean"), history.get("reward/penalized")
    if raw is None or paid is None or history.kl is None:
        return
    at = dict(zip(paid.steps, paid.values, strict=True))
    cost = Series.of((s, v - at[s]) for s, v in zip(raw.steps, raw.values, strict=True) if s in at).tail(RECENT)
    highest, lowest = history.get("reward/max"), history.get("reward/min")
    size = reward_size(history)
    if highest is not None and lowest is not None:
        size = (highest.mean - lowest.mean) / 2
    if len(cost.finite) >= RECENT and size > 0 and median(cost) > thresholds["penalty_share"] * size:
        yield finding(
            "kl/too-strong",
            f"the KL penalty takes {median(cost):.3g} off a completion's reward over {cost.span}, and rewards differ "
            f"by {size:.3g}",
            "a completion earns more by staying where the reference is than by being right",
            weaker(history.config, history.source),
        )


def steered(history: History, thresholds: Thresholds) -> CheckResults:
    """A logged β that has gone where no coefficient is."""
    betas = history.get("kl/beta")
    if betas is None:
        yield not_recorded("kl/controller", "β")
        return
    turns = swings(betas, thresholds["controller_swing"])
    if turns >= 3 and history.kl is not None and swings(history.kl[1], thresholds["controller_swing"]) >= 2:
        yield finding(
            "kl/controller",
            f"β goes up and down {turns} times by more than {thresholds['controller_swing']:g} times, between "
            f"{min(betas.finite.values):.3g} and {betas.top()[1]:.3g}, and {history.kl[0]} with it",
            "the controller answers too strongly, or to a KL of too long ago: each correction overshoots, and the run "
            "is by turns without a penalty and held by one",
            "a smaller gain or a longer horizon of the controller, or a constant β of the size in between",
        )
        return
    first, (step, largest), lowest = betas.finite.values[0], betas.top(), min(betas.finite.values)
    if lowest < 0 or largest > max(thresholds["controller_beta"], 10 * first):
        yield finding(
            "kl/controller",
            f"β was {first:.3g} at first and is {betas.finite.values[-1]:.3g} now; it was {largest:.3g} at most (step "
            f"{step}) and {lowest:.3g} at least",
            "a controller whose target is out of reach, or whose sign or unit is another one, goes on without end",
            "bounds on β, and a target in the unit in which the KL is measured",
        )
    else:
        yield from _overshot(history, betas, thresholds)


def _overshot(history: History, betas: Series, thresholds: Thresholds) -> CheckResults:
    """A β that grew on after the KL had turned, and took the KL below its target and the reward down with it."""
    target, rewards = history.figure("kl.controller.target"), history.get("reward/mean")
    by_token = history.option("kl.controller.unit") in (None, "per_token")
    by_token = by_token and history.option("kl.controller.name") != "ziegler"
    if target is None or history.kl is None or rewards is None or not by_token or history.moves_reference:
        return
    name, series = history.kl
    turned, lost = fall(series), fall(rewards)
    crossed = next((s for s, v in zip(series.steps, series.values, strict=True) if v > target), None)
    if turned is None or lost is None or crossed is None or len(series) < thresholds["steps_to_judge"]:
        return
    before, (step, largest) = betas.since(crossed).finite.values[:1], betas.top()
    late = turned.before > 2 * target > 4 * turned.after and step > turned.step and clear(turned, thresholds)
    grown = bool(before) and largest > thresholds["controller_swing"] * before[0] > 0
    if late and grown and clear(lost, thresholds) and -lost.size > thresholds["gap_reward"] * reward_size(history):
        yield finding(
            "kl/controller",
            f"{name} was at {turned.before:.3g}, over its target of {target:g}, and is at {turned.after:.3g}, under "
            f"half of it; β was {before[0]:.3g} when the target was passed and grew to {largest:.3g} by step {step}; "
            f"meanwhile the reward fell from {lost.before:.3g} to {lost.after:.3g}",
            "the controller answers too late: β grew on after the KL had turned, and holds the policy nearer to the "
            "reference than it was meant to be",
            either(
                setting("{}, which answers to the KL of now", {"kl.controller": {"name": "pid", "target": target}})
                if history.source == "keel" and history.option("kl.controller.name") != "pid"
                else "a smaller gain of the controller",
                "a constant β of the size in between",
            ),
            severity="warning",
        )


def swings(series: Series, factor: float) -> int:
    """How often a positive figure turns, each time by more than a factor: rises and falls one after the other."""
    count, direction = 0, 0
    low = high = 0.0
    for value in (value for value in series.finite.values if value > 0):
        low, high = (min(low, value), max(high, value)) if low else (value, value)
        if direction <= 0 and value > factor * low:
            count, direction, high = count + 1, 1, value
        elif direction >= 0 and factor * value < high:
            count, direction, low = count + 1, -1, value
    return count


def rejected(history: History, thresholds: Thresholds) -> CheckResults:
    """Completions that are left out of the policy term for their KL."""
    share = history.get("kl/rejected_fraction")
    if share is not None and (now := share.finite.tail(RECENT)).mean > thresholds["rejected_most"]:
        yield finding(
            "kl/rejects-all",
            f"{100 * now.mean:.0f} % of the completions of {now.span} were left out of the policy term for their KL",
            "completions are left out for what was made likelier, so that what is learned is no longer taught",
            times(history.config, "kl.collect_max", 10, "ten times", history.source),
            share=now.mean,
        )


def unneeded(history: History, thresholds: Thresholds) -> CheckResults:
    """A penalty that the recipe means to be without."""
    loss_type, beta = history.option("loss.loss_type"), history.figure("kl.beta")
    if not isinstance(loss_type, str) or beta is None:
        yield Unchecked("kl/unneeded", "the loss type and β are not in the log")
        return
    if loss_type == "dr_grpo" and beta > 0:
        yield finding(
            "kl/unneeded",
            f"{opt(history, 'kl.beta')} is {beta:g} with loss_type dr_grpo ({DR_GRPO})",
            "a reward that is a rule stays right however far the policy drifts, so the recipe runs at β = 0",
            unpenalized(history.config, "is worth a try, unless what is not trained must be retained", history.source),
        )


def pairing(history: History, thresholds: Thresholds) -> CheckResults:
    """What the configured estimator's gradient is, by the table of proven pairings."""
    formula = formula_of(history.config, history.source)
    if formula is None:
        kl = history.option("kl.estimator") if history.source == "keel" else None
        why = (
            "the KL term's estimator and placement are not in the log"
            if kl is None
            else f"kl.estimator={kl} is no estimator of Keel's: keel doctor on the configuration tries it"
        )
        for code in ("kl/no-gradient", "kl/reversed"):
            yield Unchecked(code, why)
        return
    named = {"zero": "kl/no-gradient", "away": "kl/reversed", "wrong": "kl/reversed"}.get(formula.expected)
    if formula.active and named is not None:
        yield finding(
            named,
            f"{formula.note}; β is {history.option('kl.beta')}",
            "this pairing of estimator, placement and gradient is no KL penalty, whatever β is",
            formula.advice,
        )


CHECKS = (not_learning, penalty, steered, rejected, unneeded, pairing)
