"""`keel report` and `keel env`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from keel.cli.app import app, print_json

REPORT_HELP = """Write one self-contained HTML page on a run, or on several over each other.

Examples:

  keel report runs/default

  keel report runs/beta-0 runs/beta-1 --out compare.html
"""


@app.command(help=REPORT_HELP)
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN [RUN]...", help="Folders of runs.")],
    out: Annotated[Path | None, typer.Option(help="File to write; by default report.html in the first run.")] = None,
) -> int:
    from keel.lab.report import write_report

    typer.echo(f"wrote {write_report(runs, out)}")
    return 0


@app.command()
def env(as_json: Annotated[bool, typer.Option("--json", help="Print data instead of lines.")] = False) -> int:
    """Show versions, device, cores, threads and memory: what a bug report needs."""
    from keel.run.environment import environment

    facts = {**environment(), "memory_gib": _memory_gib()}
    facts.pop("argv", None)
    if as_json:
        print_json(facts)
        return 0
    packages = facts.pop("packages")
    for name, value in {**facts, **packages}.items():
        typer.echo(f"{name:<14} {'not installed' if value is None else _plain(value)}")
    return 0


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):  # not every system has it
        return None


def _plain(value: Any) -> str:
    return ", ".join(_plain(item) for item in value) or "none" if isinstance(value, list) else str(value)
