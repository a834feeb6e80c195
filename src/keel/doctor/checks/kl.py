"""KL(policy‖reference): its size and sign, its penalty term and the controller of β."""

from __future__ import annotations

import math
import statistics
from dataclasses import astuple
from itertools import pairwise

from keel.doctor.advice import budget, either, setting, steered, unpenalized, without_dropout
from keel.doctor.checks.base import KL, RECENT, CheckResults, Level, Log, Missing, check, joined, levels
from keel.doctor.findings import Advice, finding
from keel.doctor.formula import formula_of
from keel.doctor.history import Series
from keel.doctor.judge import kl_limit
from keel.doctor.shapes import median, negative, swings, trend

DROPS = ("model.dropout", "model.lora.dropout")
NEVER_NEGATIVE = ("keel", "TRL", "NeMo-RL")  # trainers whose metric named k3 is the nonnegative estimator
LEAST_HELD = 20  # enough steps for kl/too-strong at a very large β; otherwise `steps_to_judge` are needed
DR_GRPO = "Dr. GRPO 2503.20783"  # as in keel.kl.facts.PAPERS, which would load torch

# ------------------------------------------------------------------------ its size and sign


@check("kl/at-start")
def at_start(log: Log) -> CheckResults:
    """The KL before the first update must be 0."""
    name, series = log.need_kl
    step, value = series.finite.steps[0], abs(series.finite.values[0])
    if step > 1:
        raise Missing(f"{KL} was first recorded at step {step:.0f}, after updates")
    if value <= log.limits["kl_at_start"]:
        return
    if value <= log.limits["kl_per_update"] and _updated_within(log):
        raise Missing(f"{KL} at step 1 is a mean over several updates, so it is not the KL before the first update")
    off = without_dropout(log.config)
    if log.source == "TRL":
        off = {} if log.option("model.disable_dropout") else {"disable_dropout": True}
    no_dropout = setting("set {}", off, otherwise="check that no dropout is on")
    evidence = f"{name} is {value:.4g} nats per token at step {step:.0f}, before any update could move the policy"
    if on := [option for option in DROPS if log.option(option)]:
        yield finding(
            "scoring/dropout",
            f"{', '.join(f'{option} is {log.option(option)}' for option in on)}, and {evidence}",
            "dropout acts in the policy's pass, but not in those of the reference and the sampler",
            no_dropout,
        )
    yield finding(
        "kl/at-start",
        evidence,
        "policy and reference are scored differently or are different models: dropout in one pass only, a "
        "reference from another checkpoint, wrong positions under padding, or sums compared with means",
        either(no_dropout, "run keel doctor on the configuration to find out which of these it is", joined=", and "),
    )


def _updated_within(log: Log) -> bool:
    """Whether the first step made several updates, or may have made several."""
    names = ("kl/old_policy/k1/mean", "kl/old_policy/k3/mean", "ratio/clip_fraction", "ratio/clip_high_fraction")
    first = [series.finite.values[0] for name in names if (series := log.get(name)) is not None]
    several = any((log.figure(name) or 1) > 1 for name in ("loss.num_iterations", "optim.minibatches"))
    return any(abs(value) > 0 for value in first) or (not first and (several or log.source != "keel"))


@check("kl/negative")
def below_zero(log: Log) -> CheckResults:
    """A KL cannot be negative. A single estimate can, but not its mean."""
    name, series = log.need_kl
    below = series.finite.where(lambda value: value < -log.limits["kl_at_start"])
    never = not name.endswith("k1") and log.source in NEVER_NEGATIVE
    chance = negative(series, log.limits["kl_no_move"])
    if not (len(below) >= 2 and never) and chance > log.level:
        return
    lowest, step = min(zip(series.finite.values, series.finite.steps, strict=True))
    how = f"probability of such low values if the KL were 0 or more: {chance:.1g}"
    yield finding(
        "kl/negative",
        f"{name} is {series.mean:.3g} nats per token on average and {lowest:.3g} at step {step:.0f} "
        f"({'an estimate that is never negative' if never else how})",
        "the two log-probabilities or the sign of the estimator are swapped, the completions were sampled from a "
        "policy "
        "that is not the scored one, or a mask or temperature differs between the two passes",
        "check the order of the two log-probabilities, the sign, and that both are scored alike: "
        "KL(policy‖reference) is the mean of logp − ref_logp over tokens that the policy sampled",
    )


