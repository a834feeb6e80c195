"""A study on one page: verdict, table, charts against the axis, frontier, curves. Nothing is loaded from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from statistics import fmean
from typing import Any

from keel.lab.report.charts import Panel, Point, Series, svg
from keel.lab.report.html import block, chart_data, curves, document
from keel.lab.report.sections import table
from keel.lab.studies.layout import bounds, colouring, facets
from keel.lab.studies.pictures import WAYS, frontier_line, frontier_points, root, root_bounds
from keel.lab.studies.results import REWARD_CURVE, kl_curve
from keel.lab.studies.table import Summary, shown, shown_columns
from keel.lab.studies.verdict import Sentence, forgetting_pairs

FITTING = 44  # characters of names that fit under a chart
NUMBERS = 23  # of points, as many as fit
AGAINST: tuple[tuple[Any, ...], ...] = (
    ("Accuracy", "share right", ("accuracy_after", "after", 0), ("accuracy_before", "before", 7)),
    ("Exact KL", "nats per token", ("kl_policy_ref", "KL(policy‖start)", 2), ("kl_ref_policy", "KL(start‖policy)", 3)),
    ("Old skills", "share right", ("retention_after", "after", 2), ("retention_before", "before", 7)),
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
GREY = 7  # the colour of what belongs to no point


def study_page(title: str, command: str, summaries: Sequence[Summary], baseline: str, said: Sequence[Sentence]) -> str:
    """The whole page."""
    panels = [*against_axis(summaries), *_frontier(summaries), *_curves(summaries), *_forgetting(summaries)]
    drawn = [(panel, picture) for panel in panels if (picture := svg(panel))]
    words = "".join(f"<li class='{tone}'>{escape(text)}</li>" for tone, text in said)
    numbers = "" if _names(summaries)[0] != "1" else "<p class='muted'>Charts number the points as the table does.</p>"
    body = [
        f"<header><p class='muted'>Keel study</p><h1>{escape(title)}</h1>",
        f"<p><code>{escape(command)}</code></p></header>",
        f"<section class='verdict'><h2>Verdict</h2><ul class='words'>{words}</ul></section>",
        block("Points", f"{_table(summaries, baseline)}<p class='muted'>Mean ± half of the 95 % t-interval.</p>"),
        block("Differences from the baseline", _differences(summaries, baseline)),
        block("Figures", numbers + curves(drawn)),
        block("Runs", _runs(summaries)),
    ]
    return document(title, "".join(body), chart_data([panel for panel, _ in drawn]))


def _names(summaries: Sequence[Summary]) -> list[str]:
    """Labels where they fit under a chart, otherwise the points' numbers."""
    labels = [one.label for one in summaries]
    shorter = [label.rpartition("=")[2] for label in labels]
    for names in (labels, shorter if len(set(shorter)) == len(shorter) else labels):
        if sum(map(len, names)) <= FITTING:
            return names
    return [str(number) for number in range(1, len(labels) + 1)]


def _series(summaries: Sequence[Summary], figure: str, label: str, colour: int) -> Series:
    found = [one.means.get(figure) for one in summaries]
    points = [(float(i), None if e is None else e.mean) for i, e in enumerate(found)]
    return Series(label, points, colour, [bounds(figure, e) for e in found], dots=True)


def against_axis(summaries: Sequence[Summary]) -> list[Panel]:
    """Accuracy, KL, old skills and reward, point by point, with intervals; several charts where names would overlap."""
    names = _names(summaries)
    starts = range(0, len(names), len(names) if sum(map(len, names)) <= FITTING else NUMBERS)
    return [
        Panel(
            title if len(starts) == 1 else f"{title}, points {start + 1} to {start + len(part)}",
            unit,
            [_series(part, figure, label, colour) for figure, label, colour in figures],
            "95 % t-intervals over seeds",
            across="point",
            names=names[start : start + len(part)],
        )
        for title, unit, *figures in AGAINST
        for start in starts
        for part in [summaries[start : start + NUMBERS] if len(starts) > 1 else summaries]
    ]


