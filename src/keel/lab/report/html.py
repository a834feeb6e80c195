"""The report and a diagnosis as self-contained HTML pages."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from keel.base.files import one_line_errors, write_atomic
from keel.doctor.findings import Diagnosis, ranked
from keel.doctor.runs import RunRecord
from keel.lab.plots.charts import COLOURS, HEIGHT, WIDTH, Panel, constants, svg, thin
from keel.lab.report import samples, sections
from keel.lab.report.panels import panels
from keel.lab.report.sections import finding_articles, table
from keel.lab.report.verdict import SEVERITY_TONES, labels, sentences


def page(runs: Sequence[RunRecord]) -> str:
    """The report of one run, or of several runs in the same charts."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs: {', '.join(run.name for run in runs)}"
    shown, data = charts(runs)
    body = [f"<header><p class='muted'>Keel run report</p><h1>{escape(title)}</h1></header>"]
    if len(runs) > 1:
        body.append(block("Comparison", sections.comparison(runs)))
    body += [verdict(run, index, len(runs)) for index, run in enumerate(runs)]
    if len(runs) > 1:
        body.append(block("Options that differ", sections.differences(runs) or "<p class='muted'>None.</p>"))
    body.append(block("Findings", per_run(runs, sections.findings, opened=True)))
    body.append(block("What the doctor checked", per_run(runs, folded_details, opened=False)))
    body.append(block("Curves", shown))
    for heading, make in (
        ("Skills before and after", sections.retention_table),
        ("Sample completions", samples.section if len(runs) == 1 else samples.before_and_after),
        ("Timeline", sections.timeline),
    ):
        body.append(block(heading, per_run(runs, make, opened=heading != "Timeline")))
    body.append(block("Configuration", per_run(runs, sections.configuration, opened=False, folded=True)))
    body.append(block("Versions", per_run(runs, sections.versions, opened=False, folded=True)))
    return document(title, "".join(body), data)


def document(title: str, body: str, data: str | None = '{"charts":[]}', *, script: str = "", sources: str = "") -> str:
    """The HTML document. Its content security policy allows the report's own scripts and blocks loading.

    Without `data` the body must contain a `data_element`. `script` is appended to the report's own, and `sources`
    extends the policy for it.
    """
    scripts = [text for text in (resource("page.js"), script) if text]
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}; img-src data:{sources}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>Keel · {escape(title)}</title><style>{resource('page.css')}</style></head>\n"
        f"<body><main>{body}</main>{'' if data is None else data_element(data)}"
        f"{''.join(f'<script>{text}</script>' for text in scripts)}</body></html>\n"
    )


def data_element(data: str) -> str:
    """The element from which the page's script reads the numbers of the charts."""
    return f'<script type="application/json" id="charts">{data}</script>'


def resource(name: str, package: str = "keel.lab.report") -> str:
    """The text of a file in a package."""
    return files(package).joinpath(name).read_text(encoding="utf-8")


