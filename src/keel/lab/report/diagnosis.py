"""The details of a diagnosis as HTML: a separate page, and the folded part of a run's report."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from keel.doctor.diagnosis import Diagnosis
from keel.doctor.examine import examine
from keel.doctor.findings import ranked
from keel.doctor.runs import RunRecord
from keel.lab.report import write_page
from keel.lab.report.html import document
from keel.lab.report.sections import finding_articles, table
from keel.lab.report.verdict import SEVERITY_TONES

_TONES = {"confirmed": "bad", "ruled out": "good"}


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
        f"<section><h2>What was looked at</h2>{details(data, opened=True)}</section>"
    )


def folded_details(run: RunRecord) -> str:
    """Hypotheses, unchecked items and the data read of a run; empty if it cannot be examined."""
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
    head = ("hypothesis", "verdict", "the figure that decides", "interacts with", "what to do next")
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
