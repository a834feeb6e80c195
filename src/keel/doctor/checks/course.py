"""The run as a whole: metrics that jump together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from keel.doctor.checks.base import RECENT, CheckResults, Log, check, not_shown
from keel.doctor.findings import finding
from keel.doctor.history import Series
from keel.doctor.shapes import LEAST, Change, around, jumps

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
REWRITTEN = 0.25  # of a figure: learning changes less within a few steps
LITTLE, TINY = 1e-4, 1e-300  # of the largest value, below which a logarithm is not taken
Jump = tuple[str, Change]


def shifts(log: Log) -> dict[int, list[Jump]]:
    """Steps at which metrics of two families or more jump and stay, with these jumps; neighbouring steps are one.

    A KL that jumps alone counts where nothing else that could have moved with it has.
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
    """Whether the KL alone goes up at once and stays there, while nothing that the policy does changes.

    An update that takes the policy that far changes what it writes: at least two such figures must be known.
    """
    series = log.series[name].finite
    first, last = (statistics.median(part.values) for part in (series.head(RECENT), series.tail(RECENT)))
    if not name.startswith("kl/policy_ref") or jump.size <= log.limits["kl_alone"] or last - first > 2 * jump.size:
        return False  # where it goes further by other steps, the jump is a part of its course
    if all(other.step != jump.step for other in jumps(_logarithm(series), log.level)):
        return False  # it is multiplied by as much at other steps
    shown = [name for name in WRITTEN if (other := log.get(name)) is not None and len(other.finite) >= LEAST]
    return len(shown) >= 2 and not rewritten(log, step, shown)


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