@check("kl/explosion")
def explosion(log: Log) -> CheckResults:
    """A KL out of every useful range, or far above its own running median."""
    name, series = log.need_kl
    floor, limit, final = log.limits["kl_explosion_floor"], log.limits["kl_explosion"], log.final_kl
    step, peak = series.top()
    at_end = final is not None and not final <= peak
    if final is not None:  # the KL after the last update is on no step's line
        series = Series.of((*zip(series.steps, series.values, strict=True), (series.steps[-1] + 1, final)))
        peak = max(peak, final if math.isfinite(final) else math.inf)
    jumps = [
        (int(series.steps[index]), value, usual)
        for index, value in enumerate(series.values)
        if (usual := _running_median(series, index)) is not None and value > max(floor, log.limits["kl_growth"] * usual)
    ]
    if peak <= limit and not jumps:
        return
    now, norms = series.tail(RECENT).mean, log.get("grad/norm")
    back = not at_end and now <= log.limits["kl_over_budget"]
    at = [jump[0] for jump in jumps]
    apart = all(after - before > 1 for before, after in pairwise(at))
    rare = len(at) <= log.limits["spike_share"] * len(series) and apart
    lone = not at_end and peak <= limit and rare and at[-1] < series.steps[-1]
    token = (
        f"; a single token with a log-ratio of d = {math.log(peak):.1f} nats contributes e^d = {peak:.2g} to k3"
        if peak > 10
        else ""
    )
    beside = f"at step {at[0]} it was {jumps[0][1]:.3g} against a running median of {jumps[0][2]:.3g}" if jumps else ""
    yield finding(
        "kl/explosion",
        joined(
            f"{name} reached {peak:.4g} nats per token {'after the last update' if at_end else f'at step {step}'}",
            beside if not at_end else None,
            f"the largest gradient norm is {norms.top()[1]:.3g}" if norms is not None else None,
            f"it is back at {now:.3g}" if back else None,
        ),
        f"the policy writes tokens that the reference hardly ever writes{token}: updates are too large, the reward "
        "pays "
        "for noise, or the gradient of the KL term grows like e^d",
        _explosion_advice(log),
        # k3 is heavy-tailed: one token may cause a single high step
        severity="note" if lone else "warning" if back else None,
    )


def _running_median(series: Series, index: int, window: int = 20, least: int = 5) -> float | None:
    """The median of the finite values in the window before `index`; None if there are too few."""
    before = [value for value in series.values[max(0, index - window) : index] if math.isfinite(value)]
    return statistics.median(before) if len(before) >= least else None


def _explosion_advice(log: Log) -> Advice:
    lower, beta = log.rate(0.1, "a tenth of"), log.option("kl.beta")
    if log.option("loss.loss_type") == "dr_grpo" and beta:
        return either(lower, unpenalized(log.config, "as dr_grpo is meant for rule-based rewards", log.source))
    grows = log.source == "keel" and beta and log.option("kl.estimator") == "k3" and log.option("kl.gradient") != "auto"
    how = setting("{} (it grows like d, not e^d)", {"kl.gradient": "auto"} if grows else {})
    limited = budget(log.config, log.limits["kl_over_budget"]) if log.source == "keel" else {}
    return either(lower, how, setting("{}", limited), "check the reward's spread, the sampler and the mask")


