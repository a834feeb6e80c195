"""KL against the reference: at the start, below zero, exploding, over budget."""

from __future__ import annotations

import math
import statistics
from dataclasses import astuple
from itertools import pairwise

from keel.doctor.advice import budget, either, setting, steered, unpenalized, without_dropout
from keel.doctor.checks.base import KL, RECENT, CheckResults, Log, Missing, check, joined
from keel.doctor.findings import Advice, finding
from keel.doctor.history import Series
from keel.doctor.judge import kl_limit
from keel.doctor.shapes import negative

EITHER = 0.2  # of its steps, on either side of 0
DROPS = ("model.dropout", "model.lora.dropout")
NEVER_NEGATIVE = ("keel", "TRL", "NeMo-RL")  # what is called k3 there is


@check("kl/at-start")
def at_start(log: Log) -> CheckResults:
    """KL before the first update must be 0."""
    name, series = log.need_kl
    step, value = series.finite.steps[0], abs(series.finite.values[0])
    off = without_dropout(log.config)
    if log.source == "TRL":
        off = {} if log.option("model.disable_dropout") else {"disable_dropout": True}
    no_dropout = setting("set {}", off, otherwise="check that no dropout is on")
    told_apart = either(
        no_dropout, "run keel doctor on the configuration: its preflight tells these apart", joined=", and "
    )
    if sides := _either_sign(series, log):
        yield finding(
            "kl/at-start",
            f"{name} is {sides[0]:.2g} nats per token from 0 in the first {RECENT} logged steps (their median), below "
            f"it in {sides[1]:.0%} of all and above it in the others",
            "two passes that should agree differ from batch to batch by more than training moves the policy: dropout "
            "in one of them, kernels that depend on the batch, or another text that is scored",
            told_apart,
        )
    elif step > 1:
        raise Missing(f"{KL} was first recorded at step {step:.0f}, after updates")
    elif log.limits["kl_at_start"] < value <= log.limits["kl_per_update"] and _updated_within(log):
        raise Missing(f"a step's figures are means over its updates, so {KL} at step 1 holds some")
    elif value > log.limits["kl_at_start"]:
        evidence = f"{name} is {value:.4g} nats per token at step {step:.0f}, before any update could move the policy"
        if on := [option for option in DROPS if log.option(option)]:
            yield finding(
                "scoring/dropout",
                f"{', '.join(f'{option} is {log.option(option)}' for option in on)}, and {evidence}",
                "the policy's pass drops units, the reference's and the sampler's do not",
                no_dropout,
            )
        yield finding(
            "kl/at-start",
            evidence,
            "policy and reference are scored differently or are different models: dropout on in one pass only, a "
            "reference from another checkpoint, wrong positions under padding, or sums compared with means",
            told_apart,
        )