def _frontier(summaries: Sequence[Summary]) -> list[Panel]:
    known, colours = frontier_points(summaries), colouring(summaries)
    if not known:
        return []
    series = [
        Series(label, [(root(kl.mean), reward.mean)], colours.of[label], [bounds("reward", reward)], dots=True)
        for label, (kl, reward) in known.items()
    ]
    series.append(Series("frontier of the means", frontier_line(known), GREY, dashed=True))
    wide = [(ends, reward.mean) for kl, reward in known.values() if (ends := root_bounds(kl)) is not None]
    arms: list[Point] = [point for (low, high), y in wide for point in ((low, y), (high, y), (high, None))]
    series += [Series("95 % intervals of √KL", arms, GREY)] if arms else []
    unit = "reward, mean of the last 10 steps; across, √(nats per token)"
    return [Panel("Reward against √KL(policy‖start)", unit, series, across="√KL")]


def _curves(summaries: Sequence[Summary]) -> list[Panel]:
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


def _course(one: Summary, name: str, colour: int) -> Series:
    """A point's curve: the mean of its runs at every step that some run has, and their range."""
    at: dict[float, list[float]] = {}
    for row in one.rows:
        for step, value in row.curves.get(name, ()):
            if value is not None:
                at.setdefault(step, []).append(value)
    steps = sorted(at)
    return Series(one.label, [(s, fmean(at[s])) for s in steps], colour, [(min(at[s]), max(at[s])) for s in steps])


def _forgetting(summaries: Sequence[Summary]) -> list[Panel]:
    colours, panels = colouring(summaries), []
    for figure, name in WAYS.items():
        series = [
            Series(
                words,
                _apart([pair for one in members for pair in forgetting_pairs(one.rows, figure)]),
                index,
                dots=True,
            )
            for index, words in enumerate(colours.names)
            if (members := [one for one in summaries if colours.of[one.label] == index])
        ]
        unit = "old skills, before − after; across, nats per token"
        panels.append(Panel(f"Forgetting against {name}", unit, series, across=name))
    return panels


def _apart(pairs: Sequence[tuple[float, float]]) -> list[Point]:
    """Points with gaps between them, so that no line joins them."""
    return [point for x, y in pairs for point in ((x, y), (x, None))]


def _table(summaries: Sequence[Summary], baseline: str) -> str:
    columns = shown_columns(summaries)
    rows = [
        [str(number), escape(one.label) + (" <small>baseline</small>" if one.label == baseline else "")]
        + [escape(shown(name, one.means.get(name))) for name in columns]
        + [escape(one.states)]
        for number, one in enumerate(summaries, start=1)
    ]
    return table(["", "point", *columns.values(), "runs"], rows)


def _differences(summaries: Sequence[Summary], baseline: str) -> str:
    columns = shown_columns(summaries)
    rows = []
    for one in summaries:
        if one.label == baseline:
            continue
        cells = [one.differences.get(name) for name in columns]
        marked = [
            f"<b>{shown(n, e)}</b>" if e and e.excludes_zero else shown(n, e)
            for n, e in zip(columns, cells, strict=True)
        ]
        rows.append([escape(one.label), *marked])
    note = "<p class='muted'>Paired over seeds; bold where the uncorrected 95 % interval excludes 0.</p>"
    return table(["point", *columns.values()], rows) + note if rows else ""


def _runs(summaries: Sequence[Summary]) -> str:
    rows = [
        [
            escape(one.label),
            str(row.seed),
            escape(row.state),
            escape(row.reason),
            "" if row.wall_s is None else f"{row.wall_s:.0f} s",
        ]
        for one in summaries
        for row in one.rows
    ]
    return table(["point", "seed", "state", "reason", "time"], rows)
