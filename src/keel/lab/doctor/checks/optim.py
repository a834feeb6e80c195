"""Updates: too large, not finite, spiking, all clipped, or undone by a guard."""

from __future__ import annotations

import math
import statistics

from keel.base.thresholds import Thresholds
from keel.lab.doctor.advice import changes, either, setting, times, warmed_up
from keel.lab.doctor.checks.base import (
    KL,
    RECENT,
    CheckResults,
    Unchecked,
    clear,
    movement,
    not_recorded,
    omitted_steps,
    opt,
    reward_ranges,
    reward_rose,
    reward_trend,
)
from keel.lab.doctor.checks.reward import advantage_size
from keel.lab.doctor.early import early_moves
from keel.lab.doctor.findings import CODES, Finding, Options, finding
from keel.lab.doctor.history import History, step_of
from keel.lab.doctor.shapes import LEAST, frozen_since, median, trend


def lr_too_high(history: History, thresholds: Thresholds) -> CheckResults:
    """How far single updates move the policy, while the learning rate first reaches its full size."""
    code, limit = "optim/lr-too-high", thresholds["kl_per_update"]
    within = history.get("kl/old_policy/k3/mean") or history.get("kl/old_policy/k1/mean")
    if within is not None and within.head(RECENT).mean > limit and not _unlike(history, thresholds):
        yield _too_high(history, f"KL(old‖policy) within a batch is {within.head(RECENT).mean:.3g} nats per token")
        return
    if history.kl is None:
        yield not_recorded(code, KL)
        return
    name, series = history.kl
    if series.finite.steps[0] <= 1 and abs(series.finite.values[0]) > thresholds["kl_at_start"]:
        yield Unchecked(code, "KL is not 0 at the start, so its changes do not measure the updates")
        return
    moves = early_moves(history)
    first, value = series.finite.steps[0], series.finite.values[0]
    if first > 1 and 2 * value > limit * first:  # a mean over the steps up to here, so about half of what they moved
        yield _too_high(history, f"{name} is {value:.3g} nats per token already at step {first:.0f}")
        return
    if not moves:
        yield Unchecked(code, "no two neighbouring steps at the start of the run have a KL")
        return
    largest, step = max(moves)
    if largest > limit:
        yield _too_high(history, f"the update before step {step} moved {name} by {largest:.3g} nats per token")


def _too_high(history: History, evidence: str) -> Finding:
    rates, norms, clips = (history.get(n) for n in ("optim/learning_rate", "grad/norm", "grad/clip_factor"))
    if rates is not None:
        evidence += f" at a learning rate of {max(rates.finite.values):.3g}"
    if norms is not None:
        evidence += f"; gradient norm {norms.finite.head(5).mean:.3g} over {norms.head(5).span}"
    if clips is not None:
        evidence += f", clipped to {100 * clips.finite.head(5).mean:.0f} %"
    return finding(
        "optim/lr-too-high",
        evidence,
        "the learning rate is too high: an update leaves the region in which its advantages were estimated",
        either(
            times(history.config, "optim.learning_rate", 0.1, "a tenth of", history.source),
            setting("a warm-up, {}", warmed_up(history.config) if history.source == "keel" else {}, "a longer warm-up"),
        ),
    )