def _either_sign(series: Series, log: Log) -> tuple[float, float] | None:
    """How far from 0 a KL is that is on both sides of it from the first steps on, and how often it is below."""
    values = series.finite.values
    if len(values) < 2 * RECENT or series.finite.steps[0] > RECENT:  # later a small batch may do it
        return None
    first, below = sorted(map(abs, values[:RECENT]))[RECENT // 2], sum(value < 0 for value in values) / len(values)
    within = min(below, 1 - below) > EITHER and abs(values[0]) > log.limits["kl_at_start"]
    return (first, below) if within and first > log.limits["kl_either_sign"] else None


def _updated_within(log: Log) -> bool:
    """Whether the first step has several updates, or may have them as far as a trainer's log tells."""
    names = ("kl/old_policy/k1/mean", "kl/old_policy/k3/mean", "ratio/clip_fraction", "ratio/clip_high_fraction")
    first = [series.finite.values[0] for name in names if (series := log.get(name)) is not None]
    several = any((log.figure(name) or 1) > 1 for name in ("loss.num_iterations", "optim.minibatches"))
    return any(abs(value) > 0 for value in first) or (not first and (several or log.source != "keel"))


@check("kl/negative")
def below_zero(log: Log) -> CheckResults:
    """A KL cannot be negative; an estimate of it can, but not on average."""
    name, series = log.need_kl
    below = series.finite.where(lambda value: value < -log.limits["kl_at_start"])
    never = not name.endswith("k1") and log.source in NEVER_NEGATIVE
    chance = negative(series, log.limits["kl_no_move"])
    if not (len(below) >= 2 and never) and chance > log.level:
        return
    lowest, step = min(zip(series.finite.values, series.finite.steps, strict=True))
    how = f"chance of as much below 0 if the KL were 0 or more: {chance:.1g}"
    yield finding(
        "kl/negative",
        f"{name} is {series.mean:.3g} nats per token on average and {lowest:.3g} at step {step:.0f} "
        f"({'an estimate that is never negative' if never else how})",
        "the estimator's operands or sign are swapped, the completions were drawn from another policy than the one "
        "that is scored, or a mask or temperature differs between the two passes",
        "KL(policy‖reference) is the mean of logp − ref_logp over tokens that the policy drew: see the order of the "
        "two, the minus sign, and that both are scored alike",
    )


@check("kl/explosion")
def explosion(log: Log) -> CheckResults:
    """A KL out of every useful range, or far above its own running median."""
    name, series = log.need_kl
    step, peak = series.top()
    floor, limit = log.limits["kl_explosion_floor"], log.limits["kl_explosion"]
    final = log.final_kl
    if final is not None:  # what the last update did is on no step's line
        series = Series.of((*zip(series.steps, series.values, strict=True), (series.steps[-1] + 1, final)))
        peak = max(peak, final if math.isfinite(final) else math.inf)
    jumps = [
        (int(series.steps[index]), value, median)
        for index, value in enumerate(series.values)
        if (median := _running_median(series, index)) is not None
        and value > max(floor, log.limits["kl_growth"] * median)
    ]
    if peak <= limit and not jumps:
        return
    at_end, now = final is not None and not peak > final, series.tail(RECENT).mean
    back = not at_end and now <= log.limits["kl_over_budget"]
    at, value, median = jumps[0] if jumps else (0, 0.0, 0.0)
    norms = log.get("grad/norm")
    lone = not at_end and peak <= limit and all(after[0] - before[0] > 1 for before, after in pairwise(jumps))
    lone = lone and len(jumps) <= log.limits["spike_share"] * len(series) and jumps[-1][0] < series.steps[-1]
    token = f"; one token at d = {math.log(peak):.1f} nats contributes e^d = {peak:.2g} to k3" if peak > 10 else ""
    yield finding(
        "kl/explosion",
        joined(
            f"{name} reached {peak:.4g} nats per token {'after the last update' if at_end else f'at step {step}'}",
            f"at step {at} it was {value:.3g} against a running median of {median:.3g}"
            if jumps and not at_end
            else None,
            f"the largest gradient norm is {norms.top()[1]:.3g}" if norms is not None else None,
            f"it is back at {now:.3g}" if back else None,
        ),
        f"the policy has left the reference's support{token}: too large updates, a reward that pays for noise, or a KL "
        "gradient that itself grows like e^d",
        _explosion_advice(log),
        severity="note" if lone else "warning" if back else None,  # k3 is heavy-tailed: a lone step may be one token
    )


def _running_median(series: Series, index: int, window: int = 20, least: int = 5) -> float | None:
    """Of the finite values before `index`; None where there are too few."""
    before = [value for value in series.values[max(0, index - window) : index] if math.isfinite(value)]
    return statistics.median(before) if len(before) >= least else None


def _explosion_advice(log: Log) -> Advice:
    lower, beta = log.rate(0.1, "a tenth of"), log.option("kl.beta")
    if log.option("loss.loss_type") == "dr_grpo" and beta:
        return either(lower, unpenalized(log.config, "as dr_grpo with a rule-based reward is meant", log.source))
    if log.source == "keel":
        grows = beta and log.option("kl.estimator") == "k3"
        grows = grows and log.option("kl.gradient") in ("plain", "k3", "rho", "sg_rho")
        how = setting("{} (it grows like d, not e^d)", {"kl.gradient": "auto"} if grows else {})
        limited = setting("{}", budget(log.config, log.limits["kl_over_budget"]))
        return either(either(lower, how, limited), "then keel doctor on the configuration", joined="; ")
    look = "look at the reward's spread and at sampler and mask before raising the KL's alarm"
    return either(lower, look, joined="; and ")


@check("kl/over-budget")
def over_budget(log: Log) -> CheckResults:
    """Mean KL of the last steps against the budget: the run's own where it has one per token."""
    name, series = log.need_kl
    limit, set_by = astuple(kl_limit(log.config, log.limits))
    now, usual = series.tail(RECENT), log.limits["kl_over_budget"]
    known, beta = now.finite.values, log.get("kl/beta")
    error = statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else 0.0
    if usual < now.mean <= limit:
        yield finding(
            "kl/over-budget",
            f"{name} is {now.mean:.3g} nats per token over {now.span}: over {usual:g}, within kl.budget.max={limit:g} "
            "of the configuration",
            "the configuration allows this distance",
            "nothing, if it is meant",
            severity="note",
        )
    elif limit < now.mean - log.limits["flat_reward"] * error and now.mean <= log.limits["kl_explosion"]:
        yield finding(
            "kl/over-budget",
            f"{name} is {now.mean:.3g} nats per token over {now.span}"
            + (f" at β = {beta.tail(1).mean:.3g}" if beta is not None else "")
            + f"; {set_by} is {limit:g}",
            "the penalty is too weak for the pull of the reward, or the updates are too large",
            either(
                log.stronger,
                setting(
                    "a controller with a target, {} (nats per token)",
                    steered(log.config, limit) if log.source == "keel" else {},
                ),
                log.rate(0.5, "half of"),
            ),
        )
