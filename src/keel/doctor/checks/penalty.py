"""The KL term: too weak to see, too strong to learn under, of no use, or no penalty at all."""

from __future__ import annotations

import math

from keel.doctor.advice import either, setting, unpenalized
from keel.doctor.checks.base import RECENT, CheckResults, Log, Missing, check, over
from keel.doctor.findings import finding
from keel.doctor.formula import formula_of
from keel.doctor.history import Series
from keel.doctor.shapes import fall, median, trend, zigzag

LEAST_HELD = 20  # steps under a β that no recipe has: a reward that does not rise need not be proven flat
DR_GRPO = "Dr. GRPO 2503.20783"  # as in keel.kl.facts.PAPERS, which would load torch


@check("kl/not-learning")
def not_learning(log: Log) -> CheckResults:
    """Hardly any KL and a flat reward over enough steps."""
    (name, series), gain, least = log.need_kl, log.need_trend, int(log.limits["steps_to_judge"])
    betas, beta, now = log.get("kl/beta"), log.beta or 0.0, series.tail(RECENT)
    usual = median(betas) if betas is not None else log.figure("kl.beta") or 0.0
    few = Missing(f"{len(series)} steps are too few to call a reward flat: {least} are needed")
    if len(series) < (LEAST_HELD if usual >= 10 * log.limits["beta_strong"] else least):
        raise few
    if log.moves_reference:
        raise Missing("the reference moves with the policy, so a small KL is no standstill")
    steps = series.finite.steps
    if len(steps) > 1 and steps[0] > max(RECENT * (steps[1] - steps[0]), 0.1 * steps[-1]):
        raise Missing(f"the log begins at step {steps[0]:.0f}: what was learned before is not in it")
    if log.solved or now.mean < -log.limits["kl_no_move"]:
        return
    near, force = now.mean < log.limits["kl_not_learning"], beta * math.sqrt(2 * max(0.0, now.mean))
    if near and not log.rose and (beta >= log.limits["beta_strong"] or force >= log.limits["kl_force"]):
        yield finding(
            "kl/too-strong",
            f"{name} is {now.mean:.3g} nats per token over {now.span}, and {gain.text}; β is {beta:.3g}, so "
            f"that its pull on a token is about β √(2 KL) = {force:.2g} against advantages of about 1",
            "the KL term holds the policy where it started: what rewards teach is undone as it is learned",
            log.weaker,
        )
        return
    if len(series) < least:
        raise few
    course, start = trend(series), log.limits["kl_at_start"]
    from_zero = steps[0] <= 1 and abs(series.finite.values[0]) <= start  # all of the way that it has gone is in the log
    if near and log.flat:
        if course is not None and log.clear(course) and course.size > start:
            raise Missing(f"the reward is flat, but {name} is rising: the policy moves")
        yield finding(
            "kl/not-learning",
            f"{name} is {now.mean:.3g} nats per token over {now.span}, and {gain.text}",
            "updates are too small, the penalty too strong, or no group's rewards differ",
            either(
                either(log.rate(10, "ten times"), log.weaker), "see reward/zero_variance_fraction first", joined="; "
            ),
        )
    elif not near and median(series) > log.limits["kl_without_gain"] and from_zero and log.flat:
        yield finding(
            "kl/not-learning",
            f"{name} went from 0 to {median(series):.3g} nats per token (median over {series.span}; {now.mean:.3g} "
            f"at the end), and {gain.text}",
            "the policy moves and gains nothing: what is paid does not depend on what it writes, as a reward that "
            "is chance or another problem's, or updates are mostly noise",
            either(
                "judge the same completions twice, and a right and a wrong answer by hand", log.rate(0.3, "a third of")
            ),
        )


@check()
def penalty(log: Log) -> CheckResults:
    """A penalty inside the reward that is larger than what rewards differ by."""
    raw, paid = log.get("reward/mean"), log.get("reward/penalized")
    if raw is None or paid is None or log.kl is None:
        return
    cost = Series.of((step, value - left) for step, value, left in raw.beside(paid)).tail(RECENT)
    highest, lowest = log.get("reward/max"), log.get("reward/min")
    size = (highest.mean - lowest.mean) / 2 if highest is not None and lowest is not None else log.size
    if len(cost.finite) >= RECENT and size > 0 and median(cost) > log.limits["penalty_share"] * size:
        yield finding(
            "kl/too-strong",
            f"the KL penalty takes {median(cost):.3g} off a completion's reward over {cost.span}, and rewards differ "
            f"by {size:.3g}",
            "a completion earns more by staying where the reference is than by being right",
            log.weaker,
        )