def no_update(history: History, thresholds: Thresholds) -> CheckResults:
    """A rate of 0 for a lasting part of the run, or a policy that stands still although it should not."""
    code, rates = "optim/no-update", history.get("optim/learning_rate")
    name = opt(history, "optim.learning_rate")
    if rates is not None:
        idle = [int(s) for s, v in zip(rates.steps, rates.values, strict=True) if v == 0]
        if len(idle) >= 3 and len(idle) > thresholds["idle_share"] * len(rates.finite):
            yield finding(
                code,
                f"the learning rate is 0 at {len(idle)} of {len(rates.finite)} logged steps, from step {idle[0]} to "
                f"step {idle[-1]}",
                "an update at rate 0 changes nothing: the rate itself, a schedule that ends before the run does, or a "
                "warm-up that does not begin",
                f"set {name}, and the schedule's number of steps to the run's",
            )
            return
    held, unchanged = _held_back(history, thresholds), _unchanged(history)
    still, since = _standstill(history, thresholds)
    still = unchanged or still or (held if _nothing_learned(history, thresholds) else None)
    if still is None:
        if history.kl is None and history.get("entropy/mean") is None:
            yield not_recorded(code, f"{KL} or the entropy")
        return
    if unchanged is None and (moving := movement(history.since(since), thresholds)) is not None:
        yield Unchecked(code, f"{still}, yet {moving}: the policy moves")
        return
    silent = history.get("reward/zero_variance_fraction")
    if silent is not None and silent.mean > thresholds["zero_variance_groups"]:
        yield Unchecked(code, f"{still}, and no group's rewards differ: there is nothing to move it")
        return
    if rates is not None and rates.finite.values[-1] == max(rates.finite.values) > rates.finite.values[0]:
        still += f"; the learning rate is still rising at the last step ({rates.finite.values[-1]:.3g})"
        if history.steps < thresholds["steps_to_judge"]:
            yield Unchecked(code, still)
            return
    elif rates is not None:
        still += f"; the learning rate is {median(rates):.3g}"
    norms = history.get("grad/norm")
    still += f"; {held}" if held and held not in still else ""
    looser = {opt(history, "optim.max_grad_norm"): 1.0} if held and held.startswith("clipping") else {}
    yield finding(
        code,
        still + (f"; the gradient norm is {median(norms):.3g}" if norms is not None else ""),
        "updates do not reach the weights that are sampled and scored: a rate that is next to nothing, a warm-up "
        "longer than the run, gradients clipped to nothing, frozen parameters, or weights in a type that rounds the "
        "update away",
        either(
            setting("set {}", looser)
            if looser
            else times(history.config, "optim.learning_rate", 100, "a hundred times", history.source),
            f"see {opt(history, 'optim.max_grad_norm')}, what is trainable, and keep the weights in float32",
            joined="; ",
        ),
    )


def _unchanged(history: History) -> str | None:
    """That every weight is what it was, where a run recorded fingerprints before and after and made updates."""
    recorded = [event for event in history.events if event.get("kind") == "weights"]
    skipped = history.get("guard/skipped")
    if not recorded or history.steps < 1 or (skipped is not None and skipped.mean == 1):
        return None
    before, after = recorded[-1].get("before"), recorded[-1].get("after")
    return (
        f"every weight after step {history.steps} is as before training ({before})"
        if before and before == after
        else None
    )


def _held_back(history: History, thresholds: Thresholds) -> str | None:
    """What leaves next to nothing of an update: gradients clipped to a trifle, or a rate far under every recipe's."""
    norms, factors, rates = (history.get(n) for n in ("grad/norm", "grad/clip_factor", "optim/learning_rate"))
    limit = history.figure("optim.max_grad_norm")
    left = median(factors) if factors is not None else 1.0
    if norms is not None and limit is not None and (usual := median(norms)) > 0 and limit > 0:
        left = min(left, limit / usual)
    if left < thresholds["grad_left"]:
        at = f" at {opt(history, 'optim.max_grad_norm')} = {limit:g}" if limit is not None else ""
        return f"clipping leaves {left:.2g} of the gradient{at}"
    if rates is not None and 0 < max(rates.finite.values) < thresholds["rate_tiny"]:
        return f"the learning rate is at most {max(rates.finite.values):.3g}"
    return None


def _nothing_learned(history: History, thresholds: Thresholds) -> bool:
    """Whether neither the reward nor the KL, where it is measured from a fixed point, has gone anywhere to speak of."""
    gain = reward_trend(history)
    if gain is None or gain.z_score > thresholds["flat_reward"] or history.steps < thresholds["steps_to_judge"]:
        return False
    return history.kl is None or history.kl[1].tail(RECENT).mean < thresholds["kl_not_learning"]


