"""The run as a whole: metrics that jump together."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from keel.doctor.checks.base import RECENT, CheckResults, Log, check, not_shown
from keel.doctor.findings import finding
from keel.doctor.history import Series
from keel.doctor.shapes import LEAST, Change, around, jumps, noise

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


def shifts(log: Log) -> dict[int, list[Jump]]:
    """Steps at which metrics of two families or more jump and stay, with these jumps; neighbouring steps are one.

    A KL or a reward that jumps alone counts where nothing else that could have moved with it has, and a gradient that
    is of another size from one step to the next always.
    """
    at: dict[int, list[Jump]] = {}
    for family in FAMILIES:
        if log.moves_reference and family[0].startswith("kl/policy_ref"):
            continue  # falls whenever the reference moves, and the gradient with it
        name = next((name for name in family if log.get(name) is not None), None)
        for jump in _jumps(name, log.series[name], log.level) if name is not None else ():
            near = next((step for step in at if abs(step - jump.step) <= 1), jump.step)
            at.setdefault(near, []).append((str(name), jump))
    alone = {step for step, row in at.items() if len(row) == 1 and _unwritten(log, step, *row[0])}
    return {step: row for step, row in at.items() if len({name for name, _ in row}) > 1 or step in alone}


def _jumps(name: str, series: Series, chance: float) -> list[Change]:
    """Of a gradient's norm in its logarithm: its noise is a factor."""
    if name != "grad/norm" or min(series.finite.values) <= 0:
        return jumps(series, chance)
    found = jumps(_logarithm(series), chance)
    return [replace(jump, before=math.exp(jump.before), after=math.exp(jump.after)) for jump in found]


def _logarithm(series: Series) -> Series:
    """Of its finite values; what is next to nothing beside the largest is as much."""
    least = max(LITTLE * max(map(abs, series.finite.values)), TINY)
    return series.finite.mapped(lambda value: math.log(max(value, least)))


def _unwritten(log: Log, step: int, name: str, jump: Change) -> bool:
    """Whether KL or reward alone goes up at once and stays there, while nothing that the policy does changes.

    An update that takes the policy that far, or teaches it that much, changes what it writes: at least two such figures
    must be known; many updates between two lines may teach as much. A reward that falls alone is a collapse, and one
    that jumps to its top is a task that was solved; a KL that grows may leap. A gradient that shrinks to a trifle at
    once and for good needs no other sign, unless the groups' spread is known, which tells why.
    """
    of_reward, series = name == "reward/mean", log.series[name].finite
    if name == "grad/norm":
        vanished = 0 < jump.after <= log.limits["grad_vanished"] * jump.before
        begun = bisect_left(series.steps, jump.step) >= BEGUN * len(series) and not log.saturated
        return vanished and begun and _stays(series, jump) and log.get("reward/zero_variance_fraction") is None
    if of_reward and _rescaled(log, jump):
        return True
    least = log.limits["gap_reward"] * log.size if of_reward else log.limits["kl_alone"]
    if not name.startswith(("reward/mean", "kl/policy_ref")) or jump.size <= least:
        return False
    apart = statistics.median(after - before for before, after in pairwise(series.steps))
    if of_reward and (apart > BETWEEN or log.saturated or not _stays(series, jump)):
        return False
    first, last = (statistics.median(part.values) for part in (series.head(RECENT), series.tail(RECENT)))
    if last - first > 2 * jump.size:  # it goes further by other steps: the jump is a part of its course
        return False
    if not of_reward and all(other.step != jump.step for other in jumps(_logarithm(series), log.level)):
        return False  # it is multiplied by as much at other steps
    others = [*WRITTEN[1:], "grad/norm"] if of_reward else WRITTEN
    shown = [other for n in others if (other := log.get(n)) is not None and len(other.finite) >= LEAST]
    return len(shown) >= 2 and not any(_moved(other, step) for other in shown)


def _rescaled(log: Log, jump: Change) -> bool:
    """Whether a reward and its deviation are multiplied by the same at once, and by more than a policy learns."""
    spread = log.get("reward/std")
    if spread is None or min(jump.before, jump.after) <= 0:
        return False
    values, at = spread.finite.values, bisect_left(spread.finite.steps, jump.step)
    sides = values[max(0, at - 5) : at], values[at : at + 5]
    if not all(sides) or min(map(min, sides)) <= 0:
        return False
    factors = jump.after / jump.before, statistics.median(sides[1]) / statistics.median(sides[0])
    apart = [abs(math.log(factor)) for factor in factors]
    return min(apart) > math.log(RESCALED) and abs(math.log(factors[0] / factors[1])) < math.log(2)


def _stays(series: Series, jump: Change) -> bool:
    """Whether a figure keeps at least half of a jump at every later tenth of the series."""
    later, width = series.since(jump.step).values, max(5, len(series) // 10)
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


def rewritten(log: Log, step: int, names: Sequence[str] = WRITTEN) -> bool:
    """Whether what the policy writes is another from that step on, by one of these figures and beyond noise."""
    shown = (series for name in names if (series := log.get(name)) is not None)
    changes = (change for series in shown if (change := around(series, step, RECENT)) is not None)
    return any(log.clear(c) and abs(c.size) > REWRITTEN * max(abs(c.before), abs(c.after)) for c in changes)


@check("run/shift")
def shift(log: Log) -> CheckResults:
    """Several metrics at another level from one step to the next."""
    if sum(any(log.get(name) is not None for name in family) for family in FAMILIES) < 2:
        raise not_shown("more than one metric that could jump")
    for step, together in shifts(log).items():
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
