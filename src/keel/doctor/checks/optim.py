"""Update sizes: too large, zero, undone by weight decay, or clipped."""

from __future__ import annotations

import math

from keel.doctor.advice import either, setting, warmed_up
from keel.doctor.checks.base import (
    KL,
    RECENT,
    CheckResults,
    Log,
    Missing,
    check,
    joined,
    not_shown,
    percent,
)
from keel.doctor.findings import Finding, finding
from keel.doctor.history import Series, early_moves
from keel.doctor.shapes import LEAST, frozen_since, median, swings

# Metrics that change with every batch, at least in the last digits, and are not legitimately 0.
FROZEN = {"entropy/mean": "the entropy", "grad/norm": "the gradient norm", "loss/total": "the loss"}
CLIPPED = ("ratio/clip_fraction", "ratio/clip_low_fraction", "ratio/clip_high_fraction")
WITHIN = ("kl/old_policy/k3/mean", "kl/old_policy/k1/mean")  # KL(old‖policy) between a batch's first and last update
RESTARTS = 5  # a schedule with warm-up and decay that is resumed once makes four swings
UNLIKE = 10  # factor over the KL to the reference; KL grows with the square of the distance
RATE, NORM = "optim/learning_rate", "grad/norm"


def _within_batch(log: Log) -> Series | None:
    return next((series for name in WITHIN if (series := log.get(name)) is not None), None)


@check("optim/lr-too-high")
def lr_too_high(log: Log) -> CheckResults:
    """A large KL within a batch, or of single updates until shortly after the learning rate first peaks."""
    within, limit = _within_batch(log), log.limits["kl_per_update"]
    if within is not None and within.head(RECENT).mean > limit and not unlike(log):
        yield _too_high(log, f"KL(old‖policy) within a batch is {within.head(RECENT).mean:.3g} nats per token")
        return
    name, series = log.need_kl
    first, value, moves = series.finite.steps[0], series.finite.values[0], early_moves(log)
    if first <= 1 and abs(value) > log.limits["kl_at_start"]:
        raise Missing("KL is not 0 at the start, so its changes do not measure the updates")
    if first > 1 and 2 * value > limit * first:  # a mean over the steps so far, so about half of the KL
        yield _too_high(log, f"{name} is {value:.3g} nats per token already at step {first:.0f}")
    elif not moves:
        raise Missing("no two neighbouring steps at the start of the run have a KL")
    elif max(moves)[0] > limit:
        largest, step = max(moves)
        yield _too_high(log, f"the update before step {step} moved {name} by {largest:.3g} nats per token")


def _too_high(log: Log, evidence: str) -> Finding:
    if (rates := log.get(RATE)) is not None:
        evidence += f" at a learning rate of {max(rates.finite.values):.3g}"
    slower = setting("a warm-up, {}", warmed_up(log.config) if log.source == "keel" else {}, "a longer warm-up")
    return finding(
        "optim/lr-too-high",
        evidence,
        "the learning rate is too high: an update leaves the region in which its advantages were estimated",
        either(log.rate(0.1, "a tenth of"), slower),
    )


@check()
def restarts(log: Log) -> CheckResults:
    """A learning rate that rises and falls repeatedly."""
    rates, swing = log.get(RATE), log.limits["controller_swing"]
    if rates is None or (turns := swings(rates, swing)) < RESTARTS:
        return
    low, high = min(value for value in rates.finite.values if value > 0), max(rates.finite.values)
    yield finding(
        "optim/no-update" if _nothing_learned(log) else "optim/lr-too-high",
        f"the learning rate changes direction {turns} times, each time by more than a factor of {swing:g}, between "
        f"{low:.3g} and {high:.3g}",
        "the schedule starts again at each resume or epoch, or the scheduler is stepped twice: updates alternate "
        "between too large and almost zero",
        f"use one warm-up and one decay over the run: check {log.opt('optim.learning_rate')}, the schedule's number "
        "of steps, and where the scheduler is stepped",
        severity="warning",
    )


