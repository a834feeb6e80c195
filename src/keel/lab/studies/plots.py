"""The plots of a study: figures against the axis, the frontier, the curves, forgetting against KL."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from keel.eval.statistics import Estimate, frontier
from keel.lab.plots.charts import COLOURS, GREY, Curve, Panel, Point
from keel.lab.plots.picture import Key, write_panels
from keel.lab.studies.layout import bounds, colouring, facets, limits
from keel.lab.studies.results import REWARD_CURVE, kl_curve
from keel.lab.studies.table import Summary, forgetting_pairs, frontier_points

FITTING = 44  # characters of names that fit under a chart
NUMBERS = 23  # of points, as many as fit
AGAINST: tuple[tuple[Any, ...], ...] = (
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
    ("Held-out text", "log-probability per token", ("text_logprob_after", "after", 4)),
    ("Steps inside the target band", "share", ("share_in_band", "share", 5)),
)
WAYS: Mapping[str, str] = {"kl_policy_ref": "KL(policy‖start)", "kl_ref_policy": "KL(start‖policy)"}


def study_panels(summaries: Sequence[Summary]) -> list[Panel]:
    """All charts of a study's page."""
    names = short_names(summaries)
    return [
        *split_names(axis_panels(summaries, names)),
        *frontier_panels(summaries),
        *curve_panels(summaries),
        *forgetting_panels(summaries),
    ]


def write_pictures(summaries: Sequence[Summary], folder: Path, title: str) -> list[str]:
    """axis.png, frontier.png, curves.png and forgetting.png: the charts of the page in files, and their names."""
    many, names, colours = len(summaries) > COLOURS, numbered(summaries), colouring(summaries)
    keys = [Key(name, index) for index, name in enumerate(colours.names if many else names)]
    on_line = Key("frontier of the means", GREY, dashed=True)
    curves = curve_panels(summaries)
    write_panels(folder / "axis.png", axis_panels(summaries, names), title)
    write_panels(
        folder / "frontier.png", frontier_panels(summaries), title, keys=[*keys, on_line], aside=names if many else ()
    )
    write_panels(folder / "curves.png", curves, title, rows=len(facets(summaries)), keys=keys)
    write_panels(folder / "forgetting.png", forgetting_panels(summaries), title, keys=keys)
    return ["axis.png", "frontier.png", "curves.png", "forgetting.png"]


def numbered(summaries: Sequence[Summary]) -> list[str]:
    """The points as the table numbers them."""
    return [f"{number}  {one.label}" for number, one in enumerate(summaries, start=1)]


# --------------------------------------------------------------------------------------------- against the axis


def short_names(summaries: Sequence[Summary]) -> list[str]:
    """Labels where they fit under a chart, otherwise the points' numbers."""
    labels = [one.label for one in summaries]
    shorter = [label.rpartition("=")[2] for label in labels]
    for names in (labels, shorter if len(set(shorter)) == len(shorter) else labels):
        if sum(map(len, names)) <= FITTING:
            return names
    return [str(number) for number in range(1, len(labels) + 1)]


def axis_panels(summaries: Sequence[Summary], names: Sequence[str]) -> list[Panel]:
    """Accuracy, KL, old skills and reward, point by point, with intervals."""
    panels = []
    for title, unit, *figures in AGAINST:
        known = {name: [e for one in summaries if (e := one.means.get(name)) is not None] for name, *_ in figures}
        series = [_figure(summaries, *figure) for figure in figures]
        hint = "95 % t-intervals over seeds"
        panels.append(Panel(title, unit, series, hint, across="point", names=names, y_range=limits(known)))
    return [panel for panel in panels if panel.y_range is not None]


def _figure(summaries: Sequence[Summary], name: str, label: str, colour: int) -> Curve:
    estimates = [one.means.get(name) for one in summaries]
    points = [(float(i), None if e is None else e.mean) for i, e in enumerate(estimates)]
    return Curve(label, points, colour, [bounds(name, e) for e in estimates], dots=True)


def split_names(panels: Sequence[Panel]) -> list[Panel]:
    """The same panels, each in several where names would overlap."""
    split = []
    for panel in panels:
        fits = sum(map(len, panel.names)) <= FITTING
        for start in range(0, len(panel.names), len(panel.names) if fits else NUMBERS):
            names = panel.names if fits else panel.names[start : start + NUMBERS]
            part = slice(start, start + len(names))
            series = [
                replace(one, points=[(x - start, y) for x, y in one.points[part]], error=one.error[part])
                for one in panel.series
            ]
            title = panel.title if fits else f"{panel.title}, points {start + 1} to {start + len(names)}"
            split.append(replace(panel, title=title, series=series, names=names))
    return split


