"""The plots of a study, with their colours and axis limits: figures by point, frontier, curves, forgetting."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from keel.eval.statistics import Estimate, pareto_frontier
from keel.lab.plots.charts import COLOURS, GREY, Curve, Panel, Point
from keel.lab.plots.picture import LegendEntry, write_panels
from keel.lab.studies.results import REWARD_CURVE, kl_curve
from keel.lab.studies.table import PERCENT, PointSummary, forgetting_pairs, frontier_points

UNSET = "other"
MAX_NAME_CHARACTERS = 44  # characters of all names under a chart
MAX_NUMBERS = 23  # points per chart if names are numbers
AXIS_CHARTS: tuple[tuple[Any, ...], ...] = (
    ("Accuracy", "share right", ("accuracy_after", "after", 0), ("accuracy_before", "before", GREY)),
    ("Exact KL", "nats per token", ("kl_policy_ref", "KL(policy‖start)", 2), ("kl_ref_policy", "KL(start‖policy)", 3)),
    ("Old skills", "share right", ("retention_after", "after", 2), ("retention_before", "before", GREY)),
    (
        "KL on the old skills' prompts",
        "nats per token",
        ("kl_old_policy_ref", "KL(policy‖start)", 2),
        ("kl_old_ref_policy", "KL(start‖policy)", 3),
    ),
    ("Reward", "mean of the last 10 steps", ("reward", "reward", 1)),
    (
        "Held-out text",
        "log-probability per token",
        ("text_logprob_after", "after", 4),
        ("text_logprob_before", "before", GREY),
    ),
    ("Steps inside the target band", "share", ("share_in_band", "share", 5)),
)
KL_DIRECTIONS: Mapping[str, str] = {"kl_policy_ref": "KL(policy‖start)", "kl_ref_policy": "KL(start‖policy)"}


@dataclass(frozen=True)
class Colouring:
    """The colour (from 0) of every point by label, and the name of each colour in the legend."""

    by_label: Mapping[str, int]
    names: Sequence[str]


def colouring(summaries: Sequence[PointSummary]) -> Colouring:
    """One colour per point if there are few points; otherwise one per value of `colour_axis`, or a single colour."""
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
    """The points of each chart, at most one per colour: they differ only in the colour's axis."""
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
    """The interval clipped to possible values: a t-interval of fractions over two seeds may go from −5 to 6."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return None
    low, high = value_range(figure)
    return max(low, estimate.low), min(high, estimate.high)


def limits(figures: Mapping[str, Sequence[Estimate]]) -> tuple[float, float] | None:
    """Axis limits that contain the means, and intervals up to the range of the means.

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
    extent = max(means) - min(means) or 0.5 * max(map(abs, means)) or 0.5
    low, high = max(min(edges), min(means) - extent), min(max(edges), max(means) + extent)
    room = 0.06 * (high - low) or 0.1 * extent
    least, most = min(r[2] for r in ranges), max(r[3] for r in ranges)
    return max(least - room / 2, low - room), min(most + room / 2, high + room)


def study_panels(summaries: Sequence[PointSummary]) -> list[Panel]:
    """All charts of a study's page."""
    names = short_names(summaries)
    return [
        *split_names(axis_panels(summaries, names)),
        *frontier_panels(summaries),
        *curve_panels(summaries),
        *forgetting_panels(summaries),
    ]


def write_pictures(summaries: Sequence[PointSummary], folder: Path, title: str) -> list[str]:
    """Write the page's charts to axis.png, frontier.png, curves.png and forgetting.png; returns their names."""
    many, names, colours = len(summaries) > COLOURS, numbered(summaries), colouring(summaries)
    entries = [LegendEntry(name, index) for index, name in enumerate(colours.names if many else names)]
    write_panels(folder / "axis.png", axis_panels(summaries, names), title)
    with_line = [*entries, LegendEntry("frontier of the means", GREY, dashed=True)]
    notes = names if many else ()
    write_panels(folder / "frontier.png", frontier_panels(summaries), title, legend=with_line, notes=notes)
    write_panels(folder / "curves.png", curve_panels(summaries), title, rows=len(facets(summaries)), legend=entries)
    write_panels(folder / "forgetting.png", forgetting_panels(summaries), title, legend=entries)
    return ["axis.png", "frontier.png", "curves.png", "forgetting.png"]


def numbered(summaries: Sequence[PointSummary]) -> list[str]:
    """The points with their numbers in the table."""
    return [f"{number}  {point.label}" for number, point in enumerate(summaries, start=1)]


# --------------------------------------------------------------------------------------------- against the axis


def short_names(summaries: Sequence[PointSummary]) -> list[str]:
    """The points' labels if they fit under a chart, otherwise their numbers."""
    labels = [point.label for point in summaries]
    values = [label.rpartition("=")[2] for label in labels]
    for names in (labels, values if len(set(values)) == len(values) else labels):
        if sum(map(len, names)) <= MAX_NAME_CHARACTERS:
            return names
    return [str(number) for number in range(1, len(labels) + 1)]


def axis_panels(summaries: Sequence[PointSummary], names: Sequence[str]) -> list[Panel]:
    """Accuracy, KL, old skills and reward by point, with intervals."""
    panels = []
    for title, unit, *figures in AXIS_CHARTS:
        known = {name: [e for point in summaries if (e := point.means.get(name)) is not None] for name, *_ in figures}
        series = [_figure(summaries, *figure) for figure in figures]
        hint = "95 % t-intervals over seeds"
        panels.append(Panel(title, unit, series, hint, x_label="point", names=names, y_range=limits(known)))
    return [panel for panel in panels if panel.y_range is not None]