def embed(data: object) -> str:
    """JSON that cannot close its script element."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("utf-8", "replace").decode("utf-8")


def chart_data(drawn: Sequence[Panel]) -> str:
    """The numbers of every chart, which the script shows at the pointer."""
    charts = []
    for panel in drawn:
        thinned = [thin(series) for series in panel.series]
        curves = [
            {
                "label": series.label,
                "x": [x for x, _ in series.points],
                "y": [None if y is None else float(f"{y:.6g}") for _, y in series.points],
                "e": [None if b is None else float(f"{(b[1] - b[0]) / 2:.3g}") for b in series.error],
            }
            for series in thinned
        ]
        charts.append({"title": panel.title, "across": panel.x_label, "names": list(panel.names), "series": curves})
    return embed({"width": WIDTH, "height": HEIGHT, "charts": charts})


def block(heading: str, content: str) -> str:
    """A section with its heading; empty without content."""
    return f"<section><h2>{escape(heading)}</h2>{content}</section>" if content else ""


def verdict(run: RunRecord, index: int, count: int, progress: str = "") -> str:
    """The verdict of a run: sentences, key figures, missing files.

    With several runs the figures are in a separate table, unless `progress` (HTML of the live page) is given.
    """
    name = f"<i class='key k{index % 8}'></i> {escape(run.name)} " if count > 1 else "Verdict "
    lines = "".join(f"<li class='{tone}'>{escape(text)}</li>" for tone, text in sentences(run))
    cards = "".join(
        f"<div class='card'><span>{escape(label)}</span><b>{escape(figure)}</b><small>{escape(note)}</small></div>"
        for label, figure, note in sections.headline(run)
    )
    absent = ""
    if run.missing:
        items = "".join(f"<li>{escape(note)}</li>" for note in run.missing)
        heading = f"What is missing from this run ({len(run.missing)})"
        absent = f"<details class='missing'><summary>{heading}</summary><ul>{items}</ul></details>"
    figures = f"<div class='cards'>{cards}</div>" if count == 1 or progress else ""
    return (
        f"<section class='verdict'><h2>{name}{sections.pills(labels(run))}</h2>"
        f"{progress}{figures}<ul class='words'>{lines}</ul>{absent}</section>"
    )


def charts(runs: Sequence[RunRecord]) -> tuple[str, str]:
    """The charts of the runs, and their numbers for the script. Constant charts become a line of text."""
    drawn, unchanging = [], []
    for panel in panels(runs):
        if values := constants(panel):
            unchanging.append(f"<li>{escape(panel.title)}: {escape(values)}</li>")
        elif picture := svg(panel):
            drawn.append((panel, picture))
    listed = f"<h3>Constant values</h3><ul>{''.join(unchanging)}</ul>" if unchanging else ""
    grid = curves(drawn, len(runs) > 1) if drawn or not listed else ""
    return grid + listed, chart_data([panel for panel, _ in drawn])


def curves(drawn: Sequence[tuple[Panel, str]], several_runs: bool = False) -> str:
    """All charts in a grid, which is one column on a phone."""
    if not drawn:
        return "<p class='muted'>No steps have been recorded yet.</p>"
    parts = []
    for index, (panel, picture) in enumerate(drawn):
        keys = "".join(
            f"<span><i class='key k{series.colour % COLOURS}{' dashed' * series.dashed}'></i>"
            f"{escape(series.label)}</span>"
            for series in panel.series
            if several_runs or len(panel.series) > 1
        )
        scale = "log scale" if "data-log" in picture else ""
        caption = " · ".join(escape(text) for text in (panel.unit, panel.hint, scale) if text)
        heading = f"<b>{escape(panel.title)}</b> <small>{caption}</small>"
        parts.append(
            f"<figure data-chart='{index}'><figcaption>{heading}</figcaption>{picture}"
            f"<div class='legend'>{keys}</div><output></output></figure>"
        )
    marked = any(panel.events for panel, _ in drawn)
    notes = ["Dotted lines: guards, rollbacks and resumes (see the timeline)."] if marked else []
    notes += ["Ticks at the bottom: checkpoints."] if any(panel.checkpoints for panel, _ in drawn) else []
    has_abandoned = any(series.label.startswith("abandoned") for panel, _ in drawn for series in panel.series)
    notes += ["Dashed: steps that a rollback discarded."] if has_abandoned else []
    note = f"<p class='muted'>{' '.join(notes)}</p>" if notes else ""
    return f"{note}<div class='charts'>{''.join(parts)}</div>"


def per_run(runs: Sequence[RunRecord], make: Callable[[RunRecord], str], opened: bool, folded: bool = False) -> str:
    """The content of each run: unchanged for one run, folded under its name for several."""
    contents = [(run, content) for run in runs if (content := make(run))]
    if len(runs) == 1 and not folded:
        return contents[0][1] if contents else ""
    return "".join(
        f"<details{' open' if opened and index == 0 else ''}><summary>{escape(run.name)}</summary>{content}</details>"
        for index, (run, content) in enumerate(contents)
    )


_TONES = {"confirmed": "bad", "ruled out": "good"}


def write_page(out: Path, text: str) -> Path:
    """Write a page atomically; its folder is created."""
    with one_line_errors(f"cannot create {out.parent}"):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, text)
    return out


def write_diagnosis(diagnosis: Diagnosis, verdict: str, out: Path) -> Path:
    """Write a diagnosis under its verdict as a separate page; returns its path."""
    return write_page(out, document(verdict, summary(diagnosis, verdict)))


def summary(diagnosis: Diagnosis, verdict: str) -> str:
    """The verdict, the findings and the details."""
    data = diagnosis.as_dict()
    lines = [
        (
            "good" if diagnosis.healthy else SEVERITY_TONES[ranked(diagnosis.findings)[0].severity],
            f"<b>{escape(verdict)}</b>",
        )
    ]
    lines += [("warn", escape(line)) for line in diagnosis.raised_thresholds]
    if diagnosis.sound:
        lines.append(("good", f"tried and found sound: {escape(', '.join(diagnosis.sound))}"))
    items = "".join(f"<li class='{tone}'>{line}</li>" for tone, line in lines)
    articles = finding_articles(data["findings"])
    findings = f"<section><h2>Findings</h2>{articles}</section>" if articles else ""
    return (
        "<header><p class='muted'>Keel doctor</p></header>"
        f"<section class='verdict'><ul class='words'>{items}</ul></section>{findings}"
        f"<section><h2>What was checked</h2>{details(data, opened=True)}</section>"
    )


def folded_details(run: RunRecord) -> str:
    """Hypotheses, unchecked items and notes of a run's diagnosis; empty if the run cannot be examined."""
    from keel.doctor.examine import examine  # imported here because it is slow to load

    try:
        return details(examine(run.path).as_dict(), opened=False)
    except Exception:  # a report must not fail because this part cannot be made
        return ""


def details(data: dict[str, Any], *, opened: bool) -> str:
    """All parts except the findings, from `Diagnosis.as_dict()`."""
    rows = [
        (
            f"{escape(row['name'])} {escape(row['title'])}",
            f"<span class='pill {_TONES.get(row['verdict'], 'plain')}'>{escape(row['verdict'])}</span>",
            escape(row["figure"]),
            escape(row["interacts"]),
            f"→ {escape(row['action'])}",
        )
        for row in data["hypotheses"]
    ]
    head = ("hypothesis", "verdict", "deciding figure", "interacts with", "next action")
    return "".join(
        (
            _folded("Hypotheses", table(head, rows), opened),
            _folded(f"Could not be checked ({len(data['unchecked'])})", _items(data["unchecked"]), False),
            _folded("What was read and measured", _lines(data["notes"]), opened),
        )
    )


def _folded(heading: str, content: str, opened: bool) -> str:
    if not content:
        return ""
    return f"<details{' open' * opened}><summary>{escape(heading)}</summary>{content}</details>"


def _items(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""


def _lines(lines: Sequence[str]) -> str:
    return f"<pre>{escape(chr(10).join(lines))}</pre>" if lines else ""
