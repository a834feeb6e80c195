"""The run as a whole: metrics that jump together."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from keel.doctor.checks.base import RECENT, CheckResults, clear, level, not_recorded, reward_size, saturated
from keel.doctor.findings import finding
from keel.doctor.history import History, Series
from keel.doctor.shapes import LEAST, Change, around, jumps, noise
from keel.doctor.thresholds import Thresholds

# What jumps for the same reason counts once: one name a family is looked at, the first that was recorded.
FAMILIES = (
    ("reward/mean",),
    ("kl/policy_ref/exact/mean", "kl/policy_ref/k3/mean", "kl/policy_ref/k1/mean"),
    ("entropy/mean",),
    ("length/mean", "length/truncated_fraction"),
    ("grad/norm",),
    ("kl/sampler_policy/k3/mean", "logp/sampler_gap_mean", "sampler/probability_gap_mean"),
    ("parse/ok_fraction",),
    ("prompt/length_mean",),
)
WRITTEN = ("reward/mean", "entropy/mean", "length/mean", "length/truncated_fraction", "parse/ok_fraction")
BETWEEN = 2  # steps from one line to the next, of a log that shows single updates
RESCALED = 5.0  # times as much pay from one step to the next, and as much deviation
UNMOVED = 0.02  # of a figure: what is no change of it, however little noise it has
REWRITTEN = 0.25  # of a figure: learning changes less within a few steps
BEGUN = 0.3  # of a log, after which a gradient is no longer that of a beginning
LITTLE, TINY = 1e-4, 1e-300  # of the largest value, below which a logarithm is not taken
Jump = tuple[str, Change]


def shifts(history: History, thresholds: Thresholds) -> dict[int, list[Jump]]:
    """Steps at which metrics of two families or more jump and stay, with these jumps; neighbouring steps are one.

    A KL or a reward that jumps alone counts where nothing else that could have moved with it has, and a gradient that
    is of another size from one step to the next always.
    """
    at: dict[int, list[Jump]] = {}
    moves = history.moves_reference
    for family in FAMILIES:
        if moves and family[0].startswith("kl/policy_ref"):
            continue  # falls whenever the reference moves, and the gradient with it
        name = next((name for name in family if history.get(name) is not None), None)
        if name is None:
            continue
        for jump in _jumps(name, history.series[name], level(thresholds)):
            near = next((step for step in at if abs(step - jump.step) <= 1), jump.step)
            at.setdefault(near, []).append((name, jump))
    alone = {step for step, row in at.items() if len(row) == 1 and _unwritten(history, step, *row[0], thresholds)}
    return {step: row for step, row in at.items() if len({name for name, _ in row}) > 1 or step in alone}


def _jumps(name: str, series: Series, chance: float) -> list[Change]:
    """Of a gradient's norm in its logarithm: its noise is a factor."""
    if name != "grad/norm" or min(series.finite.values) <= 0:
        return jumps(series, chance)
    found = jumps(_logarithm(series), chance)
    return [replace(jump, before=math.exp(jump.before), after=math.exp(jump.after)) for jump in found]


def _logarithm(series: Series) -> Series:
    """Of its finite values; what is next to nothing beside the largest is as much."""
    least = LITTLE * max(map(abs, series.finite.values))
    return Series(series.finite.steps, tuple(math.log(max(value, least, TINY)) for value in series.finite.values))


def _unwritten(history: History, step: int, name: str, jump: Change, thresholds: Thresholds) -> bool:
    """Whether KL or reward alone goes up at once and stays there, while nothing that the policy does changes.

    An update that takes the policy that far, or teaches it that much, changes what it writes: at least two such figures
    must be known; many updates between two lines may teach as much. A reward that falls alone is a collapse, and one
    that jumps to its top is a task that was solved; a KL that grows may leap. A gradient that shrinks to a trifle at
    once and for good needs no other sign, unless the groups' spread is known, which tells why.
    """
    of_reward, series = name == "reward/mean", history.series[name]
    if name == "grad/norm":
        vanished = 0 < jump.after <= thresholds["grad_vanished"] * jump.before
        begun = bisect_left(series.finite.steps, jump.step) >= BEGUN * len(series.finite)
        begun = begun and not saturated(history, thresholds)
        return vanished and begun and _stays(series, jump) and history.get("reward/zero_variance_fraction") is None
    if of_reward and _rescaled(history, jump):
        return True
    least = thresholds["gap_reward"] * reward_size(history) if of_reward else thresholds["kl_alone"]
    if not name.startswith(("reward/mean", "kl/policy_ref")) or jump.size <= least:
        return False
    apart = statistics.median(after - before for before, after in pairwise(series.finite.steps))
    if of_reward and (apart > BETWEEN or saturated(history, thresholds) or not _stays(series, jump)):
        return False
    if _goes_on(series, jump) or (not of_reward and _multiplied(series, jump, level(thresholds))):
        return False
    others = [*WRITTEN[1:], "grad/norm"] if of_reward else WRITTEN
    shown = [other for n in others if (other := history.get(n)) is not None and len(other.finite) >= LEAST]
    return len(shown) >= 2 and not any(_moved(other, step) for other in shown)