def _standstill(history: History, thresholds: Thresholds) -> tuple[str | None, int]:
    """What shows that the policy does not change: no KL at all, or a figure the same to the last digit; and since when.

    A KL to a reference that moves along shows nothing.
    """
    if history.kl is not None and len(history.kl[1].finite) >= LEAST and not history.moves_reference:
        name, series = history.kl
        most = max(abs(value) for value in series.finite.values)
        if most <= thresholds["kl_no_move"] and (most > 0 or not history.unpenalized):
            return f"{name} is at most {most:.2g} nats per token in {len(series.finite)} logged steps", 0
        since, count = frozen_since(series)
        if most > 0 and count >= max(LEAST, thresholds["idle_share"] * len(series)) and series.finite.values[-1] != 0:
            return f"{name} is {series.finite.values[-1]:.6g} at every step since step {since}", since
    if history.kl is not None:
        return None, 0
    for name, text in FROZEN.items():
        if (figures := history.get(name)) is None:
            continue
        (since, count), value = frozen_since(figures), figures.finite.values[-1]
        least = thresholds["entropy_collapse"] if name == "entropy/mean" else 0.0
        if count >= max(LEAST, thresholds["idle_share"] * len(figures)) and abs(value) > least:
            return f"{text} is {value:.6g} at every step since step {since}", since
    return None, 0


# What a new batch changes, if only in its last digits; not what may be 0 for good reasons.
FROZEN = {"entropy/mean": "the entropy", "grad/norm": "the gradient norm", "loss/total": "the loss"}


def no_gradient(history: History, thresholds: Thresholds) -> CheckResults:
    """A gradient of 0 at steps whose groups differ in reward."""
    code, norms = "loss/no-gradient", history.get("grad/norm")
    differing = _differing(history, thresholds)
    if norms is None or differing is None:
        yield not_recorded(code, "the gradient norm" if norms is None else "whether the groups' rewards differ")
        return
    finite = norms.finite
    live = [(s, v) for s, v in zip(finite.steps, finite.values, strict=True) if s in differing]
    zero = [int(s) for s, v in live if v <= thresholds["grad_zero"]]
    if len(zero) >= 3 and len(zero) > thresholds["idle_share"] * len(live):
        rates = history.get("optim/learning_rate")
        yield finding(
            code,
            f"the gradient norm is at most {thresholds['grad_zero']:g} at {len(zero)} of {len(live)} logged steps "
            f"whose groups differ in reward, first at step {zero[0]}"
            + (f"; the learning rate is {median(rates):.3g}" if rates is not None else ""),
            "the loss does not depend on the trained weights: it is detached, every token is masked out of it, "
            "advantages are lost on the way, or nothing that is trainable is used",
            "take the gradient of the loss on one batch; see the loss mask, requires_grad, and where advantages are "
            "multiplied in",
        )


def _differing(history: History, thresholds: Thresholds) -> set[float] | None:
    """The steps at which groups differ in reward; None where the log does not show it."""
    silent = history.get("reward/zero_variance_fraction")
    if silent is not None:
        limit = thresholds["zero_variance_groups"]
        return {s for s, v in zip(silent.steps, silent.values, strict=True) if v < limit}
    spreads = [history.get("reward/within_group_std") or history.get("advantage/max"), reward_ranges(history)]
    if spreads[0] is None:
        return None
    return set.intersection(
        *({s for s, v in zip(x.steps, x.values, strict=True) if v > 0} for x in spreads if x is not None)
    )


