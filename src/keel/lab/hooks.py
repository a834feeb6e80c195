"""The lab at the end of a run: the doctor's findings and the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from keel.base.files import read_json
from keel.doctor.judge import finding_sentence, worst_finding
from keel.loggers.rundir import FINDINGS
from keel.run.result import EndHooks


def findings(run: Path) -> list[dict[str, Any]]:
    """The doctor's findings of a finished run."""
    from keel.doctor.examine import examine

    return [dict(finding) for finding in examine(run).as_dict()["findings"]]


def report(run: Path) -> None:
    """Write report.html of a finished run."""
    from keel.lab.report import write_report
    from keel.lab.report.diagnosis import folded_details

    write_report([run], run / "report.html", folded_details)


def worst(run: Path) -> list[str]:
    """The worst error or warning of a finished run as a list with one line; empty if there is none."""
    found = worst_finding(read_json(run / FINDINGS))
    return [] if found is None else [finding_sentence(found)]


AT_END = EndHooks(findings=findings, report=report)
