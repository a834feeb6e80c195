"""What plots of many points share: which colour a point has, which stand together, how far an interval goes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keel.eval.statistics import Estimate
from keel.lab.plots.charts import COLOURS
from keel.lab.studies.table import PERCENT, Summary

UNSET = "other"


@dataclass(frozen=True)
class Colouring:
    """The colour (from 0) of every point by label, and what each colour stands for."""

    of: Mapping[str, int]
    names: Sequence[str]


def colouring(summaries: Sequence[Summary]) -> Colouring:
    """A colour a point where they are few; otherwise one a value of the finest axis with few enough, or one alone."""
    labels = [one.label for one in summaries]
    if len(labels) <= COLOURS:
        return Colouring({label: index for index, label in enumerate(labels)}, labels)
    axis = colour_axis(summaries)
    if axis is None:
        return Colouring(dict.fromkeys(labels, 0), ["a point"])
    values = [one.options.get(axis, "") for one in summaries]
    known = list(dict.fromkeys(values))
    names = [f"{axis.rpartition('.')[2]}={value}" if value else UNSET for value in known]
    return Colouring({label: known.index(value) for label, value in zip(labels, values, strict=True)}, names)


def colour_axis(summaries: Sequence[Summary]) -> str | None:
    """The axis with the most values among those with 2 to 8."""
    counts = {name: len({one.options.get(name, "") for one in summaries}) for name in summaries[0].options}
    fitting = {name: count for name, count in counts.items() if 2 <= count <= COLOURS}
    return max(fitting, key=lambda name: fitting[name]) if fitting else None


def facets(summaries: Sequence[Summary]) -> list[tuple[str, list[Summary]]]:
    """Points by the chart that they stand in, never more than there are colours: alike in all but the colour's axis."""
    if len(summaries) <= COLOURS:
        return [("", list(summaries))]
    axis = colour_axis(summaries)
    together: dict[str, list[Summary]] = {}
    for index, one in enumerate(summaries):
        others = [value for name, value in one.options.items() if name != axis and value]
        apart = one.label if not others else " ".join(others)
        together.setdefault(f"points from {index // COLOURS * COLOURS + 1}" if axis is None else apart, []).append(one)
    return list(together.items())


def possible(figure: str) -> tuple[float, float]:
    """Between which values a figure can lie at all."""
    if figure == "forgetting":
        return -1.0, 1.0
    if figure in PERCENT or figure.endswith((":before", ":after")):
        return 0.0, 1.0
    exact = figure in ("kl_policy_ref", "kl_ref_policy", "kl_old_policy_ref", "kl_old_ref_policy")
    return (0.0 if exact else -math.inf), math.inf


def bounds(figure: str, found: Estimate | None) -> tuple[float, float] | None:
    """The interval as far as it is possible: a t-interval of shares over two seeds can go from −5 to 6."""
    if found is None or found.low is None or found.high is None:
        return None
    low, high = possible(figure)
    return max(low, found.low), min(high, found.high)


def limits(figures: Mapping[str, Sequence[Estimate]]) -> tuple[float, float] | None:
    """An axis' ends: room for intervals as wide as the means are apart, and nothing impossible.

    A wider interval is cut there, so that one point with little to say does not flatten all others.
    """
    ranges = [
        (found.mean, edge, *possible(name))
        for name, estimates in figures.items()
        for found in estimates
        for edge in bounds(name, found) or (found.mean, found.mean)
    ]
    if not ranges:
        return None
    means, edges = [mean for mean, *_ in ranges], [edge for _, edge, *_ in ranges]
    apart = max(means) - min(means) or 0.5 * max(map(abs, means)) or 0.5
    low, high = max(min(edges), min(means) - apart), min(max(edges), max(means) + apart)
    room = 0.06 * (high - low) or 0.1 * apart
    least, most = min(r[2] for r in ranges), max(r[3] for r in ranges)
    return max(least - room / 2, low - room), min(most + room / 2, high + room)
