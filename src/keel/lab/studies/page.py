"""A study on one page: verdict, table, charts against the axis, frontier, curves. Nothing is loaded from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from keel.lab.plots.charts import svg
from keel.lab.report.html import block, chart_data, curves, document
from keel.lab.report.sections import table
from keel.lab.studies.plots import short_names, study_panels
from keel.lab.studies.table import Summary, shown, shown_columns
from keel.lab.studies.verdict import Sentence


def study_page(title: str, command: str, summaries: Sequence[Summary], baseline: str, said: Sequence[Sentence]) -> str:
    """The whole page."""
    drawn = [(panel, picture) for panel in study_panels(summaries) if (picture := svg(panel))]
    words = "".join(f"<li class='{tone}'>{escape(text)}</li>" for tone, text in said)
    numbers = (
        "" if short_names(summaries)[0] != "1" else "<p class='muted'>Charts number the points as the table does.</p>"
    )
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
