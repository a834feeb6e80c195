"""`keel watch`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from keel.cli.app import app
from keel.lab.watch import PORT

HELP = """Serve a live page of a run, or of several runs side by side.

The page shows the report so far: state, time left, curves, the latest rollouts and the doctor's findings. The server
listens on 127.0.0.1 and prints how to open the page from another machine. It serves until Ctrl-C, or with
--until-end until all runs have ended. It writes nothing to the run folders.

Examples:

  keel watch runs/default

  keel watch runs/beta-0 runs/beta-1 --port 8001

  keel watch runs/default --until-end

Start it together with a run:

  keel train configs/default.yaml --watch
"""


@app.command(help=HELP)
def watch(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN [RUN]...", help="Run folders.")],
    port: Annotated[int, typer.Option(help="Port to listen on; 0 picks a free one.", min=0, max=65535)] = PORT,
    until_end: Annotated[bool, typer.Option("--until-end", help="Exit when all runs have ended.")] = False,
) -> int:
    from keel.lab.watch.serve import watch as serve

    with suppress(KeyboardInterrupt):  # the normal way to stop
        serve(runs, port, until_end=until_end, echo=typer.echo)
    return 0