def non_finite(history: History, thresholds: Thresholds) -> CheckResults:
    """Steps whose loss or gradient was no number; updates that were skipped as spikes are none of them."""
    watched = [history.series[name] for name in ("loss/total", "loss/policy", "grad/norm") if name in history.series]
    skipped = history.get("guard/nonfinite") or history.get("guard/skipped")
    if not watched and skipped is None:
        yield not_recorded("optim/non-finite", "loss, gradient norm or skipped updates")
        return
    bad_steps = {step for series in watched for step in series.bad_steps}
    for name in ("loss/total", "grad/norm"):
        bad_steps.update(omitted_steps(history, name, "optim/learning_rate"))
    if skipped is not None:
        bad_steps |= {int(step) for step, value in zip(skipped.steps, skipped.values, strict=True) if value > 0}
    skips = [event for event in history.events if event.get("kind") == "guard/skipped"]  # also of abandoned attempts
    bad = bad_steps | {step_of(event) for event in skips if event.get("cause") != "spike"}
    if not bad:
        return
    steps = max(len(series) for series in (*watched, *([skipped] if skipped is not None else [])))
    lasting = bool(bad_steps) and (
        len(bad_steps) > thresholds["skipped_share"] * steps or max(bad_steps) >= history.steps
    )
    shown = ", ".join(map(str, sorted(bad)[:5])) + (" …" if len(bad) > 5 else "")
    yield finding(
        "optim/non-finite",
        f"{len(bad)} steps had a loss or gradient that is not finite (steps {shown}), {len(bad_steps)} of them among "
        f"the {steps} that count",
        "a reward that is NaN, log-probabilities of −inf, an overflow in half precision, or an explosion before it",
        either(
            either(
                setting("{} to rule out precision", _in_full(history), "full precision to rule rounding out"),
                times(history.config, "optim.learning_rate", 0.1, "a tenth of", history.source),
            ),
            "the kept batch of a skipped step shows which number was first",
            joined="; ",
        ),
        severity="error" if lasting else "warning",
    )


def _in_full(history: History) -> Options:
    return changes(history.config, {"model.dtype": "float32"}) if history.source == "keel" else {}


def spike(history: History, thresholds: Thresholds) -> CheckResults:
    """Gradient norms far above those of the updates before them; a few of many are only noted, clipping holds them."""
    series = history.get("grad/norm")
    if series is None:
        yield not_recorded("optim/spike", "the gradient norm")
        return
    finite = series.finite
    live = [(step, value) for step, value in zip(finite.steps, finite.values, strict=True) if value > 0]
    skipped_steps = _skipped_steps(history)
    spikes: list[tuple[int, float, float]] = []
    applied: list[float] = []
    for at, norm in live:
        usual = statistics.median(applied[-50:]) if len(applied) >= 10 else None
        if usual and norm > thresholds["grad_spike"] * usual:
            spikes.append((int(at), norm, usual))
        if at not in skipped_steps:  # a spike that was skipped must not become the usual
            applied.append(norm)
    growth = trend(series)
    if not spikes:
        if (
            growth is not None
            and clear(growth, thresholds)
            and growth.after > thresholds["grad_spike"] * growth.before > 0
        ):
            yield finding(
                "optim/spike",
                f"the gradient norm grows from {growth.before:.3g} to {growth.after:.3g} over {series.span} (chance "
                f"under noise: {growth.chance:.1g})",
                "updates become larger, or rewards and log-ratios more extreme, as the run goes on",
                times(history.config, "optim.learning_rate", 0.3, "a third of", history.source),
            )
        return
    step, value, median = max(spikes, key=lambda item: item[1] / item[2])
    skipped = sum(at in skipped_steps for at, _, _ in spikes)
    many = len(spikes) >= 3 and len(spikes) > thresholds["spike_share"] * len(live)
    unclipped = history.source == "keel" and history.option("optim.max_grad_norm") is None and bool(history.config)
    yield finding(
        "optim/spike",
        f"{len(spikes)} of {len(live)} steps spike; the largest is {value:.3g} at step {step}, "
        f"{value / median:.0f} times the running median of {median:.3g}"
        + (f"; {skipped} of them were skipped" if skipped else ""),
        "a rare completion with a large advantage or a large log-ratio rules the update",
        either(
            either(
                setting("{}, the running median", _clipped(history, median)),
                setting("{}", changes(history.config, {"guards.on_spike": "skip"}) if history.source == "keel" else {}),
            ),
            "look at that step's rollouts",
            joined="; ",
        ),
        severity="warning" if many or unclipped else "note",
    )


