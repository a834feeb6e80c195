"""A run directory as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from keel.base.errors import KeelError
from keel.base.files import one_line_errors, write_atomic
from keel.loggers.rundir import REPORT

if TYPE_CHECKING:
    from keel.doctor.runs import RunRecord

__all__ = ["write_page", "write_report"]


def write_report(
    runs: Sequence[Path], out: Path | None = None, details: Callable[[RunRecord], str] | None = None
) -> Path:
    """Read the runs and write their report; returns its path.

    Default path: report.html in the run's folder, or comparison.html next to the first of several runs. `details`
    returns HTML that is folded below a run's findings.
    """
    from keel.doctor.runs import read_run
    from keel.lab.report.html import page

    if not runs:
        raise KeelError("no run directory given; name at least one, such as runs/default")
    paths = [Path(run) for run in runs]
    records = [read_run(path) for path in paths]
    if out is None:
        out = paths[0] / REPORT if len(paths) == 1 else paths[0].resolve().parent / "comparison.html"
    return write_page(Path(out), page(records, details))


def write_page(out: Path, text: str) -> Path:
    """Write a page atomically; its folder is created."""
    with one_line_errors(f"cannot create {out.parent}"):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, text)
    return out
