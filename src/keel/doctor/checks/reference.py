"""The reference: one that goes along with the policy, or is replaced on the way."""

from __future__ import annotations

import math
from collections.abc import Sequence

from keel.doctor.checks.base import RECENT, CheckResults, Log, check
from keel.doctor.checks.course import rewritten
from keel.doctor.findings import finding
from keel.doctor.history import Series
from keel.doctor.shapes import LEAST, jitter

OUTRUN = 1.5  # times what the inequality allows: KL and length are means of a batch
DEVIATIONS = 4.0  # of rewards that their range is wide: those of two values where one is rarer than 1 in 15 are wider
PULLED_BACK, LATELY = 10.0, 30  # times what β was, so many steps ago
SMALL = 10.0  # times the KL that is none: what a strong β takes away at once
NATS = 50.0  # of entropy for a total variation of 1: ln V is up to 13, and a policy reads what it wrote
SCORED = "score the reference with the weights that training started from; with an adapter, with the adapter off; "


@check("reference/follows")
def follows(log: Log) -> CheckResults:
    """No KL at all to a reference although the policy moves."""
    name, series = log.need_kl
    most = max(abs(value) for value in series.finite.values)
    if len(series.finite) < LEAST:
        return
    if most > log.limits["kl_no_move"]:
        yield from _outrun(log, name, series)
        return
    moving = log.movement or ("the reference is meant to move" if log.moves_reference else None)
    if log.beta == 0 or moving is None:
        return
    unsure = most == 0 and log.unpenalized
    yield finding(
        "reference/follows",
        f"{name} is at most {most:.2g} nats per token in {len(series.finite)} logged steps, while {moving}"
        + ("; a run without a KL term logs 0, too" if unsure else ""),
        "the reference is the policy itself: the same weights, an adapter that is left on while it scores, or a copy "
        "taken at every step",
        SCORED + "a reference that is synced on purpose, every hundred steps or so and in part",
        severity="note" if unsure else None,
    )


def _outrun(log: Log, name: str, series: Series) -> CheckResults:
    """A policy that has changed by more than one this near the reference can, by the KL at both ends of the log.

    |ΔE[r]| ≤ range · √(KL/2) (Pinsker), with the KL of a completion. For the entropy |ΔH| ≤ ln V · √(KL/2), with the KL
    of a token; other prefixes add to it.
    """
    ends = [max(0.0, *part.values) for part in (series.finite.head(RECENT), series.finite.tail(RECENT))]
    lengths, widest = log.get("length/mean"), _reward_range(log)
    length = max(lengths.finite.values) if lengths is not None else 0.0
    far = sum(math.sqrt(kl / 2) for kl in ends)
    by_reward = widest * far * math.sqrt(length) if length and widest is not None else math.inf
    bounds = {
        "reward": ("reward/mean", by_reward, f"{by_reward:.2g} at most (completions of up to {length:.0f} tokens)"),
        "entropy": ("entropy/mean", NATS * far, f"some {NATS * far:.2g} nats"),
    }
    for what, (metric, most, text) in bounds.items():
        change = None if log.moves_reference else log.course(metric)
        if change is None or not abs(change.size) > OUTRUN * most:
            continue
        yield finding(
            "reference/follows",
            f"the {what} goes from {change.before:.3g} to {change.after:.3g} (chance under noise: {change.chance:.1g})"
            f"; {name} is {ends[1]:.2g} nats per token over {series.tail(RECENT).span}: a policy that near to where it "
            f"started could differ by {text}",
            "what is logged is no distance to where training started: the reference follows the policy, is scored with "
            "the policy's adapter on, or the KL is that of one update; or problems have become easier",
            SCORED + "nothing, if the problems change in the course of the run",
        )
        return


def _reward_range(log: Log) -> float | None:
    """From the lowest reward to the highest, or as wide as their deviation tells; None where neither is logged.

    Means alone tell of no range: those of steps hardly differ, however far rewards do.
    """
    rewards, spread = log.get("reward/mean"), log.get("reward/std")
    known = [*log.ranges.finite.values] if log.ranges is not None else []
    known += [DEVIATIONS * value for value in spread.finite.values] if spread is not None else []
    values = rewards.finite.values if rewards is not None else (0.0,)
    return max(*known, max(values) - min(0.0, *values), 1.0) if known else None


@check("reference/moving")
def dropped(log: Log) -> CheckResults:
    """KL that falls to next to nothing from one step to the next: the reference was replaced."""
    name, series = log.need_kl
    if log.moves_reference or log.has_teacher:  # the policy comes nearer to a teacher
        return
    least = max(log.limits["kl_at_start"], (6 if name.endswith("k1") else 3) * jitter(series))
    drops = _drops(log, series.finite, 5, least)
    short = _drops(log, series.finite, 2, least)  # teeth of a few values, which chance brings back to 0 once
    often = [drop for drop in short if drop[2] <= log.limits["kl_at_start"]]
    drops = often if len(often) >= max(3, len(drops)) else drops
    # else the policy has come nearer, by itself or by a β that grew
    drops = [drop for drop in drops if not rewritten(log, drop[0]) and not _pulled_back(log, *drop[:2])]
    if not drops:
        return
    step, usual, after = drops[0]
    yield finding(
        "reference/moving",
        f"{name} falls from {usual:.3g} to {after:.2g} nats per token at step {step}"
        + (f"; so it does at {len(drops)} steps" if len(drops) > 1 else ""),
        "the reference was replaced by the policy of that moment: a resume that took the checkpoint as reference, or a "
        "reference that is synced",
        "load the reference from where training started, also after a resume; if it is meant to be synced, nothing",
        severity=None if log.config or len(drops) == 1 else "warning",
    )


def _pulled_back(log: Log, step: int, before: float) -> bool:
    """Whether a small KL falls after a β that has become many times as large: it takes more than a step, or a few."""
    betas = log.get("kl/beta")
    if betas is None or before > SMALL * log.limits["kl_at_start"]:
        return False
    lately = betas.finite.since(step - LATELY)
    known = [beta for at, beta in zip(lately.steps, lately.values, strict=True) if at <= step and beta > 0]
    return bool(known) and known[-1] > PULLED_BACK * known[0]


def _drops(log: Log, kl: Series, before: int, least: float) -> Sequence[tuple[int, float, float]]:
    """(step, KL before, KL after) where it falls to next to nothing after so many values, and stays down for some."""
    found = []
    for index in range(before, len(kl) - before // 2):
        high, low = kl.values[index - before : index], kl.values[index : index + before // 2 + 1]
        usual = sorted(high)[before // 2] if before > 2 else min(high)
        if usual > least and low[0] <= log.limits["reference_follows"] * usual and max(low) < 0.5 * min(high):
            found.append((int(kl.steps[index]), usual, low[0]))
    return found
