"""How far updates take the policy: too far at once, nowhere, back to 0 by weight decay, or clipped."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from keel.doctor.advice import either, setting, warmed_up
from keel.doctor.checks.base import KL, MOVED, RECENT, CheckResults, Log, Missing, check, joined, not_shown, percent
from keel.doctor.findings import Finding, finding
from keel.doctor.history import KL_NAMES, Series, early_moves
from keel.doctor.shapes import LEAST, frozen_since, median

TOLD = (*MOVED, "grad/norm", "loss/total", "loss/policy")  # what a new batch or another policy changes
STRETCH = 5  # different lines at least: one that stays is another matter
# What a new batch changes, if only in its last digits; not what may be 0 for good reasons.
FROZEN = {"entropy/mean": "the entropy", "grad/norm": "the gradient norm", "loss/total": "the loss"}
CLIPPED = ("ratio/clip_fraction", "ratio/clip_low_fraction", "ratio/clip_high_fraction")
UNLIKE = 10  # times what the policy has moved: twice the distance is four times the KL


def _within_batch(log: Log) -> Series | None:
    """KL(old‖policy) from the first update on a batch to the last."""
    return log.get("kl/old_policy/k3/mean") or log.get("kl/old_policy/k1/mean")


@check("optim/lr-too-high")
def lr_too_high(log: Log) -> CheckResults:
    """How far single updates move the policy, while the learning rate first reaches its full size."""
    within, limit = _within_batch(log), log.limits["kl_per_update"]
    if within is not None and within.head(RECENT).mean > limit and not unlike(log):
        yield _too_high(log, f"KL(old‖policy) within a batch is {within.head(RECENT).mean:.3g} nats per token")
        return
    name, series = log.need_kl
    first, value, moves = series.finite.steps[0], series.finite.values[0], early_moves(log)
    if first <= 1 and abs(value) > log.limits["kl_at_start"]:
        raise Missing("KL is not 0 at the start, so its changes do not measure the updates")
    if first > 1 and 2 * value > limit * first:  # a mean over the steps up to here, so about half of what they moved
        yield _too_high(log, f"{name} is {value:.3g} nats per token already at step {first:.0f}")
    elif not moves:
        raise Missing("no two neighbouring steps at the start of the run have a KL")
    elif max(moves)[0] > limit:
        largest, step = max(moves)
        yield _too_high(log, f"the update before step {step} moved {name} by {largest:.3g} nats per token")


def _too_high(log: Log, evidence: str) -> Finding:
    rates, norms, clips = (log.get(n) for n in ("optim/learning_rate", "grad/norm", "grad/clip_factor"))
    if rates is not None:
        evidence += f" at a learning rate of {max(rates.finite.values):.3g}"
    if norms is not None:
        evidence += f"; gradient norm {norms.finite.head(5).mean:.3g} over {norms.head(5).span}"
    if clips is not None:
        evidence += f", clipped to {percent(clips.finite.head(5).mean)}"
    return finding(
        "optim/lr-too-high",
        evidence,
        "the learning rate is too high: an update leaves the region in which its advantages were estimated",
        either(
            log.rate(0.1, "a tenth of"),
            setting("a warm-up, {}", warmed_up(log.config) if log.source == "keel" else {}, "a longer warm-up"),
        ),
    )


@check("optim/no-update")
def no_update(log: Log) -> CheckResults:
    """A rate of 0 for a lasting part of the run, or a policy that stands still and should not."""
    rates, norms, silent = (log.get(n) for n in ("optim/learning_rate", "grad/norm", "reward/zero_variance_fraction"))
    idle = rates.where(lambda value: value == 0) if rates is not None else []
    if rates is not None and len(idle) >= 3 and len(idle) > log.limits["idle_share"] * len(rates.finite):
        yield finding(
            "optim/no-update",
            f"the learning rate is 0 at {len(idle)} of {len(rates.finite)} logged steps, from step {idle[0]} to "
            f"step {idle[-1]}",
            "an update at rate 0 changes nothing: the rate itself, a schedule that ends before the run does, or a "
            "warm-up that does not begin",
            f"set {log.opt('optim.learning_rate')}, and the schedule's number of steps to the run's",
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
        raise Missing(f"{still}, and no group's rewards differ: there is nothing to move it")
    if rates is not None and rates.finite.values[-1] == max(rates.finite.values) > rates.finite.values[0]:
        still += f"; the learning rate is still rising at the last step ({rates.finite.values[-1]:.3g})"
        if log.steps < log.limits["steps_to_judge"]:
            raise Missing(still)
    elif rates is not None:
        still += f"; the learning rate is {median(rates):.3g}"
    limit = log.opt("optim.max_grad_norm")
    yield finding(
        "optim/no-update",
        joined(
            still,
            held if held and held not in still else None,
            f"the gradient norm is {median(norms):.3g}" if norms is not None else None,
        ),
        "updates do not reach the weights that are sampled and scored: a rate that is next to nothing, a warm-up "
        "longer than the run, gradients clipped to nothing, frozen parameters, or weights in a type that rounds the "
        "update away",
        either(
            setting("set {}", {limit: 1.0})
            if held and held.startswith("clipping")
            else log.rate(100, "a hundred times"),
            f"see {limit}, what is trainable, and keep the weights in float32",
            joined="; ",
        ),
    )


def _unchanged(log: Log) -> str | None:
    """That every weight is what it was, where a run recorded fingerprints before and after and made updates."""
    recorded = [event for event in log.events if event.get("kind") == "weights"]
    skipped = log.get("guard/skipped")
    if not recorded or log.steps < 1 or (skipped is not None and skipped.mean == 1):
        return None
    before, after = recorded[-1].get("before"), recorded[-1].get("after")
    same = before and before == after
    return f"every weight after step {log.steps} is as before training ({before})" if same else None


def _held_back(log: Log) -> str | None:
    """What leaves next to nothing of an update: gradients clipped to a trifle, or a rate far under every recipe's."""
    norms, factors, rates = (log.get(n) for n in ("grad/norm", "grad/clip_factor", "optim/learning_rate"))
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
    """Whether neither the reward nor the KL, where it is measured from a fixed point, has gone anywhere to speak of."""
    if log.trend is None or log.rose or log.steps < log.limits["steps_to_judge"]:
        return False
    return log.kl is None or log.kl[1].tail(RECENT).mean < log.limits["kl_not_learning"]