def _clipped(history: History, median: float) -> Options:
    """Clipping at the usual norm, where it is looser than that."""
    now, limit = history.option("optim.max_grad_norm"), float(f"{median:.2g}")
    loose = now is None or (isinstance(now, int | float) and now > limit)
    return {opt(history, "optim.max_grad_norm"): limit} if loose else {}


def _skipped_steps(history: History) -> set[float]:
    """Steps that made none of their updates."""
    shares = history.get("guard/skipped")
    return set() if shares is None else {s for s, v in zip(shares.steps, shares.values, strict=True) if v >= 1}


def all_clipped(history: History, thresholds: Thresholds) -> CheckResults:
    """The share of tokens whose ratio is clipped, now or on average, and ratios that no update can have made."""
    code, share = "ratio/all-clipped", history.get("ratio/clip_fraction")
    low, high = history.get("ratio/clip_low_fraction"), history.get("ratio/clip_high_fraction")
    unlike = _unlike(history, thresholds)
    sides = [share] if share is not None else [side for side in (low, high) if side is not None]
    if not sides and history.get("ratio/mean") is None:
        yield not_recorded(code, "the share of clipped ratios")
    mean = max(sum(side.mean for side in sides), sum(side.finite.tail(RECENT).mean for side in sides))
    clipped = mean > thresholds["clipped_ratios"]
    if clipped or unlike:
        yield finding(
            code,
            "; ".join(filter(None, (f"{100 * mean:.0f} % of the ratios are clipped on average" * clipped, unlike))),
            "old and current log-probabilities are not the same quantity: sums against means, filtered against "
            "unfiltered, another temperature, another mask",
            "take both from the same scoring function at the sampling temperature; keel doctor on the configuration "
            "compares them",
        )


def _unlike(history: History, thresholds: Thresholds) -> str:
    """What shows that old and current log-probabilities are not those of one policy some updates apart; "" if nothing.

    The policy is then far from the one that sampled and has gone nowhere, or ratios do not have a mean of 1.
    """
    within = history.get("kl/old_policy/k3/mean") or history.get("kl/old_policy/k1/mean")
    if within is not None and history.kl is not None:
        apart, moved = within.finite.head(RECENT).mean, max(history.kl[1].finite.head(RECENT).values)
        if apart > max(thresholds["kl_per_update"], UNLIKE * max(moved, thresholds["kl_at_start"])):
            return (
                f"KL(old‖policy) is {apart:.3g} nats per token over {within.head(RECENT).span}, and {KL} at most "
                f"{moved:.2g} in the same steps"
            )
    ratio = history.get("ratio/mean")
    if ratio is not None and abs(median(ratio) - 1) > thresholds["sampler_ratio"]:
        return f"the mean ratio is {median(ratio):.3g} (median over {ratio.span}), and 1 by definition"
    return ""


UNLIKE = 10  # times what the policy has moved: twice the distance is four times the KL


def decayed(history: History, thresholds: Thresholds) -> CheckResults:
    """What decoupled weight decay leaves of the first update at the run's end: exp(−Σ rate · decay)."""
    code, rates, decays = "optim/weight-decay", history.get("optim/learning_rate"), history.get("optim/weight_decay")
    decay = median(decays) if decays is not None else history.figure("optim.weight_decay")
    if rates is None or decay is None:
        yield not_recorded(code, "the learning rate" if rates is None else "the weight decay")
        return
    steps = history.steps - int(rates.finite.steps[0]) + 1
    left = math.exp(-max(0.0, decay) * max(0.0, rates.mean) * steps)
    harmed = left < thresholds["decay_harmless"] and not reward_rose(history, thresholds)
    if left < thresholds["decay_left"] or harmed:
        yield finding(
            code,
            f"a weight decay of {decay:.3g} at a mean learning rate of {rates.mean:.3g} leaves {100 * left:.2g} % of "
            f"the weights after {steps} steps",
            "the weights shrink by more than any gradient moves them",
            times(history.config, "optim.weight_decay", 0.01, "a hundredth of", history.source),
        )


