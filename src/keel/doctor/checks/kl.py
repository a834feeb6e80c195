"""KL against the reference: at the start, below zero, exploding, over budget."""

from __future__ import annotations

import math
from dataclasses import astuple
from itertools import pairwise

from keel.doctor.advice import budget, either, setting, steered, stronger, times, unpenalized, without_dropout
from keel.doctor.checks.base import (
    KL,
    RECENT,
    CheckResults,
    Unchecked,
    level,
    not_recorded,
    running_median,
    standard_error,
)
from keel.doctor.findings import Advice, finding
from keel.doctor.history import History, Series
from keel.doctor.judge import kl_limit
from keel.doctor.shapes import negative
from keel.doctor.thresholds import Thresholds

EITHER = 0.2  # of its steps, on either side of 0
DROPS = ("model.dropout", "model.lora.dropout")


def at_start(history: History, thresholds: Thresholds) -> CheckResults:
    """KL before the first update must be 0."""
    if history.kl is None:
        yield not_recorded("kl/at-start", KL)
        return
    name, series = history.kl
    step, value = series.finite.steps[0], abs(series.finite.values[0])
    if sides := _either_sign(series, thresholds):
        yield finding(
            "kl/at-start",
            f"{name} is {sides[0]:.2g} nats per token from 0 in the first {RECENT} logged steps (their median), below "
            f"it in {sides[1]:.0%} of all and above it in the others",
            "two passes that should agree differ from batch to batch by more than training moves the policy: dropout "
            "in one of them, kernels that depend on the batch, or another text that is scored",
            _told_apart(history),
        )
    elif step > 1:
        yield Unchecked("kl/at-start", f"{KL} was first recorded at step {step:.0f}, after updates")
    elif value > thresholds["kl_at_start"] and value <= thresholds["kl_per_update"] and _updated_within(history):
        yield Unchecked("kl/at-start", f"a step's figures are means over its updates, so {KL} at step 1 holds some")
    elif value > thresholds["kl_at_start"]:
        evidence = f"{name} is {value:.4g} nats per token at step {step:.0f}, before any update could move the policy"
        if on := _dropout(history):
            yield finding(
                "scoring/dropout",
                f"{', '.join(f'{option} is {history.option(option)}' for option in on)}, and {evidence}",
                "the policy's pass drops units, the reference's and the sampler's do not",
                _no_dropout(history),
            )
        yield finding(
            "kl/at-start",
            evidence,
            "policy and reference are scored differently or are different models: dropout on in one pass only, a "
            "reference from another checkpoint, wrong positions under padding, or sums compared with means",
            _told_apart(history),
        )


def _told_apart(history: History) -> Advice:
    told = "run keel doctor on the configuration: its preflight tells these apart"
    return either(_no_dropout(history), told, joined=", and ")