def _standstill(log: Log) -> tuple[str | None, int]:
    """What shows that the policy does not change: no KL at all, or a figure the same to the last digit; and since when.

    A KL to a reference that moves along shows nothing.
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
    if log.kl is not None and any(log.kl[1].finite.values):  # one of zeros is that of no reference
        return None, 0
    for name, text in FROZEN.items():
        if (figures := log.get(name)) is None:
            continue
        (since, count), value = frozen_since(figures), figures.finite.values[-1]
        least = log.limits["entropy_collapse"] if name == "entropy/mean" else 0.0
        if count >= max(LEAST, idle * len(figures)) and abs(value) > least:
            return f"{text} is {value:.6g} at every step since step {since}", since
    return None, 0


@check()
def again(log: Log) -> CheckResults:
    """A stretch of the log that comes back to the last digit: the same batches under the same weights."""
    series = {name: row for name in (*TOLD, *KL_NAMES) if (row := log.get(name)) is not None}
    steps = sorted(set.intersection(*(set(row.steps) for row in series.values()))) if series else []
    rows = [dict(zip(row.steps, row.values, strict=True)) for row in series.values()]
    lines = [tuple(row[step] for row in rows) for step in steps]
    lag, first, count = _repeated(lines)
    fresh = lines[:first]
    pairs = len(fresh) * (len(fresh) - 1) / 2
    same = sum(n * (n - 1) / 2 for n in Counter(fresh).values())
    different = len(set(lines[first : first + count]))
    chance = len(lines) ** 2 * ((same + 1) / (pairs + 1)) ** different
    if count > log.limits["idle_share"] * len(lines) and different >= STRETCH and chance <= log.level:
        yield finding(
            "optim/no-update",
            f"the {lag} lines before step {steps[first]:.0f} come back to the last digit in the {count} lines from "
            f"there on, in {', '.join(series)}",
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
        apart = index - seen.get(line, index)
        seen[line] = index
        if apart != lag:
            lag, first = apart, index
        if lag and index + 1 - first > best[2]:
            best = (lag, first, index + 1 - first)
    return best


@check("optim/weight-decay")
def decayed(log: Log) -> CheckResults:
    """What decoupled weight decay leaves of the first update at the run's end: exp(−Σ rate · decay)."""
    rates, decays = log.need("optim/learning_rate", "the learning rate"), log.get("optim/weight_decay")
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
            "the weights shrink by more than any gradient moves them",
            log.times("optim.weight_decay", 0.01, "a hundredth of"),
        )


