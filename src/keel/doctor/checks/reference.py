"""The reference: one that goes along with the policy, or is replaced on the way."""

from __future__ import annotations

import math
from collections.abc import Sequence

from keel.doctor.checks.base import (
    KL,
    RECENT,
    CheckResults,
    clear,
    has_teacher,
    movement,
    not_recorded,
    reward_ranges,
    reward_size,
)
from keel.doctor.checks.course import rewritten
from keel.doctor.findings import finding
from keel.doctor.history import History, Series
from keel.doctor.shapes import LEAST, Change, course, fall, jitter, turns
from keel.doctor.thresholds import Thresholds


def follows(history: History, thresholds: Thresholds) -> CheckResults:
    """No KL at all to a reference although the policy moves."""
    code = "reference/follows"
    if history.kl is None:
        yield not_recorded(code, KL)
        return
    name, series = history.kl
    most = max(abs(value) for value in series.finite.values)
    if len(series.finite) >= LEAST and most > thresholds["kl_no_move"]:
        yield from _outrun(history, thresholds)
        return
    if len(series.finite) < LEAST or history.beta == 0:
        return
    moving = movement(history, thresholds) or ("the reference is meant to move" if history.moves_reference else None)
    if moving is None:
        return
    unsure = most == 0 and history.unpenalized
    yield finding(
        code,
        f"{name} is at most {most:.2g} nats per token in {len(series.finite)} logged steps, while {moving}"
        + ("; a run without a KL term logs 0, too" if unsure else ""),
        "the reference is the policy itself: the same weights, an adapter that is left on while it scores, or a copy "
        "taken at every step",
        "score the reference with the weights that training started from; with an adapter, with the adapter off; a "
        "reference that is synced on purpose, every hundred steps or so and in part",
        severity="note" if unsure else None,
    )


def _outrun(history: History, thresholds: Thresholds) -> CheckResults:
    """A policy that has changed by more than one this near the reference can, by the KL at both ends of the log."""
    if history.kl is None or history.moves_reference:
        return
    name, series = history.kl
    ends = [max(0.0, *part.values) for part in (series.finite.head(RECENT), series.finite.tail(RECENT))]
    far = _paid_otherwise(history, ends, thresholds) or _drawn_otherwise(history, ends, thresholds)
    if far is None:
        return
    changed, most = far
    yield finding(
        "reference/follows",
        f"{changed}; {name} is {ends[1]:.2g} nats per token over {series.tail(RECENT).span}: a policy that near to "
        f"where it started could differ by {most}",
        "what is logged is no distance to where training started: the reference follows the policy, is scored with the "
        "policy's adapter on, or the KL is that of one update; or problems have become easier",
        "score the reference with the weights that training started from; with an adapter, with the adapter off; "
        "nothing, if the problems change in the course of the run",
    )


def _paid_otherwise(history: History, ends: Sequence[float], thresholds: Thresholds) -> tuple[str, str] | None:
    """A gain of reward and the most there can be: |ΔE[r]| ≤ range · √(KL/2) (Pinsker), with the KL of a completion."""
    rewards, lengths, widest = history.get("reward/mean"), history.get("length/mean"), _reward_range(history)
    change = course(rewards) if rewards is not None else None
    if change is None or lengths is None or widest is None or not clear(change, thresholds):
        return None
    length = max(lengths.finite.values)
    most = widest * sum(math.sqrt(kl * length / 2) for kl in ends)
    said = f"the reward goes from {change.before:.3g} to {change.after:.3g} (chance under noise: {change.chance:.1g})"
    return (said, f"{most:.2g} at most (completions of up to {length:.0f} tokens)") if _beyond(change, most) else None


def _drawn_otherwise(history: History, ends: Sequence[float], thresholds: Thresholds) -> tuple[str, str] | None:
    """The same for the entropy: |ΔH| ≤ ln V · √(KL/2), with the KL of a token; other prefixes add to it."""
    entropy = history.get("entropy/mean")
    change = course(entropy) if entropy is not None else None
    if change is None or not clear(change, thresholds):
        return None
    most = NATS * sum(math.sqrt(kl / 2) for kl in ends)
    said = f"the entropy goes from {change.before:.3g} to {change.after:.3g} (chance under noise: {change.chance:.1g})"
    return (said, f"some {most:.2g} nats") if _beyond(change, most) else None


def _beyond(change: Change, most: float) -> bool:
    return abs(change.size) > OUTRUN * most