def _either_sign(series: Series, thresholds: Thresholds) -> tuple[float, float] | None:
    """How far from 0 a KL is that is on both sides of it from the first steps on, and how often it is below."""
    values = series.finite.values
    if len(values) < 2 * RECENT or series.finite.steps[0] > RECENT:  # later a small batch may do it
        return None
    first, below = sorted(map(abs, values[:RECENT]))[RECENT // 2], sum(value < 0 for value in values) / len(values)
    within = min(below, 1 - below) > EITHER and abs(values[0]) > thresholds["kl_at_start"]
    return (first, below) if within and first > thresholds["kl_either_sign"] else None


def _updated_within(history: History) -> bool:
    """Whether the first step has several updates, or may have them as far as a trainer's log tells."""
    names = ("kl/old_policy/k1/mean", "kl/old_policy/k3/mean", "ratio/clip_fraction", "ratio/clip_high_fraction")
    first = [series.finite.values[0] for name in names if (series := history.get(name)) is not None]
    several = any((history.figure(name) or 1) > 1 for name in ("loss.num_iterations", "optim.minibatches"))
    return any(abs(value) > 0 for value in first) or (not first and (several or history.source != "keel"))


def _dropout(history: History) -> list[str]:
    """The options of this run that leave dropout on."""
    return [option for option in DROPS if history.option(option)]


def _no_dropout(history: History) -> Advice:
    off = without_dropout(history.config)
    if history.source == "TRL":
        off = {} if history.option("model.disable_dropout") else {"disable_dropout": True}
    return setting("set {}", off, otherwise="check that no dropout is on")


def explosion(history: History, thresholds: Thresholds) -> CheckResults:
    """A KL out of every useful range, or far above its own running median."""
    if history.kl is None:
        yield not_recorded("kl/explosion", KL)
        return
    name, series = history.kl
    step, peak = series.top()
    floor, limit = thresholds["kl_explosion_floor"], thresholds["kl_explosion"]
    final = history.final_kl
    if final is not None:  # what the last update did is on no step's line
        series = Series.of((*zip(series.steps, series.values, strict=True), (series.steps[-1] + 1, final)))
        peak = max(peak, final if math.isfinite(final) else math.inf)
    jumps = [
        (int(series.steps[index]), value, median)
        for index, value in enumerate(series.values)
        if (median := running_median(series, index)) is not None
        and value > max(floor, thresholds["kl_growth"] * median)
    ]
    if peak <= limit and not jumps:
        return
    at_end = final is not None and not peak > final
    evidence = f"{name} reached {peak:.4g} nats per token {'after the last update' if at_end else f'at step {step}'}"
    if jumps and not at_end:
        at, value, median = jumps[0]
        evidence += f"; at step {at} it was {value:.3g} against a running median of {median:.3g}"
    norms = history.get("grad/norm")
    if norms is not None:
        evidence += f"; the largest gradient norm is {norms.top()[1]:.3g}"
    now = series.tail(RECENT).mean
    back = not at_end and now <= thresholds["kl_over_budget"]
    if back:
        evidence += f"; it is back at {now:.3g}"
    lone = (
        not at_end and peak <= limit and not any(after - before == 1 for (before, *_), (after, *_) in pairwise(jumps))
    )
    lone = lone and len(jumps) <= thresholds["spike_share"] * len(series) and jumps[-1][0] < series.steps[-1]
    token = f"; one token at d = {math.log(peak):.1f} nats contributes e^d = {peak:.2g} to k3" if peak > 10 else ""
    yield finding(
        "kl/explosion",
        evidence,
        f"the policy has left the reference's support{token}: too large updates, a reward that pays for noise, or a KL "
        "gradient that itself grows like e^d",
        _explosion_advice(history, thresholds),
        severity="note" if lone else "warning" if back else None,  # k3 is heavy-tailed: a lone step may be one token
    )


def _explosion_advice(history: History, thresholds: Thresholds) -> Advice:
    lower = times(history.config, "optim.learning_rate", 0.1, "a tenth of", history.source)
    if history.option("loss.loss_type") == "dr_grpo" and history.option("kl.beta"):
        return either(
            lower, unpenalized(history.config, "as dr_grpo with a rule-based reward is meant", history.source)
        )
    if history.source == "keel":
        grows = history.option("kl.beta") and history.option("kl.estimator") == "k3"
        grows = grows and history.option("kl.gradient") in ("plain", "k3", "rho", "sg_rho")
        how = setting("{} (it grows like d, not e^d)", {"kl.gradient": "auto"} if grows else {})
        limited = setting("{}", budget(history.config, thresholds["kl_over_budget"]))
        return either(either(lower, how, limited), "then keel doctor on the configuration", joined="; ")
    look = "look at the reward's spread and at sampler and mask before raising the KL's alarm"
    return either(lower, look, joined="; and ")


def over_budget(history: History, thresholds: Thresholds) -> CheckResults:
    """Mean KL of the last steps against the budget: the run's own where it has one per token."""
    if history.kl is None:
        yield not_recorded("kl/over-budget", KL)
        return
    name, series = history.kl
    limit, set_by = astuple(kl_limit(history.config, thresholds))
    now = series.tail(RECENT)
    if thresholds["kl_over_budget"] < now.mean <= limit:
        yield finding(
            "kl/over-budget",
            f"{name} is {now.mean:.3g} nats per token over {now.span}: over {thresholds['kl_over_budget']:g}, "
            f"within kl.budget.max={limit:g} of the configuration",
            "the configuration allows this distance",
            "nothing, if it is meant",
            severity="note",
        )
    error = thresholds["flat_reward"] * standard_error(now)
    if not limit < now.mean - error or now.mean > thresholds["kl_explosion"]:
        return
    beta = history.get("kl/beta")
    with_beta = f" at β = {beta.tail(1).mean:.3g}" if beta is not None else ""
    yield finding(
        "kl/over-budget",
        f"{name} is {now.mean:.3g} nats per token over {now.span}{with_beta}; {set_by} is {limit:g}",
        "the penalty is too weak for the pull of the reward, or the updates are too large",
        either(
            stronger(history.config, history.source),
            setting(
                "a controller with a target, {} (nats per token)",
                steered(history.config, limit) if history.source == "keel" else {},
            ),
            times(history.config, "optim.learning_rate", 0.5, "half of", history.source),
        ),
    )


def below_zero(history: History, thresholds: Thresholds) -> CheckResults:
    """A KL cannot be negative; an estimate of it can, but not on average."""
    code = "kl/negative"
    if history.kl is None:
        yield not_recorded(code, KL)
        return
    name, series = history.kl
    finite, limit = series.finite, thresholds["kl_at_start"]
    below = [(value, int(step)) for step, value in zip(finite.steps, finite.values, strict=True) if value < -limit]
    never = not name.endswith("k1") and history.source in NEVER_NEGATIVE
    chance = negative(series, thresholds["kl_no_move"])
    if not (len(below) >= 2 and never) and chance > level(thresholds):
        return
    lowest, step = min(below, default=(min(finite.values), int(finite.steps[0])))
    how = (
        "an estimate that is never negative"
        if never
        else f"chance of as much below 0 if the KL were 0 or more: {chance:.1g}"
    )
    yield finding(
        code,
        f"{name} is {series.mean:.3g} nats per token on average and {lowest:.3g} at step {step} ({how})",
        "the estimator's operands or sign are swapped, the completions were drawn from another policy than the one "
        "that is scored, or a mask or temperature differs between the two passes",
        "KL(policy‖reference) is the mean of logp − ref_logp over tokens that the policy drew: see the order of the "
        "two, the minus sign, and that both are scored alike",
    )


NEVER_NEGATIVE = ("keel", "TRL", "NeMo-RL")  # what is called k3 there is

CHECKS = (at_start, below_zero, explosion, over_budget)