@check("ratio/all-clipped")
def all_clipped(log: Log) -> CheckResults:
    """The share of tokens whose ratio is clipped, now or on average, and ratios that no update can have made."""
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
            "old and current log-probabilities are not the same quantity: sums against means, filtered against "
            "unfiltered, another temperature, another mask",
            "take both from the same scoring function at the sampling temperature; keel doctor on the configuration "
            "compares them",
        )


def unlike(log: Log) -> str:
    """What shows that old and current log-probabilities are not those of one policy some updates apart; "" if nothing.

    The policy is then far from the one that sampled and has gone nowhere, or ratios do not have a mean of 1.
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
        return f"the mean ratio is {median(ratio):.3g} (median over {ratio.span}), and 1 by definition"
    return ""


@check("loss/clip")
def clip(log: Log) -> CheckResults:
    """Ratios that are all cut by a range of next to nothing, or that never leave 1 although updates are made."""
    uses = log.figure("loss.num_iterations")
    if uses is None or uses < 2:
        raise not_shown("that a batch is used several times")
    shares = [share for name in CLIPPED if (share := log.get(name)) is not None]
    if not shares:
        raise not_shown("the share of clipped ratios")
    cut, width, name = max(share.mean for share in shares), log.figure("loss.epsilon"), log.opt("loss.epsilon")
    within = [row for n in ("kl/old_policy/k1/mean", "kl/old_policy/k3/mean") if (row := log.get(n)) is not None]
    apart = max((abs(value) for series in (*shares, *within) for value in series.finite.values), default=0.0)
    if width is not None and 0 <= width < log.limits["clip_narrow"] and cut > 0:
        yield finding(
            "loss/clip",
            f"{name} is {width:g}, {uses:.0f} updates are made on a batch, and {percent(cut, '.2g')} of the ratios are "
            "clipped on average",
            "a ratio leaves a range as narrow as that with the first update: what an advantage has moved the right way "
            "has no gradient from then on, and the batch's other updates see only the rest",
            f"set {name}=0.2, or use a batch once",
        )
    elif apart == 0 and log.movement is not None and min(len(share.finite) for share in shares) >= LEAST:
        yield finding(
            "loss/clip",
            f"{uses:.0f} updates are made on a batch, and not one ratio was clipped in {len(shares[0].finite)} logged "
            f"steps{', and KL(old‖policy) is 0 at each' if within else ''}, while {log.movement}",
            "ratios are 1 at every update: the old log-probabilities are taken anew before each, so that nothing holds "
            "a batch's later updates near the policy that sampled it",
            "take the old log-probabilities once, before the first update on a batch; if the clip range is wide on "
            f"purpose, nothing ({name})",
            severity="warning",
        )