@check("optim/no-update")
def no_update(log: Log) -> CheckResults:
    """A learning rate of 0 for a long part of the run, or a policy that does not change although it should."""
    rates, norms, silent = (log.get(n) for n in (RATE, NORM, "reward/zero_variance_fraction"))
    idle = rates.where(lambda value: value == 0) if rates is not None else []
    if rates is not None and len(idle) >= 3 and len(idle) > log.limits["idle_share"] * len(rates.finite):
        yield finding(
            "optim/no-update",
            f"the learning rate is 0 at {len(idle)} of {len(rates.finite)} logged steps, from step {idle[0]} to "
            f"step {idle[-1]}",
            "updates with a learning rate of 0 change nothing: the configured rate is 0, the schedule ends before the "
            "run, or the warm-up does not begin",
            f"set {log.opt('optim.learning_rate')} above 0, and the schedule's number of steps to that of the run",
        )
        return
    held, unchanged = _held_back(log), _unchanged(log)
    still, since = _standstill(log)
    still = unchanged or still or (held if _nothing_learned(log) else None)
    if still is None:
        if log.kl is None and log.get("entropy/mean") is None:
            raise not_shown(f"{KL} or the entropy")
        return
    if unchanged is None and (moving := log.since(since).movement) is not None:
        raise Missing(f"{still}, yet {moving}: the policy moves")
    if silent is not None and silent.mean > log.limits["zero_variance_groups"]:
        raise Missing(f"{still}, and the rewards of every group are equal, so there is no policy gradient")
    if rates is not None and rates.finite.values[-1] == max(rates.finite.values) > rates.finite.values[0]:
        still += f"; the learning rate is still rising at the last step ({rates.finite.values[-1]:.3g})"
        if log.steps < log.limits["steps_to_judge"]:
            raise Missing(still)
    elif rates is not None:
        still += f"; the learning rate is {median(rates):.3g}"
    limit = log.opt("optim.max_grad_norm")
    clipped = held is not None and held.startswith("clipping")
    yield finding(
        "optim/no-update",
        joined(
            still,
            held if held and held not in still else None,
            f"the gradient norm is {median(norms):.3g}" if norms is not None else None,
        ),
        "updates do not change the weights that are sampled and scored: the learning rate is almost 0, the warm-up is "
        "longer than the run, gradients are clipped to almost 0, parameters are frozen, or the data type of the "
        "weights "
        "rounds the updates away",
        either(
            setting("set {}", {limit: 1.0}) if clipped else log.rate(100, "a hundred times"),
            f"check {limit} and which parameters are trainable, and keep the weights in float32",
            joined="; ",
        ),
    )


def _unchanged(log: Log) -> str | None:
    """Evidence that no weight changed during training, by the fingerprints in the log; None if there is none."""
    recorded = [event for event in log.events if event.get("kind") == "weights"]
    skipped = log.get("guard/skipped")
    if not recorded or log.steps < 1 or (skipped is not None and skipped.mean == 1):
        return None
    before, after = recorded[-1].get("before"), recorded[-1].get("after")
    same = before and before == after
    return f"every weight after step {log.steps} is as before training ({before})" if same else None


def _held_back(log: Log) -> str | None:
    """The reason for tiny updates, as text: strong gradient clipping, or a learning rate far below any recipe's."""
    norms, factors, rates = (log.get(n) for n in (NORM, "grad/clip_factor", RATE))
    limit = log.figure("optim.max_grad_norm")
    left = median(factors) if factors is not None else 1.0
    if norms is not None and limit is not None and (usual := median(norms)) > 0 and limit > 0:
        left = min(left, limit / usual)
    if left < log.limits["grad_left"]:
        at = f" at {log.opt('optim.max_grad_norm')} = {limit:g}" if limit is not None else ""
        return f"clipping leaves {left:.2g} of the gradient{at}"
    if rates is not None and 0 < max(rates.finite.values) < log.limits["rate_tiny"]:
        return f"the learning rate is at most {max(rates.finite.values):.3g}"
    return None


def _nothing_learned(log: Log) -> bool:
    """Whether neither the reward nor a KL to a fixed reference has changed noticeably."""
    if log.trend is None or log.rose or log.steps < log.limits["steps_to_judge"]:
        return False
    return log.kl is None or log.kl[1].tail(RECENT).mean < log.limits["kl_not_learning"]


def _standstill(log: Log) -> tuple[str | None, int]:
    """Evidence that the policy does not change, and the first such step: no KL, or a metric that is exactly constant.

    A KL to a moving reference is no evidence.
    """
    idle = log.limits["idle_share"]
    if log.kl is not None and len(log.kl[1].finite) >= LEAST and not log.moves_reference:
        name, series = log.kl
        most = max(abs(value) for value in series.finite.values)
        if most <= log.limits["kl_no_move"] and (most > 0 or not log.unpenalized):
            return f"{name} is at most {most:.2g} nats per token in {len(series.finite)} logged steps", 0
        since, count = frozen_since(series)
        if most > 0 and count >= max(LEAST, idle * len(series)) and series.finite.values[-1] != 0:
            return f"{name} is {series.finite.values[-1]:.6g} at every step since step {since}", since
    if log.kl is not None and any(log.kl[1].finite.values):  # a KL of only zeros may mean that there is no reference
        return None, 0
    for name, text in FROZEN.items():
        if (figures := log.get(name)) is None:
            continue
        (since, count), value = frozen_since(figures), figures.finite.values[-1]
        least = log.limits["entropy_collapse"] if name == "entropy/mean" else 0.0
        if count >= max(LEAST, idle * len(figures)) and abs(value) > least:
            return f"{text} is {value:.6g} at every step since step {since}", since
    return None, 0


