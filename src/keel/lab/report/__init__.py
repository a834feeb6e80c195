"""A run directory, or what the doctor says of one, as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from keel.base.errors import KeelError
from keel.base.files import one_line_errors, write_atomic
from keel.loggers.rundir import REPORT

if TYPE_CHECKING:
    from keel.lab.doctor.diagnosis import Diagnosis

__all__ = ["write_diagnosis", "write_report"]


def write_report(runs: Sequence[Path], out: Path | None = None) -> Path:
    """Read the runs and write their report; returns its path.

    One run's report goes into its own directory, that of several beside the first one as `comparison.html`, unless
    `out` says otherwise.
    """
    from keel.lab.report.html import page
    from keel.lab.runs import read_run

    if not runs:
        raise KeelError("no run directory given; name at least one, such as runs/default")
    paths = [Path(run) for run in runs]
    records = [read_run(path) for path in paths]
    if out is None:
        out = paths[0] / REPORT if len(paths) == 1 else paths[0].resolve().parent / "comparison.html"
    return _write(Path(out), page(records))


def write_diagnosis(diagnosis: Diagnosis, verdict: str, out: Path) -> Path:
    """A diagnosis as a page of its own, under its verdict; returns its path."""
    from keel.lab.report.html import diagnosis_page

    return _write(out, diagnosis_page(diagnosis, verdict))


def _write(out: Path, text: str) -> Path:
    with one_line_errors(f"cannot create {out.parent}"):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, text)
    return out