@check("kl/over-budget")
def over_budget(log: Log) -> CheckResults:
    """The mean KL of the last steps against the limit: the run's own per-token budget if it has one."""
    name, series = log.need_kl
    limit, set_by = astuple(kl_limit(log.config, log.limits))
    now, usual = series.tail(RECENT), log.limits["kl_over_budget"]
    known, beta = now.finite.values, log.get("kl/beta")
    error = statistics.stdev(known) / math.sqrt(len(known)) if len(known) > 1 else 0.0
    if usual < now.mean <= limit:
        yield finding(
            "kl/over-budget",
            f"{name} is {now.mean:.3g} nats per token over {now.span}, over the usual limit of {usual:g} and within "
            f"kl.budget.max={limit:g} of the configuration",
            "the configuration allows this distance",
            "change nothing if this limit is intended",
            severity="note",
        )
    elif limit < now.mean - log.limits["flat_reward"] * error and now.mean <= log.limits["kl_explosion"]:
        aimed = setting("a controller, {}", steered(log.config, limit) if log.source == "keel" else {})
        yield finding(
            "kl/over-budget",
            f"{name} is {now.mean:.3g} nats per token over {now.span}"
            + (f" at β = {beta.tail(1).mean:.3g}" if beta is not None else "")
            + f"; {set_by} is {limit:g}",
            "the KL penalty is too weak against the reward, or the updates are too large",
            either(log.stronger, aimed, log.rate(0.5, "half of")),
        )


# ------------------------------------------------------------------------ the term


@check("kl/not-learning")
def not_learning(log: Log) -> CheckResults:
    """Hardly any KL and a flat reward over enough steps, or a large KL without any gain."""
    (name, series), gain, least = log.need_kl, log.need_trend, int(log.limits["steps_to_judge"])
    betas, beta, now = log.get("kl/beta"), log.beta or 0.0, series.tail(RECENT)
    usual = median(betas) if betas is not None else log.figure("kl.beta") or 0.0
    few = Missing(f"{len(series)} steps are too few to call a reward flat: {least} are needed")
    if len(series) < (LEAST_HELD if usual >= 10 * log.limits["beta_strong"] else least):
        raise few
    if log.moves_reference:
        raise Missing("the reference moves with the policy, so a small KL does not show that the policy stands still")
    steps = series.finite.steps
    if len(steps) > 1 and steps[0] > max(RECENT * (steps[1] - steps[0]), 0.1 * steps[-1]):
        raise Missing(f"the log begins at step {steps[0]:.0f} and does not show what was learned before")
    if log.solved or now.mean < -log.limits["kl_no_move"]:
        return
    near, force = now.mean < log.limits["kl_not_learning"], beta * math.sqrt(2 * max(0.0, now.mean))
    if near and not log.rose and (beta >= log.limits["beta_strong"] or force >= log.limits["kl_force"]):
        yield finding(
            "kl/too-strong",
            f"{name} is {now.mean:.3g} nats per token over {now.span}, and {gain.text}; with β = {beta:.3g} the KL "
            f"gradient on a token is about β √(2 KL) = {force:.2g}, and advantages are about 1",
            "the KL term cancels the updates of the reward and holds the policy at its start",
            log.weaker,
        )
        return
    if len(series) < least:
        raise few
    course, start = trend(series), log.limits["kl_at_start"]
    from_zero = steps[0] <= 1 and abs(series.finite.values[0]) <= start  # the log shows the whole drift
    if near and log.flat:
        if course is not None and log.clear(course) and course.size > start:
            raise Missing(f"the reward is flat, but {name} is rising: the policy moves")
        larger = either(log.rate(10, "ten times"), log.weaker)
        yield finding(
            "kl/not-learning",
            f"{name} is {now.mean:.3g} nats per token over {now.span}, and {gain.text}",
            "updates are too small, the KL penalty is too strong, or the rewards of every group are equal",
            either(larger, "check reward/zero_variance_fraction first", joined="; "),
        )
    elif not near and median(series) > log.limits["kl_without_gain"] and from_zero and log.flat:
        yield finding(
            "kl/not-learning",
            f"{name} went from 0 to {median(series):.3g} nats per token (median over {series.span}; {now.mean:.3g} "
            f"at the end), and {gain.text}",
            "the policy moves without a gain: the reward does not depend on the completion, or the updates are noise",
            either(
                "compute the rewards of the same completions twice, and those of a right and a wrong answer",
                log.rate(0.3, "a third of"),
            ),
        )