# ---------------------------------------------------------------------------------------------------- frontier


def frontier_line(known: Mapping[str, tuple[Estimate, Estimate]]) -> list[tuple[float, float]]:
    """(√KL, reward) of the points that no other beats in both, by rising KL."""
    best = frontier({label: (kl.mean, reward.mean) for label, (kl, reward) in known.items()})
    return [(root(known[label][0].mean), known[label][1].mean) for label in best]


def root(value: float) -> float:
    return math.sqrt(max(0.0, value))


def frontier_panels(summaries: Sequence[Summary]) -> list[Panel]:
    """Reward against √KL; of many points only those on the frontier have intervals, the charts by point have all."""
    known, colours = frontier_points(summaries), colouring(summaries)
    if not known:
        return []
    line, many = frontier_line(known), len(summaries) > COLOURS
    numbers = {one.label: str(number) for number, one in enumerate(summaries, start=1)}
    series, arms = [], list[Point]()
    for label, (kl, reward) in known.items():
        at, wide = (root(kl.mean), reward.mean), bounds("kl_policy_ref", kl)
        drawn = not many or at in line
        error = [bounds("reward", reward) if drawn else None]
        series.append(Curve(label, [at], colours.of[label], error, dots=True, tag=numbers[label]))
        arms += [(root(wide[0]), at[1]), (root(wide[1]), at[1]), (root(wide[1]), None)] if wide and drawn else []
    series.append(Curve("frontier of the means", line, GREY, dashed=True))
    series += [Curve("95 % intervals of √KL", arms, GREY)] if arms else []
    means = [[replace(e, low=None, high=None) if many else e for e in pair] for pair in known.values()]
    kls, rewards = limits({"kl_policy_ref": [kl for kl, _ in means]}), limits({"reward": [e for _, e in means]})
    unit = "reward, mean of the last 10 steps; across, √(nats per token)"
    across = None if kls is None else (-0.02 * root(kls[1]), root(kls[1]))
    title = "Reward against √KL(policy‖start)"
    return [Panel(title, unit, series, across="√KL", x_range=across, y_range=rewards)]


# ------------------------------------------------------------------------------------------------------ curves


def curve_panels(summaries: Sequence[Summary]) -> list[Panel]:
    """Reward, KL and β while training: for each, a panel a facet."""
    kl, colours = kl_curve([row for one in summaries for row in one.rows]), colouring(summaries)
    panels = []
    for title, unit, name in (
        ("Reward while training", "mean of a step", REWARD_CURVE),
        ("KL(policy‖reference)", f"nats per token by {kl.split('/')[2]}", kl),
        ("β", "coefficient", "kl/beta"),
    ):
        for part, members in facets(summaries):
            series = [_course(one, name, colours.of[one.label]) for one in members]
            heading = f"{title}: {part}" if part else title
            panels.append(Panel(heading, unit, series, "mean over seeds, band from the lowest to the highest"))
    return panels


def _course(one: Summary, name: str, colour: int) -> Curve:
    """A point's curve: the mean of its runs at every step that some run has, and their range."""
    at: dict[float, list[float]] = {}
    for row in one.rows:
        for step, value in row.curves.get(name, ()):
            if value is not None:
                at.setdefault(step, []).append(value)
    steps = sorted(at)
    return Curve(one.label, [(s, fmean(at[s])) for s in steps], colour, [(min(at[s]), max(at[s])) for s in steps])


# -------------------------------------------------------------------------------------------------- forgetting


def forgetting_panels(summaries: Sequence[Summary]) -> list[Panel]:
    """What old skills lost against the KL of either direction, a dot a run."""
    colours, panels = colouring(summaries), []
    for figure, name in WAYS.items():
        series = [
            Curve(
                label,
                _apart([pair for one in members for pair in forgetting_pairs(one.rows, figure)]),
                index,
                dots=True,
            )
            for index, label in enumerate(colours.names)
            if (members := [one for one in summaries if colours.of[one.label] == index])
        ]
        unit = "old skills, before − after; across, nats per token"
        panels.append(Panel(f"Forgetting against {name}", unit, series, across=name))
    return panels


def _apart(pairs: Sequence[tuple[float, float]]) -> list[Point]:
    """Points with gaps between them, so that no line joins them."""
    return [point for x, y in pairs for point in ((x, y), (x, None))]
