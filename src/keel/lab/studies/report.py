"""Write the results of a study: points.csv, table.csv, table.md, plots and report.html."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from keel.base.errors import KeelError
from keel.base.files import write_atomic
from keel.lab.plots.charts import svg
from keel.lab.report.html import block, chart_data, curves, document
from keel.lab.report.sections import table
from keel.lab.report.verdict import Sentence
from keel.lab.studies.folder import FAILED, JobOutcome, jobs
from keel.lab.studies.grid import Study
from keel.lab.studies.plots import short_names, study_panels, write_pictures
from keel.lab.studies.results import read_result
from keel.lab.studies.table import (
    PointSummary,
    change_sides,
    display_columns,
    format_figure,
    points_csv,
    skill_columns,
    summarise,
    table_csv,
    table_md,
)
from keel.lab.studies.verdict import verdict

NOT_RUN = JobOutcome(FAILED, "not run")


@dataclass(frozen=True)
class StudyReport:
    """The table and the verdict as text for a terminal, and the files that were written."""

    text: str
    files: tuple[str, ...]


def write_study(study: Study, path: Path, outcomes: Mapping[str, JobOutcome], command: str = "") -> StudyReport:
    """Read every run of the study and write its tables, plots and page."""
    path = path.resolve()
    rows = [read_result(job, outcomes.get(job.label, NOT_RUN), study.measure) for job in jobs(path, study)]
    summaries = summarise(rows, study.baseline)
    sentences = verdict(summaries, study.baseline, study.metric, study.axes)
    verdict_text = "".join(f"- {text}\n" for _, text in sentences)
    table = table_md(summaries, study.baseline)
    page = study_page(study.name, command, summaries, study.baseline, sentences)
    files = {
        "points.csv": points_csv(rows),
        "table.csv": table_csv(summaries),
        "table.md": f"{table}\n{verdict_text}",
        "report.html": page,
    }
    for name, content in files.items():
        write_atomic(path / name, content)
    try:
        pictures = write_pictures(summaries, path, study.name)
    except KeelError as error:
        pictures = [f"no pictures: {error}"]
    return StudyReport(f"{table}\n{verdict_text}", (*files, *pictures))


def study_page(
    title: str, command: str, summaries: Sequence[PointSummary], baseline: str, verdict: Sequence[Sentence]
) -> str:
    """The page as HTML."""
    drawn = [(panel, picture) for panel in study_panels(summaries) if (picture := svg(panel))]
    items = "".join(f"<li class='{tone}'>{escape(text)}</li>" for tone, text in verdict)
    numbered = short_names(summaries)[0] == "1"
    numbering = "<p class='muted'>Charts number the points as the table does.</p>" if numbered else ""
    skills, intervals = skill_columns(summaries), "<p class='muted'>Mean ± half of the 95 % t-interval.</p>"
    body = [
        f"<header><p class='muted'>Keel study</p><h1>{escape(title)}</h1>",
        f"<p><code>{escape(command)}</code></p></header>",
        f"<section class='verdict'><h2>Verdict</h2><ul class='words'>{items}</ul></section>",
        block("Points", _table(summaries, baseline, display_columns(summaries)) + intervals),
        block("Old skills", _table(summaries, baseline, skills) + intervals) if skills else "",
        block("Differences from the baseline", _differences(summaries, baseline)),
        block("Figures", numbering + curves(drawn)),
        block("Runs", _runs(summaries)),
    ]
    return document(title, "".join(body), chart_data([panel for panel, _ in drawn]))


def _table(summaries: Sequence[PointSummary], baseline: str, columns: Mapping[str, str]) -> str:
    rows = [
        [str(number), escape(point.label) + (" <small>baseline</small>" if point.label == baseline else "")]
        + [escape(format_figure(name, point.means.get(name))) for name in columns]
        + [escape(point.states)]
        for number, point in enumerate(summaries, start=1)
    ]
    return table(["", "point", *columns.values(), "runs"], rows)


def _differences(summaries: Sequence[PointSummary], baseline: str) -> str:
    shown = display_columns(
        summaries
    )  # without figures that training does not change, and differences that repeat the figure after training
    before_or_change = {side for name in shown if (sides := change_sides(name)) for side in (name, sides[0])}
    columns = {name: title for name, title in shown.items() if name not in before_or_change}
    rows = []
    for point in summaries:
        if point.label == baseline:
            continue
        cells = [point.differences.get(name) for name in columns]
        texts = [format_figure(n, e, difference=True) for n, e in zip(columns, cells, strict=True)]
        marked = [f"<b>{text}</b>" if e and e.excludes_zero else text for text, e in zip(texts, cells, strict=True)]
        rows.append([escape(point.label), *marked])
    note = "<p class='muted'>Paired over seeds; bold where the uncorrected 95 % interval excludes 0.</p>"
    return table(["point", *columns.values()], rows) + note if rows else ""


def _runs(summaries: Sequence[PointSummary]) -> str:
    rows = [
        [
            escape(point.label),
            str(row.seed),
            escape(row.state),
            escape(row.reason),
            "" if row.wall_s is None else f"{row.wall_s:.0f} s",
        ]
        for point in summaries
        for row in point.rows
    ]
    return table(["point", "seed", "state", "reason", "time"], rows)