def _figure(summaries: Sequence[PointSummary], name: str, label: str, colour: int) -> Curve:
    estimates = [point.means.get(name) for point in summaries]
    points = [(float(i), None if estimate is None else estimate.mean) for i, estimate in enumerate(estimates)]
    return Curve(label, points, colour, [bounds(name, estimate) for estimate in estimates], dots=True)


def split_names(panels: Sequence[Panel]) -> list[Panel]:
    """The same panels, each split into several if names would overlap."""
    split = []
    for panel in panels:
        fits = sum(map(len, panel.names)) <= MAX_NAME_CHARACTERS
        for start in range(0, len(panel.names), len(panel.names) if fits else MAX_NUMBERS):
            names = panel.names if fits else panel.names[start : start + MAX_NUMBERS]
            part = slice(start, start + len(names))
            series = [
                replace(curve, points=[(x - start, y) for x, y in curve.points[part]], error=curve.error[part])
                for curve in panel.series
            ]
            title = panel.title if fits else f"{panel.title}, points {start + 1} to {start + len(names)}"
            split.append(replace(panel, title=title, series=series, names=names))
    return split


# ---------------------------------------------------------------------------------------------------- frontier


def frontier_line(known: Mapping[str, tuple[Estimate, Estimate]]) -> list[tuple[float, float]]:
    """(√KL, reward) of the Pareto-optimal points, by rising KL."""
    best = pareto_frontier({label: (kl.mean, reward.mean) for label, (kl, reward) in known.items()})
    return [(root(known[label][0].mean), known[label][1].mean) for label in best]


def root(value: float) -> float:
    return math.sqrt(max(0.0, value))


def frontier_panels(summaries: Sequence[PointSummary]) -> list[Panel]:
    """Reward against √KL; with many points, only those on the frontier have intervals."""
    known, colours = frontier_points(summaries), colouring(summaries)
    if not known:
        return []
    line, many = frontier_line(known), len(summaries) > COLOURS
    numbers = {point.label: str(number) for number, point in enumerate(summaries, start=1)}
    series, kl_intervals = [], list[Point]()
    for label, (kl, reward) in known.items():
        position, kl_interval = (root(kl.mean), reward.mean), bounds("kl_policy_ref", kl)
        drawn = not many or position in line
        error = [bounds("reward", reward) if drawn else None]
        series.append(Curve(label, [position], colours.by_label[label], error, dots=True, tag=numbers[label]))
        if kl_interval and drawn:
            low, high = map(root, kl_interval)
            kl_intervals += [(low, reward.mean), (high, reward.mean), (high, None)]
    series.append(Curve("frontier of the means", line, GREY, dashed=True))
    series += [Curve("95 % intervals of √KL", kl_intervals, GREY)] if kl_intervals else []
    means = [[replace(e, low=None, high=None) if many else e for e in pair] for pair in known.values()]
    kls, rewards = limits({"kl_policy_ref": [kl for kl, _ in means]}), limits({"reward": [e for _, e in means]})
    unit = "reward, mean of the last 10 steps; across, √(nats per token)"
    x_range = None if kls is None else (-0.02 * root(kls[1]), root(kls[1]))
    title = "Reward against √KL(policy‖start)"
    return [Panel(title, unit, series, x_label="√KL", x_range=x_range, y_range=rewards)]


# ------------------------------------------------------------------------------------------------------ curves


def curve_panels(summaries: Sequence[PointSummary]) -> list[Panel]:
    """Reward, KL and β during training: one panel each per facet."""
    kl, colours = kl_curve([row for point in summaries for row in point.rows]), colouring(summaries)
    panels = []
    for title, unit, name in (
        ("Reward while training", "mean of a step", REWARD_CURVE),
        ("KL(policy‖reference)", f"nats per token by {kl.split('/')[2]}", kl),
        ("β", "coefficient", "kl/beta"),
    ):
        for facet, members in facets(summaries):
            series = [_mean_curve(point, name, colours.by_label[point.label]) for point in members]
            heading = f"{title}: {facet}" if facet else title
            panels.append(Panel(heading, unit, series, "mean over seeds, band from the lowest to the highest"))
    return panels


def _mean_curve(point: PointSummary, name: str, colour: int) -> Curve:
    """A point's curve: the mean of its runs at every step that some run has, and their range."""
    by_step: dict[float, list[float]] = {}
    for row in point.rows:
        for step, value in row.curves.get(name, ()):
            if value is not None:
                by_step.setdefault(step, []).append(value)
    steps = sorted(by_step)
    band = [(min(by_step[s]), max(by_step[s])) for s in steps]
    return Curve(point.label, [(s, fmean(by_step[s])) for s in steps], colour, band)


# -------------------------------------------------------------------------------------------------- forgetting


def forgetting_panels(summaries: Sequence[PointSummary]) -> list[Panel]:
    """The loss on old skills against the KL in either direction, one dot per run."""
    colours, panels = colouring(summaries), []
    for figure, name in KL_DIRECTIONS.items():
        series = [
            Curve(label, _with_gaps(forgetting_pairs([r for p in members for r in p.rows], figure)), index, dots=True)
            for index, label in enumerate(colours.names)
            if (members := [point for point in summaries if colours.by_label[point.label] == index])
        ]
        unit = "old skills, before − after; across, nats per token"
        panels.append(Panel(f"Forgetting against {name}", unit, series, x_label=name))
    return panels


def _with_gaps(pairs: Sequence[tuple[float, float]]) -> list[Point]:
    """Points with gaps between them, so that no line joins them."""
    return [point for x, y in pairs for point in ((x, y), (x, None))]