def _reward_range(history: History) -> float | None:
    """From the lowest reward to the highest, or as wide as their deviation tells; None where neither is logged.

    Means alone tell of no range: those of steps hardly differ, however far rewards do.
    """
    ranges, rewards, spread = reward_ranges(history), history.get("reward/mean"), history.get("reward/std")
    known = [*(ranges.finite.values if ranges is not None else ())]
    known += [DEVIATIONS * value for value in spread.finite.values] if spread is not None else []
    values = rewards.finite.values if rewards is not None else (0.0,)
    return max(*known, max(values) - min(0.0, *values), 1.0) if known else None


OUTRUN = 1.5  # times what the inequality allows: KL and length are means of a batch
DEVIATIONS = 4.0  # of rewards that their range is wide: those of two values where one is rarer than 1 in 15 are wider
PULLED_BACK, LATELY = 10.0, 30  # times what β was, so many steps ago
SMALL = 10.0  # times the KL that is none: what a strong β takes away at once
NATS = 50.0  # of entropy for a total variation of 1: ln V is up to 13, and a policy reads what it wrote


def dropped(history: History, thresholds: Thresholds) -> CheckResults:
    """KL that falls to next to nothing from one step to the next: the reference was replaced."""
    if history.kl is None:
        yield not_recorded("reference/moving", KL)
        return
    if history.moves_reference or has_teacher(history):  # the policy comes nearer to a teacher
        return
    name, series = history.kl
    finite = series.finite
    least = max(thresholds["kl_at_start"], (6 if name.endswith("k1") else 3) * jitter(series))
    drops = _drops(finite, 5, least, thresholds)
    short = _drops(finite, 2, least, thresholds)  # teeth of a few values, which chance brings back to 0 once
    often = [drop for drop in short if drop[2] <= thresholds["kl_at_start"]]
    drops = often if len(often) >= max(3, len(drops)) else drops
    drops = [drop for drop in drops if not rewritten(history, drop[0], thresholds)]  # else the policy has come nearer
    drops = [drop for drop in drops if not _pulled_back(history, drop, thresholds)]
    if not drops:
        yield from _wasting(history, thresholds)
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


def _pulled_back(history: History, drop: tuple[int, float, float], thresholds: Thresholds) -> bool:
    """Whether a small KL falls after a β that has become many times as large: it takes more than a step, or a few."""
    betas, (step, before, _) = history.get("kl/beta"), drop
    if betas is None or before > SMALL * thresholds["kl_at_start"]:
        return False
    lately = [b for at, b in zip(betas.finite.steps, betas.finite.values, strict=True) if step - LATELY <= at <= step]
    known = [beta for beta in lately if beta > 0]
    return bool(known) and known[-1] > PULLED_BACK * known[0]


def _drops(kl: Series, before: int, least: float, thresholds: Thresholds) -> list[tuple[int, float, float]]:
    """(step, KL before, KL after) where it falls to next to nothing after so many values, and stays down for some."""
    found = []
    for index in range(before, len(kl) - before // 2):
        high, low = kl.values[index - before : index], kl.values[index : index + before // 2 + 1]
        usual = sorted(high)[before // 2] if before > 2 else min(high)
        if usual > least and low[0] <= thresholds["reference_follows"] * usual and max(low) < 0.5 * min(high):
            found.append((int(kl.steps[index]), usual, low[0]))
    return found


def _wasting(history: History, thresholds: Thresholds) -> CheckResults:
    """KL that goes back to next to nothing little by little, while the reward keeps what it gained."""
    if history.kl is None:
        return
    name, series = history.kl
    change, reward = fall(series), history.get("reward/mean")
    if change is None or not clear(change, thresholds) or change.before <= thresholds["kl_not_learning"]:
        return
    lost = fall(reward) if reward is not None else None
    back = lost is None or (clear(lost, thresholds) and -lost.size > thresholds["gap_reward"] * reward_size(history))
    back = back or turns(series, change.before / 2)[0] > 2  # up and down more than once
    if change.after <= thresholds["reference_follows"] * change.before and not back:
        yield finding(
            "reference/moving",
            f"{name} falls from {change.before:.3g} to {change.after:.2g} nats per token, from step {change.step} on "
            f"(chance under noise: {change.chance:.1g}), and the reward stays",
            "the reference comes after the policy: an average that includes it, or copies of it",
            "load the reference from where training started; if it is meant to come after, nothing",
            severity="warning",
        )


CHECKS = (follows, dropped)
