"""Ratios and their clip range: all of them cut, a range that cuts everything, or one that has nothing to cut."""

from __future__ import annotations

from keel.doctor.checks.base import KL, RECENT, CheckResults, movement, not_recorded, opt
from keel.doctor.findings import finding
from keel.doctor.history import History
from keel.doctor.shapes import LEAST, median
from keel.doctor.thresholds import Thresholds

CLIPPED = ("ratio/clip_fraction", "ratio/clip_low_fraction", "ratio/clip_high_fraction")
WITHIN = ("kl/old_policy/k1/mean", "kl/old_policy/k3/mean")


def clip(history: History, thresholds: Thresholds) -> CheckResults:
    """Ratios that are all cut by a range of next to nothing, or that never leave 1 although updates are made."""
    code = "loss/clip"
    uses = history.figure("loss.num_iterations")
    if uses is None or uses < 2:
        yield not_recorded(code, "that a batch is used several times")
        return
    shares = [share for name in CLIPPED if (share := history.get(name)) is not None]
    if not shares:
        yield not_recorded(code, "the share of clipped ratios")
        return
    cut, width = max(share.mean for share in shares), history.figure("loss.epsilon")
    name = opt(history, "loss.epsilon")
    if width is not None and 0 <= width < thresholds["clip_narrow"] and cut > 0:
        yield finding(
            code,
            f"{name} is {width:g}, {uses:.0f} updates are made on a batch, and {100 * cut:.2g} % of the ratios are "
            "clipped on average",
            "a ratio leaves a range as narrow as that with the first update: what an advantage has moved the right way "
            "has no gradient from then on, and the batch's other updates see only the rest",
            f"set {name}=0.2, or use a batch once",
        )
        return
    within = [series for n in WITHIN if (series := history.get(n)) is not None]
    apart = max((abs(value) for series in (*shares, *within) for value in series.finite.values), default=0.0)
    moving = movement(history, thresholds)
    if apart == 0 and moving is not None and min(len(share.finite) for share in shares) >= LEAST:
        yield finding(
            code,
            f"{uses:.0f} updates are made on a batch, and not one ratio was clipped in {len(shares[0].finite)} logged "
            f"steps{', and KL(old‖policy) is 0 at each' if within else ''}, while {moving}",
            "ratios are 1 at every update: the old log-probabilities are taken anew before each, so that nothing holds "
            "a batch's later updates near the policy that sampled it",
            "take the old log-probabilities once, before the first update on a batch; if the clip range is wide on "
            f"purpose, nothing ({name})",
            severity="warning",
        )


def all_clipped(history: History, thresholds: Thresholds) -> CheckResults:
    """The share of tokens whose ratio is clipped, now or on average, and ratios that no update can have made."""
    code, share = "ratio/all-clipped", history.get("ratio/clip_fraction")
    low, high = history.get("ratio/clip_low_fraction"), history.get("ratio/clip_high_fraction")
    apart = unlike(history, thresholds)
    sides = [share] if share is not None else [side for side in (low, high) if side is not None]
    if not sides and history.get("ratio/mean") is None:
        yield not_recorded(code, "the share of clipped ratios")
    mean = max(sum(side.mean for side in sides), sum(side.finite.tail(RECENT).mean for side in sides))
    clipped = mean > thresholds["clipped_ratios"]
    if clipped or apart:
        yield finding(
            code,
            "; ".join(filter(None, (f"{100 * mean:.0f} % of the ratios are clipped on average" * clipped, apart))),
            "old and current log-probabilities are not the same quantity: sums against means, filtered against "
            "unfiltered, another temperature, another mask",
            "take both from the same scoring function at the sampling temperature; keel doctor on the configuration "
            "compares them",
        )


def unlike(history: History, thresholds: Thresholds) -> str:
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


CHECKS = (all_clipped, clip)