@check("kl/controller")
def steered(log: Log) -> CheckResults:
    """A logged β that has gone where no coefficient is."""
    betas, swing = log.need("kl/beta", "β"), log.limits["controller_swing"]
    turns = _swings(betas, swing)
    first, (step, largest), lowest = betas.finite.values[0], betas.top(), min(betas.finite.values)
    if turns >= 3 and log.kl is not None and _swings(log.kl[1], swing) >= 2:
        yield finding(
            "kl/controller",
            f"β goes up and down {turns} times by more than {swing:g} times, between {lowest:.3g} and {largest:.3g}, "
            f"and {log.kl[0]} with it",
            "the controller answers too strongly, or to a KL of too long ago: each correction overshoots, and the run "
            "is by turns without a penalty and held by one",
            "a smaller gain or a longer horizon of the controller, or a constant β of the size in between",
        )
    elif lowest < 0 or largest > max(log.limits["controller_beta"], 10 * first):
        yield finding(
            "kl/controller",
            f"β was {first:.3g} at first and is {betas.finite.values[-1]:.3g} now; it was {largest:.3g} at most (step "
            f"{step}) and {lowest:.3g} at least",
            "a controller whose target is out of reach, or whose sign or unit is another one, goes on without end",
            "bounds on β, and a target in the unit in which the KL is measured",
        )
    else:
        yield from _overshot(log, betas)


def _swings(series: Series, factor: float) -> int:
    """How often a positive figure turns, each time by more than a factor: rises and falls one after the other."""
    return zigzag([math.log(value) for value in series.finite.values if value > 0], math.log(factor))


def _overshot(log: Log, betas: Series) -> CheckResults:
    """A β that grew on after the KL had turned, and took the KL below its target and the reward down with it."""
    target, rewards = log.figure("kl.controller.target"), log.get("reward/mean")
    by_token = log.option("kl.controller.unit") in (None, "per_token")
    by_token = by_token and log.option("kl.controller.name") != "ziegler"
    if target is None or log.kl is None or rewards is None or not by_token or log.moves_reference:
        return
    name, series = log.kl
    turned, lost = fall(series), fall(rewards)
    crossed = series.where(lambda value: value > target)
    if turned is None or lost is None or not crossed or len(series) < log.limits["steps_to_judge"]:
        return
    before, (step, largest) = betas.since(crossed[0]).finite.values[:1], betas.top()
    late = turned.before > 2 * target > 4 * turned.after and step > turned.step and log.clear(turned)
    grown = bool(before) and largest > log.limits["controller_swing"] * before[0] > 0
    if late and grown and log.clear(lost) and -lost.size > log.limits["gap_reward"] * log.size:
        yield finding(
            "kl/controller",
            f"{name} was at {turned.before:.3g}, over its target of {target:g}, and is at {turned.after:.3g}, under "
            f"half of it; β was {before[0]:.3g} when the target was passed and grew to {largest:.3g} by step {step}; "
            f"meanwhile the reward fell from {lost.before:.3g} to {lost.after:.3g}",
            "the controller answers too late: β grew on after the KL had turned, and holds the policy nearer to the "
            "reference than it was meant to be",
            either(
                setting("{}, which answers to the KL of now", {"kl.controller": {"name": "pid", "target": target}})
                if log.source == "keel" and log.option("kl.controller.name") != "pid"
                else "a smaller gain of the controller",
                "a constant β of the size in between",
            ),
            severity="warning",
        )


@check()
def rejected(log: Log) -> CheckResults:
    """Completions that are left out of the policy term for their KL."""
    return over(
        log,
        "kl/rejects-all",
        "kl/rejected_fraction",
        "rejected_most",
        "{share} of the completions of {span} were left out of the policy term for their KL",
        "completions are left out for what was made likelier, so that what is learned is no longer taught",
        log.times("kl.collect_max", 10, "ten times"),
    )


@check("kl/unneeded")
def unneeded(log: Log) -> CheckResults:
    """A penalty that the recipe means to be without."""
    loss_type, beta = log.option("loss.loss_type"), log.figure("kl.beta")
    if not isinstance(loss_type, str) or beta is None:
        raise Missing("the loss type and β are not in the log")
    if loss_type == "dr_grpo" and beta > 0:
        yield finding(
            "kl/unneeded",
            f"{log.opt('kl.beta')} is {beta:g} with loss_type dr_grpo ({DR_GRPO})",
            "a reward that is a rule stays right however far the policy drifts, so the recipe runs at β = 0",
            unpenalized(log.config, "is worth a try, unless what is not trained must be retained", log.source),
        )


@check("kl/no-gradient", "kl/reversed")
def pairing(log: Log) -> CheckResults:
    """What the configured estimator's gradient is, by the table of proven pairings."""
    formula = formula_of(log.config, log.source)
    if formula is None:
        kl = log.option("kl.estimator") if log.source == "keel" else None
        raise Missing(
            "the KL term's estimator and placement are not in the log"
            if kl is None
            else f"kl.estimator={kl} is no estimator of Keel's: keel doctor on the configuration tries it"
        )
    named = {"zero": "kl/no-gradient", "away": "kl/reversed", "wrong": "kl/reversed"}.get(formula.expected)
    if formula.active and named is not None:
        yield finding(
            named,
            f"{formula.note}; β is {log.option('kl.beta')}",
            "this pairing of estimator, placement and gradient is no KL penalty, whatever β is",
            formula.advice,
        )
