"""`keel report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keel.cli.app import app

HELP = """Write a self-contained HTML report of a run, or of several runs in the same charts.

Examples:

  keel report runs/default

  keel report runs/beta-0 runs/beta-1 --out compare.html
"""


@app.command(help=HELP)
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN [RUN]...", help="Run folders.")],
    out: Annotated[
        Path | None, typer.Option(help="Output file (default: report.html in the first run's folder).")
    ] = None,
) -> int:
    from keel.lab.report import write_report
    from keel.lab.report.diagnosis import folded_details

    typer.echo(f"wrote {write_report(runs, out, folded_details)}")
    return 0
