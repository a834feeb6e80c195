"""KL against the reference: at the start, exploding, over budget, asleep, or of no use."""

from __future__ import annotations

import math
from dataclasses import astuple
from itertools import pairwise

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
    clear,
    level,
    movement,
    no_trend,
    not_recorded,
    opt,
    reward_flat,
    reward_size,
    reward_trend,
    running_median,
    saturated,
    solved,
    standard_error,
    undecided,
)
from keel.lab.doctor.findings import Advice, finding
from keel.lab.doctor.formula import formula_of
from keel.lab.doctor.history import History, Series
from keel.lab.doctor.shapes import LEAST, median, negative, noise
from keel.lab.doctor.shapes import trend as trend_of
from keel.lab.judge import kl_limit

KL = "KL(policy‖reference)"
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
            either(
                _no_dropout(history),
                "run keel doctor on the configuration: its preflight tells these apart",
                joined=", and ",
            ),
        )


def _updated_within(history: History) -> bool:
    """Whether the first step has several updates: the policy that it ends with is not the one that sampled."""
    names = ("kl/old_policy/k1/mean", "kl/old_policy/k3/mean")
    first = [series.finite.values[0] for name in names if (series := history.get(name)) is not None]
    return any(abs(value) > 0 for value in first)


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
    if history.moves_reference:
        yield Unchecked("kl/not-learning", "the reference moves with the policy, so a small KL is no standstill")
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


def follows(history: History, thresholds: Thresholds) -> CheckResults:
    """No KL at all to a reference although the policy moves."""
    code = "reference/follows"
    if history.kl is None:
        yield not_recorded(code, KL)
        return
    if history.moves_reference:
        return
    name, series = history.kl
    most = max(abs(value) for value in series.finite.values)
    if len(series.finite) < LEAST or most > thresholds["kl_no_move"] or history.beta == 0:
        return
    if (moving := movement(history, thresholds)) is None:
        return
    unsure = most == 0 and history.unpenalized
    yield finding(
        code,
        f"{name} is at most {most:.2g} nats per token in {len(series.finite)} logged steps, while {moving}"
        + ("; a run without a KL term logs 0, too" if unsure else ""),
        "the reference is the policy itself: the same weights, an adapter that is left on while it scores, or a copy "
        "taken at every step",
        "score the reference with the weights that training started from; with an adapter, with the adapter off",
        severity="note" if unsure else None,
    )


def dropped(history: History, thresholds: Thresholds) -> CheckResults:
    """KL that falls to next to nothing from one step to the next: the reference was replaced."""
    if history.kl is None:
        yield not_recorded("reference/moving", KL)
        return
    if history.moves_reference:
        return
    name, series = history.kl
    finite = series.finite
    drops = []
    least = max(thresholds["kl_at_start"], (6 if name.endswith("k1") else 3) * noise(series)[0])
    for index in range(5, len(finite) - 2):
        before, after = finite.values[index - 5 : index], finite.values[index : index + 3]
        usual = sorted(before)[2]
        if usual > least and after[0] <= thresholds["reference_follows"] * usual and max(after) < 0.5 * min(before):
            drops.append((int(finite.steps[index]), usual, after[0]))
    if not drops:
        return
    step, usual, after_drop = drops[0]
    known = bool(history.config)
    more = f"; so it does at {len(drops)} steps" if len(drops) > 1 else ""
    yield finding(
        "reference/moving",
        f"{name} falls from {usual:.3g} to {after_drop:.2g} nats per token at step {step}{more}",
        "the reference was replaced by the policy of that moment: a resume that took the checkpoint as reference, or a "
        "reference that is synced",
        "load the reference from where training started, also after a resume; if it is meant to be synced, nothing",
        severity=None if known or len(drops) == 1 else "warning",
    )


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


def unneeded(history: History, thresholds: Thresholds) -> CheckResults:
    """A penalty that the recipe means to be without."""
    loss_type, beta = history.option("loss.loss_type"), history.figure("kl.beta")
    if not isinstance(loss_type, str) or beta is None:
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


CHECKS = (at_start, below_zero, explosion, over_budget, not_learning, follows, dropped, penalty, unneeded, pairing)
