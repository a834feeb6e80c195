"""Layout of plots of many points: colours, charts and axis limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keel.eval.statistics import Estimate
from keel.lab.plots.charts import COLOURS
from keel.lab.studies.table import PERCENT, PointSummary

UNSET = "other"


@dataclass(frozen=True)
class Colouring:
    """The colour (from 0) of every point by label, and what each colour stands for."""

    by_label: Mapping[str, int]
    names: Sequence[str]


def colouring(summaries: Sequence[PointSummary]) -> Colouring:
    """One colour per point where they are few; otherwise one per value of `colour_axis`, or a single one."""
    labels = [point.label for point in summaries]
    if len(labels) <= COLOURS:
        return Colouring({label: index for index, label in enumerate(labels)}, labels)
    axis = colour_axis(summaries)
    if axis is None:
        return Colouring(dict.fromkeys(labels, 0), ["a point"])
    values = [point.options.get(axis, "") for point in summaries]
    distinct = list(dict.fromkeys(values))
    names = [f"{axis.rpartition('.')[2]}={value}" if value else UNSET for value in distinct]
    return Colouring({label: distinct.index(value) for label, value in zip(labels, values, strict=True)}, names)


def colour_axis(summaries: Sequence[PointSummary]) -> str | None:
    """The axis with the most values among those with 2 to 8."""
    counts = {name: len({point.options.get(name, "") for point in summaries}) for name in summaries[0].options}
    fitting = {name: count for name, count in counts.items() if 2 <= count <= COLOURS}
    return max(fitting, key=lambda name: fitting[name]) if fitting else None


def facets(summaries: Sequence[PointSummary]) -> list[tuple[str, list[PointSummary]]]:
    """The points of each chart, never more than there are colours: they differ only in the colour's axis."""
    if len(summaries) <= COLOURS:
        return [("", list(summaries))]
    axis = colour_axis(summaries)
    groups: dict[str, list[PointSummary]] = {}
    for index, point in enumerate(summaries):
        others = [value for name, value in point.options.items() if name != axis and value]
        heading = " ".join(others) or point.label
        if axis is None:
            heading = f"points from {index // COLOURS * COLOURS + 1}"
        groups.setdefault(heading, []).append(point)
    return list(groups.items())


def value_range(figure: str) -> tuple[float, float]:
    """The lowest and highest value that a figure can have."""
    if figure == "forgetting":
        return -1.0, 1.0
    if figure in PERCENT or figure.endswith((":before", ":after")):
        return 0.0, 1.0
    exact = figure in ("kl_policy_ref", "kl_ref_policy", "kl_old_policy_ref", "kl_old_ref_policy")
    return (0.0 if exact else -math.inf), math.inf


def bounds(figure: str, estimate: Estimate | None) -> tuple[float, float] | None:
    """The interval cut to possible values: a t-interval of shares over two seeds can go from −5 to 6."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return None
    low, high = value_range(figure)
    return max(low, estimate.low), min(high, estimate.high)


def limits(figures: Mapping[str, Sequence[Estimate]]) -> tuple[float, float] | None:
    """Axis limits that fit the means and intervals up to the spread of the means.

    Wider intervals are clipped, so that one imprecise point does not flatten all others.
    """
    ranges = [
        (estimate.mean, edge, *value_range(name))
        for name, estimates in figures.items()
        for estimate in estimates
        for edge in bounds(name, estimate) or (estimate.mean, estimate.mean)
    ]
    if not ranges:
        return None
    means, edges = [mean for mean, *_ in ranges], [edge for _, edge, *_ in ranges]
    spread = max(means) - min(means) or 0.5 * max(map(abs, means)) or 0.5
    low, high = max(min(edges), min(means) - spread), min(max(edges), max(means) + spread)
    room = 0.06 * (high - low) or 0.1 * spread
    least, most = min(r[2] for r in ranges), max(r[3] for r in ranges)
    return max(least - room / 2, low - room), min(most + room / 2, high + room)