@check("optim/weight-decay")
def decayed(log: Log) -> CheckResults:
    """The share of the weights that decoupled weight decay leaves at the end of the run: exp(−Σ rate · decay)."""
    rates, decays = log.need(RATE, "the learning rate"), log.get("optim/weight_decay")
    decay = median(decays) if decays is not None else log.figure("optim.weight_decay")
    if decay is None:
        raise not_shown("the weight decay")
    steps = log.steps - int(rates.finite.steps[0]) + 1
    left = math.exp(-max(0.0, decay) * max(0.0, rates.mean) * steps)
    if left < log.limits["decay_left"] or (left < log.limits["decay_harmless"] and not log.rose):
        yield finding(
            "optim/weight-decay",
            f"a weight decay of {decay:.3g} at a mean learning rate of {rates.mean:.3g} leaves {percent(left, '.2g')} "
            f"of the weights after {steps} steps",
            "weight decay shrinks the weights by more than the gradients change them",
            log.times("optim.weight_decay", 0.01, "a hundredth of"),
        )


# ------------------------------------------------------------------------ ratios


@check("ratio/all-clipped")
def all_clipped(log: Log) -> CheckResults:
    """The share of clipped ratios, over the last steps or on average, and ratios that no update can cause."""
    both, low, high = (log.get(name) for name in CLIPPED)
    sides = [both] if both is not None else [side for side in (low, high) if side is not None]
    if not sides and log.get("ratio/mean") is None:
        raise not_shown("the share of clipped ratios")
    mean = max(sum(side.mean for side in sides), sum(side.finite.tail(RECENT).mean for side in sides))
    clipped, apart = mean > log.limits["clipped_ratios"], unlike(log)
    if clipped or apart:
        yield finding(
            "ratio/all-clipped",
            joined(f"{percent(mean)} of the ratios are clipped on average" if clipped else None, apart),
            "old and current log-probabilities are not the same quantity: one is a sum and the other a mean, or they "
            "differ in filters, temperature or mask",
            "take both from the same scoring function at the sampling temperature; keel doctor on the configuration "
            "compares them",
        )


def unlike(log: Log) -> str:
    """Evidence that old and current log-probabilities are not the same quantity, as text; "" if there is none.

    Either KL(old‖policy) is large while the KL to the reference is not, or the mean ratio is not 1.
    """
    within, ratio = _within_batch(log), log.get("ratio/mean")
    if within is not None and log.kl is not None:
        apart, moved = within.finite.head(RECENT).mean, max(log.kl[1].finite.head(RECENT).values)
        if apart > max(log.limits["kl_per_update"], UNLIKE * max(moved, log.limits["kl_at_start"])):
            return (
                f"KL(old‖policy) is {apart:.3g} nats per token over {within.head(RECENT).span}, and {KL} at most "
                f"{moved:.2g} in the same steps"
            )
    if ratio is not None and abs(median(ratio) - 1) > log.limits["sampler_ratio"]:
        return f"the mean ratio is {median(ratio):.3g} (median over {ratio.span}), but should be 1 by definition"
    return ""


@check("loss/clip")
def clip(log: Log) -> CheckResults:
    """No ratio is ever clipped although a batch is used for several updates."""
    uses, shares = log.figure("loss.num_iterations"), [row for name in CLIPPED if (row := log.get(name)) is not None]
    if uses is None or uses < 2 or not shares:
        raise not_shown("that a batch is used several times, and the share of clipped ratios")
    within = [row for name in WITHIN if (row := log.get(name)) is not None]
    apart = max(abs(value) for series in (*shares, *within) for value in series.finite.values)
    if apart == 0 and log.movement is not None and min(len(share.finite) for share in shares) >= LEAST:
        yield finding(
            "loss/clip",
            f"{uses:.0f} updates are made on a batch, and not one ratio was clipped in {len(shares[0].finite)} logged "
            f"steps{', and KL(old‖policy) is 0 at each' if within else ''}, while {log.movement}",
            "ratios are 1 at every update: the old log-probabilities are computed again before each update, so "
            "clipping "
            "does not limit the later updates on a batch",
            "compute the old log-probabilities once, before the first update on a batch; change nothing if the clip "
            f"range ({log.opt('loss.epsilon')}) is wide on purpose",
            severity="warning",
        )