@check()
def penalty(log: Log) -> CheckResults:
    """A KL penalty in the reward that exceeds the differences between rewards."""
    raw, paid = log.get("reward/mean"), log.get("reward/penalized")
    if raw is None or paid is None or log.kl is None:
        return
    cost = Series.of((step, value - left) for step, value, left in raw.beside(paid)).tail(RECENT)
    size = log.ranges.mean / 2 if log.ranges is not None else log.size
    if len(cost.finite) >= RECENT and size > 0 and median(cost) > log.limits["penalty_share"] * size:
        yield finding(
            "kl/too-strong",
            f"the KL penalty reduces a completion's reward by {median(cost):.3g} over {cost.span}, and rewards differ "
            f"by {size:.3g}",
            "a completion earns more by staying near the reference than by being right",
            log.weaker,
        )


levels(
    "kl",
    Level(
        "kl/rejects-all",
        "kl/rejected_fraction",
        "rejected_most",
        "{share} of the completions of {span} were left out of the policy term for their KL",
        "completions that became likelier through training exceed kl.collect_max and are no longer trained",
        lambda log: log.times("kl.collect_max", 10, "ten times"),
    ),
)


@check("kl/unneeded")
def unneeded(log: Log) -> CheckResults:
    """A KL penalty in a recipe that is defined without one."""
    loss_type, beta = log.option("loss.loss_type"), log.figure("kl.beta")
    if not isinstance(loss_type, str) or beta is None:
        raise Missing("the loss type and β are not in the log")
    if loss_type == "dr_grpo" and beta > 0:
        yield finding(
            "kl/unneeded",
            f"{log.opt('kl.beta')} is {beta:g} with loss_type dr_grpo ({DR_GRPO})",
            "a rule-based reward stays right at any distance from the reference, so the recipe uses β = 0",
            unpenalized(log.config, "is worth a try, unless skills that are not trained must be kept", log.source),
        )


@check("kl/no-gradient", "kl/reversed")
def pairing(log: Log) -> CheckResults:
    """The gradient of the configured estimator, by the table of verified pairings."""
    formula = formula_of(log.config, log.source)
    if formula is None:
        kl = log.option("kl.estimator") if log.source == "keel" else None
        raise Missing(
            "the KL term's estimator and placement are not in the log"
            if kl is None
            else f"kl.estimator={kl} is not an estimator of Keel: run keel doctor on the configuration to test it"
        )
    named = {"zero": "kl/no-gradient", "away": "kl/reversed", "wrong": "kl/reversed"}.get(formula.expected)
    if formula.active and named is not None:
        yield finding(
            named,
            f"{formula.note}; β is {log.option('kl.beta')}",
            "this combination of estimator, placement and gradient is not a KL penalty, at any β",
            formula.advice,
        )


@check("kl/controller")
def controller(log: Log) -> CheckResults:
    """A logged β that oscillates together with the KL, is negative, or is far too large."""
    betas, swing = log.need("kl/beta", "β"), log.limits["controller_swing"]
    turns = swings(betas, swing)
    first, (step, largest), lowest = betas.finite.values[0], betas.top(), min(betas.finite.values)
    if turns >= 3 and log.kl is not None and swings(log.kl[1], swing) >= 2:
        yield finding(
            "kl/controller",
            f"β changes direction {turns} times, each time by more than a factor of {swing:g}, between {lowest:.3g} "
            "and "
            f"{largest:.3g}, and {log.kl[0]} changes with it",
            "the controller reacts too strongly, or to an old KL: each correction overshoots, so the penalty "
            "alternates "
            "between too weak and too strong",
            "use a smaller gain or a longer horizon of the controller, or a constant β between these values",
        )
    elif lowest < 0 or largest > max(log.limits["controller_beta"], 10 * first):
        yield finding(
            "kl/controller",
            f"β was {first:.3g} at first and is {betas.finite.values[-1]:.3g} now; it was {largest:.3g} at most (step "
            f"{step}) and {lowest:.3g} at least",
            "the target of the controller cannot be reached, or has the wrong sign or unit, so β never settles",
            "set bounds on β, and give the target in the unit of the measured KL",
        )
