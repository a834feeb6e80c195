"""How far updates take the policy: too far at once, nowhere, or back to 0 by weight decay."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from keel.doctor.advice import either, setting, times, warmed_up
from keel.doctor.checks.base import (
    KL,
    MOVED,
    RECENT,
    CheckResults,
    Unchecked,
    level,
    movement,
    not_recorded,
    opt,
    reward_rose,
    reward_trend,
)
from keel.doctor.checks.clip import unlike
from keel.doctor.findings import Finding, finding
from keel.doctor.history import KL_NAMES, History, early_moves
from keel.doctor.shapes import LEAST, frozen_since, median
from keel.doctor.thresholds import Thresholds


def lr_too_high(history: History, thresholds: Thresholds) -> CheckResults:
    """How far single updates move the policy, while the learning rate first reaches its full size."""
    code, limit = "optim/lr-too-high", thresholds["kl_per_update"]
    within = history.get("kl/old_policy/k3/mean") or history.get("kl/old_policy/k1/mean")
    if within is not None and within.head(RECENT).mean > limit and not unlike(history, thresholds):
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
    """A rate of 0 for a lasting part of the run, or a policy that stands still, or starts again, and should not."""
    yield from _again(history, thresholds)
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
    if history.kl is not None and any(history.kl[1].finite.values):  # one of zeros is that of no reference
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


def _again(history: History, thresholds: Thresholds) -> CheckResults:
    """A stretch of the log that comes back to the last digit: the same batches under the same weights."""
    names = [name for name in (*TOLD, *KL_NAMES) if history.get(name) is not None]
    steps = sorted(set.intersection(*(set(history.series[name].steps) for name in names))) if names else []
    rows = [dict(zip(history.series[n].steps, history.series[n].values, strict=True)) for n in names]
    lines = [tuple(row[step] for row in rows) for step in steps]
    lag, first, count = _repeated(lines)
    fresh = lines[:first]
    pairs = len(fresh) * (len(fresh) - 1) / 2
    same = sum(n * (n - 1) / 2 for n in Counter(fresh).values())
    different = len(set(lines[first : first + count]))
    chance = len(lines) ** 2 * ((same + 1) / (pairs + 1)) ** different
    if count > thresholds["idle_share"] * len(lines) and different >= STRETCH and chance <= level(thresholds):
        yield finding(
            "optim/no-update",
            f"the {lag} lines before step {steps[first]:.0f} come back to the last digit in the {count} lines from "
            f"there on, in {', '.join(names)}",
            "the same weights meet the same batches again: a checkpoint is restored over and over while steps are "
            "counted on, so that what the updates did in between is lost",
            "see what restores weights, and how often; weights, optimizer and the place in the data go on from the "
            "last step that was made",
        )


def _repeated(lines: Sequence[tuple[float, ...]]) -> tuple[int, int, int]:
    """(lag, first line, number of lines) of the longest stretch whose lines equal those a fixed number before them."""
    seen: dict[tuple[float, ...], int] = {}
    best, lag, first = (0, 0, 0), 0, 0
    for index, line in enumerate(lines):
        apart = index - seen[line] if line in seen else 0
        seen[line] = index
        if apart != lag:
            lag, first = apart, index
        if lag and index + 1 - first > best[2]:
            best = (lag, first, index + 1 - first)
    return best


TOLD = (*MOVED, "grad/norm", "loss/total", "loss/policy")  # what a new batch or another policy changes
STRETCH = 5  # different lines at least: one that stays is another matter


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


CHECKS = (lr_too_high, no_update, decayed)
