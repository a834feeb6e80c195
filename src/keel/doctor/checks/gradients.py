"""Gradients: none at all, not finite, spiking, or cut down at every step."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

from keel.doctor.advice import changes, either, setting, times
from keel.doctor.checks.base import (
    CheckResults,
    clear,
    not_recorded,
    omitted_steps,
    opt,
    reward_ranges,
    reward_rose,
)
from keel.doctor.checks.reward import advantage_size
from keel.doctor.findings import Options, finding
from keel.doctor.history import History, Series, step_of
from keel.doctor.shapes import LEAST, course, median
from keel.doctor.thresholds import Thresholds


def no_gradient(history: History, thresholds: Thresholds) -> CheckResults:
    """A gradient of 0 at steps whose groups differ in reward."""
    code, norms = "loss/no-gradient", history.get("grad/norm")
    differing = _differing(history, thresholds)
    without = _moved_without(history, norms, thresholds) if norms is not None else ""
    if without:
        yield finding(
            code,
            without,
            "what moves the policy is not the gradient of its loss: weight decay, noise that is added to the weights, "
            "or weights that are written from elsewhere; the loss is detached, or scaled to nothing",
            either(
                times(history.config, "optim.weight_decay", 0.01, "a hundredth of", history.source),
                "take the gradient of the loss on one batch; see what else writes weights",
                joined="; and ",
            ),
        )
        return
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


def _moved_without(history: History, norms: Series, thresholds: Thresholds) -> str:
    """That the policy goes away from its start under next to no gradient, and gains nothing; "" where it does not."""
    usual, moved = median(norms), course(history.kl[1]) if history.kl is not None else None
    if usual > thresholds["grad_moves"] or moved is None or history.kl is None or history.moves_reference:
        return ""
    far = moved.size > 0 and moved.after > thresholds["kl_without_gain"] and clear(moved, thresholds)
    if not far or reward_rose(history, thresholds):
        return ""
    return (
        f"the gradient norm is {usual:.2g} (median over {norms.span}), while {history.kl[0]} goes from "
        f"{moved.before:.2g} to {moved.after:.3g} nats per token (chance under noise: {moved.chance:.1g})"
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
    made = [(step, math.log(value)) for step, value in live if step not in skipped_steps]  # what doubles is a line
    growth = course(Series.of(made))
    leap = max((after - before for (_, before), (_, after) in pairwise(made)), default=0.0)
    steep = growth is not None and growth.size > max(math.log(thresholds["grad_spike"]), 2 * leap)
    if growth is not None and steep and clear(growth, thresholds):
        yield finding(
            "optim/spike",
            f"the gradient norm grows from {math.exp(growth.before):.3g} to {math.exp(growth.after):.3g} over "
            f"{series.span} (chance under noise: {growth.chance:.1g})",
            "updates become larger, or rewards and log-ratios more extreme, as the run goes on",
            times(history.config, "optim.learning_rate", 0.3, "a third of", history.source),
        )
        return
    if not spikes:
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


CHECKS = (no_gradient, non_finite, spike, cut_down)