def _rescaled(history: History, jump: Change) -> bool:
    """Whether a reward and its deviation are multiplied by the same at once, and by more than a policy learns."""
    spread = history.get("reward/std")
    if spread is None or min(jump.before, jump.after) <= 0:
        return False
    values, at = spread.finite.values, bisect_left(spread.finite.steps, jump.step)
    sides = values[max(0, at - 5) : at], values[at : at + 5]
    if not all(sides) or min(map(min, sides)) <= 0:
        return False
    factors = jump.after / jump.before, statistics.median(sides[1]) / statistics.median(sides[0])
    apart = [abs(math.log(factor)) for factor in factors]
    return min(apart) > math.log(RESCALED) and abs(math.log(factors[0] / factors[1])) < math.log(2)


def _goes_on(series: Series, jump: Change) -> bool:
    """Whether a figure goes further by other steps than by this jump, which is a part of its course then."""
    first, last = (statistics.median(part.values) for part in (series.finite.head(RECENT), series.finite.tail(RECENT)))
    return last - first > 2 * jump.size


def _multiplied(series: Series, jump: Change, chance: float) -> bool:
    """Whether a figure is multiplied at other steps as much as by this jump."""
    return all(j.step != jump.step for j in jumps(_logarithm(series), chance))


def _stays(series: Series, jump: Change) -> bool:
    """Whether a figure keeps at least half of a jump at every later tenth of the series."""
    later = series.finite.since(jump.step).values
    width = max(5, len(series.finite) // 10)
    middle, sign = (jump.before + jump.after) / 2, math.copysign(1.0, jump.size)
    levels = (statistics.median(later[i : i + width]) for i in range(0, max(1, len(later) - width), width))
    return all(sign * (level - middle) > 0 for level in levels)


def _moved(series: Series, step: int) -> bool:
    """Whether a figure's level changes at a step by more than its noise, beyond its course (five values a side)."""
    values, at = series.finite.values, bisect_left(series.finite.steps, step)
    changes = {
        i: statistics.median(values[i : i + 5]) - statistics.median(values[i - 5 : i])
        for i in range(5, len(values) - 4)
    }
    least = max(3 * noise(series)[0], UNMOVED * abs(statistics.median(values)))
    return at not in changes or abs(changes[at] - statistics.median(changes.values())) > least


def rewritten(history: History, step: int, thresholds: Thresholds, names: Sequence[str] = WRITTEN) -> bool:
    """Whether what the policy writes is another from that step on, by one of these figures and beyond noise."""
    shown = (series for name in names if (series := history.get(name)) is not None)
    changes = (change for series in shown if (change := around(series, step, RECENT)) is not None)
    return any(clear(c, thresholds) and abs(c.size) > REWRITTEN * max(abs(c.before), abs(c.after)) for c in changes)


def shift_steps(history: History, thresholds: Thresholds) -> tuple[int, ...]:
    """Only the steps."""
    return tuple(shifts(history, thresholds))


def shift(history: History, thresholds: Thresholds) -> CheckResults:
    """Several metrics at another level from one step to the next."""
    if sum(any(history.get(name) is not None for name in family) for family in FAMILIES) < 2:
        yield not_recorded("run/shift", "more than one metric that could jump")
    for step, together in shifts(history, thresholds).items():
        changes = ", ".join(f"{name} {jump.before:.3g} → {jump.after:.3g}" for name, jump in together)
        yield finding(
            "run/shift",
            f"at step {step}: {changes}; they stay there (chance under noise: "
            f"{max(jump.chance for _, jump in together):.1g} each)",
            "something other than an update changed there: a resume from another checkpoint or with other options, "
            "other data or another prompt, another reference or reward",
            f"compare options, data and checkpoint before and after step {step}; what was meant needs no cure, but "
            "both sides are different runs",
        )


CHECKS = (shift,)
