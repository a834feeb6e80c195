"""`keel report`, `keel show`, `keel watch` and `keel export`: commands that read run folders."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from keel.base.errors import KeelError
from keel.cli.app import app, print_json
from keel.lab.watch import PORT

REPORT_HELP = """Write a self-contained HTML report of a run, or of several runs in the same charts.

Examples:

  keel report runs/default

  keel report runs/beta-0 runs/beta-1 --out compare.html
"""


@app.command(help=REPORT_HELP)
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN [RUN]...", help="Run folders.")],
    out: Annotated[
        Path | None, typer.Option(help="Output file (default: report.html in the first run's folder).")
    ] = None,
) -> int:
    from keel.lab.report import write_report

    typer.echo(f"wrote {write_report(runs, out)}")
    return 0


SHOW_HELP = """Print the recorded rollouts of a step: prompts, completions, log-ratios, rewards, advantages.

Sampled tokens are coloured by their log-ratio to the reference, a k1 sample of the KL (orange: more likely than under
the reference, blue: less likely). An episode is shown turn by turn: what the policy sampled, the calls or the reward of
the turn, and the replies of tools or the environment, which are not trained on.

Examples:

  keel show runs/default

  keel show runs/default --step 50 --worst --limit 3

  keel show runs/default --step 50 --problem 'sort/0/49/3' --json
"""


@app.command(help=SHOW_HELP)
def show(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    step: Annotated[int | None, typer.Option(help="Step to show (default: the last with rollouts).")] = None,
    problem: Annotated[str | None, typer.Option(metavar="KEY", help="Only this problem's completions.")] = None,
    group: Annotated[int | None, typer.Option(help="Only this group's completions.")] = None,
    best: Annotated[bool, typer.Option("--best", help="Highest rewards first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Lowest rewards first.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of completions.")] = 16,
    full: Annotated[bool, typer.Option("--full", help="Print long episodes and replies in full.")] = False,
    no_color: Annotated[bool, typer.Option("--no-color", help="Plain text.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the records as data.")] = False,
) -> int:
    from keel.lab.report.rollouts import choose, read_step

    if best and worst:
        raise KeelError("--best and --worst exclude each other: give one")
    shown_step, records = read_step(run, step)
    order = "best" if best else "worst" if worst else None
    selected = choose(records, problem=problem, group=group, order=order, limit=limit)
    if as_json:
        print_json(selected)
        return 0
    from rich.console import Console

    from keel.lab.report.terminal import show_rollouts

    console = Console(no_color=True if no_color else None, highlight=False)
    show_rollouts(str(run), shown_step, selected, console, recorded=len(records), full=full)
    return 0


WATCH_HELP = """Serve a live page of a run, or of several runs side by side.

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


@app.command(help=WATCH_HELP)
def watch(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN [RUN]...", help="Run folders.")],
    port: Annotated[int, typer.Option(help="Port to listen on; 0 picks a free one.", min=0, max=65535)] = PORT,
    until_end: Annotated[bool, typer.Option("--until-end", help="Exit when all runs have ended.")] = False,
) -> int:
    from keel.lab.watch.serve import watch as serve

    with suppress(KeyboardInterrupt):  # the normal way to stop
        serve(runs, port, until_end=until_end, echo=typer.echo)
    return 0


EXPORT_HELP = """Write a checkpoint's model and a model card to a new folder, ready for transformers, peft or vLLM.

The newest checkpoint of a run is exported unless --checkpoint names another. A LoRA adapter is written in peft's
format, or as merged weights with --merged. The trainer state (trainer/) is not exported. The card's example code uses
FOLDER as the model's name, so name the folder as on the hub, and upload it with: hf upload me/sorter me/sorter

Examples:

  keel export runs/default me/sorter --checkpoint best

  keel export runs/lora me/sorter-whole --merged
"""


@app.command(help=EXPORT_HELP)
def export(
    source: Annotated[str, typer.Argument(metavar="RUN|FOLDER", help="A run folder or a model folder.")],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Output folder; it must be new or empty.")],
    checkpoint: Annotated[
        str | None, typer.Option(help="Checkpoint of a run: best or a step (default: the newest).")
    ] = None,
    merged: Annotated[bool, typer.Option("--merged", help="Merge a LoRA adapter into the base weights.")] = False,
) -> int:
    from keel.lab.publish import export as write

    written = write(source, folder, checkpoint=checkpoint, merged=merged)
    typer.echo(f"exported {source} into {written}")
    return 0
