"""`keel watch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from keel.cli.app import app
from keel.lab.watch import PORT

HELP = """Serve a live page of a run, or of several runs side by side.

It shows what keel report does, by what has been written so far: state and time left, curves, the latest rollouts, and
what the doctor finds in the log. It listens on this machine alone; the first lines say how to open it from another one.
It goes on when the runs have ended, until Ctrl-C; with --until-end it ends with them. Nothing is written into a run.

Examples:

  keel watch runs/default

  keel watch runs/beta-0 runs/beta-1 --port 8001

  keel watch runs/default --until-end

and from the start of a run, for as long as it trains:

  keel train configs/default.yaml --watch
"""


@app.command(help=HELP)
def watch(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN [RUN]...", help="Folders of runs.")],
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = PORT,
    until_end: Annotated[bool, typer.Option("--until-end", help="End once none of the runs goes on.")] = False,
) -> int:
    from keel.lab.watch.serve import watch as serve

    try:
        serve(runs, port, until_end=until_end, echo=typer.echo)
    except KeyboardInterrupt:  # the usual end, and no failure
        return 0
    return 0
