"""A run directory as one self-contained HTML page, and the hooks that the lab runs at the end of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keel.base.errors import KeelError
from keel.base.files import read_json
from keel.doctor.judge import finding_sentence, worst_finding
from keel.loggers.rundir import FINDINGS, REPORT
from keel.run.result import EndHooks

__all__ = ["AT_END", "worst", "write_report"]


def write_report(runs: Sequence[Path], out: Path | None = None) -> Path:
    """Read the runs and write their report; returns its path.

    Default path: report.html in the run's folder, or comparison.html next to the first of several runs.
    """
    from keel.doctor.runs import read_run
    from keel.lab.report.html import page, write_page

    if not runs:
        raise KeelError("no run directory given; name at least one, such as runs/default")
    paths = [Path(run) for run in runs]
    records = [read_run(path) for path in paths]
    if out is None:
        out = paths[0] / REPORT if len(paths) == 1 else paths[0].resolve().parent / "comparison.html"
    return write_page(Path(out), page(records))


def findings(run: Path) -> list[dict[str, Any]]:
    """The doctor's findings of a finished run."""
    from keel.doctor.examine import examine

    return [dict(finding) for finding in examine(run).as_dict()["findings"]]


def worst(run: Path) -> list[str]:
    """The worst error or warning of a finished run as a list with one line; empty if there is none."""
    found = worst_finding(read_json(run / FINDINGS))
    return [] if found is None else [finding_sentence(found)]


AT_END = EndHooks(findings=findings, report=lambda run: write_report([run]))
