"""KL against the reference: at the start, exploding, over budget, asleep, or of no use."""

from __future__ import annotations

import math
from dataclasses import astuple

from keel.base.thresholds import Thresholds
from keel.lab.doctor.advice import (
    budget,
    either,
    no_penalty,
    setting,
    steered,
    stronger,
    times,
    weaker,
    without_dropout,
)
from keel.lab.doctor.checks.base import (
    RECENT,
    CheckResults,
    Unchecked,
    no_trend,
    not_recorded,
    opt,
    reward_trend,
    running_median,
    solved,
)
from keel.lab.doctor.findings import Advice, finding
from keel.lab.doctor.formula import formula_of
from keel.lab.doctor.history import History, Series
from keel.lab.judge import kl_limit

KL = "KL(policy‖reference)"
MOVING = ("ema", "snapshot", "kl_triggered")
DROPS = ("model.dropout", "model.lora.dropout")


def at_start(history: History, thresholds: Thresholds) -> CheckResults:
    """KL before the first update must be 0."""
    if history.kl is None:
        yield not_recorded("kl/at-start", KL)
        return
    name, series = history.kl
    step, value = series.finite.steps[0], abs(series.finite.values[0])
    if step > 1:
        yield Unchecked("kl/at-start", f"{KL} was first recorded at step {step:.0f}, after updates")
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
            either(
                _no_dropout(history),
                "run keel doctor on the configuration: its preflight tells these apart",
                joined=", and ",
            ),
        )


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
    token = f"; one token at d = {math.log(peak):.1f} nats contributes e^d = {peak:.2g} to k3" if peak > 10 else ""
    yield finding(
        "kl/explosion",
        evidence,
        f"the policy has left the reference's support{token}: too large updates, a reward that pays for noise, or a KL "
        "gradient that itself grows like e^d",
        _explosion_advice(history, thresholds),
        severity="warning" if back else None,
    )


def _explosion_advice(history: History, thresholds: Thresholds) -> Advice:
    lower = times(history.config, "optim.learning_rate", 0.1, "a tenth of", history.source)
    if history.option("loss.loss_type") == "dr_grpo" and history.option("kl.beta"):
        return either(lower, _unpenalized(history, "as dr_grpo with a rule-based reward is meant"))
    if history.source == "keel":
        grows = history.option("kl.beta") and history.option("kl.estimator") == "k3"
        grows = grows and history.option("kl.gradient") in ("plain", "k3", "rho", "sg_rho")
        how = setting("{} (it grows like d, not e^d)", {"kl.gradient": "auto"} if grows else {})
        limited = setting("{}", budget(history.config, thresholds["kl_over_budget"]))
        return either(either(lower, how, limited), "then keel doctor on the configuration", joined="; ")
    look = "look at the reward's spread and at sampler and mask before raising the KL's alarm"
    return either(lower, look, joined="; and ")


def _unpenalized(history: History, why: str) -> Advice:
    options = no_penalty(history.config) if history.source == "keel" else {opt(history, "kl.beta"): 0}
    return setting(f"{{}} {why}", options)


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
    if not limit < now.mean <= thresholds["kl_explosion"]:
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
    if len(series) < least:
        yield Unchecked("kl/not-learning", f"{len(series)} steps are too few to call a reward flat: {least} are needed")
        return
    if history.option("reference.kind") in MOVING or history.option("reference.moves"):
        yield Unchecked("kl/not-learning", "the reference moves with the policy, so a small KL is no standstill")
        return
    now = series.tail(RECENT)
    if now.mean < thresholds["kl_not_learning"] and abs(trend.z_score) <= thresholds["flat_reward"]:
        if solved(history, thresholds):
            return
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


def unneeded(history: History, thresholds: Thresholds) -> CheckResults:
    """A penalty that the recipe means to be without."""
    loss_type, beta = history.option("loss.loss_type"), history.option("kl.beta")
    if not isinstance(loss_type, str) or not isinstance(beta, int | float):
        yield Unchecked("kl/unneeded", "the loss type and β are not in the log")
        return
    if loss_type == "dr_grpo" and beta > 0:
        from keel.kl.facts import PAPERS

        yield finding(
            "kl/unneeded",
            f"{opt(history, 'kl.beta')} is {beta:g} with loss_type dr_grpo ({PAPERS['dr_grpo'].paper})",
            "a reward that is a rule stays right however far the policy drifts, so the recipe runs at β = 0",
            _unpenalized(history, "is worth a try, unless what is not trained must be retained"),
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


CHECKS = (at_start, explosion, over_budget, not_learning, unneeded, pairing)