def guards(history: History, thresholds: Thresholds) -> CheckResults:
    """What the loop's guards did, in their own words."""
    if not any(event.get("kind") in ("stop", "rollback") for event in history.events):
        return
    from keel.trainer.guards import guard_findings

    for fields in guard_findings(history.events):
        if fields["code"] in CODES:  # a log made by hand may name any
            yield finding(**fields)


def skips(history: History, thresholds: Thresholds) -> CheckResults:
    """The share of updates that guards have skipped."""
    code, skipped = "guard/skips-all", history.get("guard/skipped")
    if skipped is None:
        yield not_recorded(code, "the share of skipped updates")
    elif len(skipped.finite) >= RECENT and skipped.mean > thresholds["skipped_most"]:
        reasons = {"guard/nonfinite": "not finite", "guard/spike": "spikes", "guard/over_budget": "over the KL budget"}
        shares = {text: series.mean for name, text in reasons.items() if (series := history.get(name)) is not None}
        counted = ", ".join(f"{100 * share:.0f} % {text}" for text, share in shares.items() if share > 0)
        yield finding(
            code,
            f"guards skipped {100 * skipped.mean:.0f} % of the updates over {skipped.span}"
            + (f" ({counted})" if counted else ""),
            "a guard that is for the rare answers to the usual: its limit lies within what ordinary updates scatter by",
            either(
                setting("{}", changes(history.config, {"guards.on_spike": "warn"}) if history.source == "keel" else {}),
                "a looser limit of the guard; events.jsonl names which one skipped",
            ),
        )


def cut_down(history: History, thresholds: Thresholds) -> CheckResults:
    """Gradients that are far above their limit from the first step to the last, by norm and by limit."""
    code, norms = "loss/scale", history.get("grad/norm")
    limit = history.figure("optim.max_grad_norm")
    usual = limit is None and history.source in TRAINERS
    if norms is None or (limit is None and not usual):
        yield not_recorded(code, "the gradient norm" if norms is None else "the limit on the gradient norm")
        return
    limit = 1.0 if limit is None else limit
    least = thresholds["grad_cut_down"] * max(limit, 1.0)
    if limit <= 0 or len(norms.finite) < LEAST or min(norms.finite.values) <= least:
        return
    middle = median(norms)
    size = advantage_size(history)
    large = size is not None and size[0] > thresholds["reward_scale"]
    name = opt(history, "optim.max_grad_norm")
    yield finding(
        "reward/scale" if large else code,
        f"the gradient norm is {middle:.3g} (median over {norms.span}) and never under {min(norms.finite.values):.3g}: "
        f"{name} = {limit:g}{', the usual default,' if usual else ''} divides every update by {middle / limit:.3g}"
        + (f"; {size[1]} {size[0]:.3g}" if size is not None and large else ""),
        "the reward's scale multiplies the gradient, and clipping leaves only its direction"
        if large
        else "the loss is a sum where it is meant as a mean, over tokens or completions, or is multiplied by a scale: "
        "clipping leaves only the direction of an update, so that a batch that says little moves as much as one that "
        "says a lot",
        "divide the reward, or let advantages be divided by their deviation"
        if large
        else f"see what the loss is divided by (tokens, completions, accumulation steps); with {name} near the usual "
        "norm only what is rare is clipped",
        severity="warning",
    )


TRAINERS = ("TRL", "verl", "OpenRLHF", "NeMo-RL", "prime-rl")  # each clips at 1 unless told otherwise

CHECKS = (lr_too_high, no_update, no_gradient, non_finite, all_clipped, decayed, spike, skips, cut_down, guards)
