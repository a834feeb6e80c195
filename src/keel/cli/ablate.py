"""`keel ablate`: a grid of runs over several seeds, and the table that comes of it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from keel.base.errors import KeelError
from keel.cli.app import ANY_OPTION, app, split

ABLATE_HELP = """Run a grid of options over several seeds and report tables, plots and a verdict.

Give a configuration with --grid, or a study file (config, grid, seeds, baseline), and options for all points.
Killed or interrupted, the same command goes on: finished runs are kept. A point that its guard stops, or that fails,
is in the table with the reason.

Examples:

  keel ablate configs/studies/beta.yaml

  keel ablate default --grid kl.beta=0,0.001,0.01,0.1 --seeds 3 --out runs/studies/beta

  keel ablate default --grid 'kl={estimator: k1, placement: reward},{estimator: k3}' --grid kl.beta=0.01,0.1

  keel ablate configs/studies/losses.yaml run.max_steps=50 --jobs 2

  keel ablate configs/studies/beta.yaml --on ray
"""


@app.command(help=ABLATE_HELP, context_settings=ANY_OPTION)
def ablate(
    args: Annotated[
        list[str], typer.Argument(metavar="CONFIG|STUDY [KEY=VALUE]...", help="What to vary, and options for all.")
    ],
    grid: Annotated[
        list[str] | None, typer.Option("--grid", metavar="OPTION=VALUES", help="An axis; may be given several times.")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="How many seeds, or the seeds: 3, or 1,2,5 (3 by default).")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="By default runs/studies/NAME.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time; the cores are divided among them.")] = 1,
    on: Annotated[str, typer.Option(metavar="local|ray[:ADDRESS]", help="Where the runs take place.")] = "local",
    baseline: Annotated[
        str | None, typer.Option(metavar="POINT", help="What the others are compared with, by default the first.")
    ] = None,
    metric: Annotated[str | None, typer.Option(help="What decides: accuracy_after, reward or retention_after.")] = None,
    list_only: Annotated[bool, typer.Option("--list", help="Check the grid, show its points, and stop.")] = False,
) -> int:
    from keel.lab.studies import read_study
    from keel.lab.studies.run import run_study
    from keel.run.cluster.connect import check_backend

    paths, overrides = split(args)
    if len(paths) != 1:
        raise KeelError(f"keel ablate takes one configuration or study, not {len(paths)}: {' '.join(paths)}")
    check_backend(on)
    study = read_study(paths[0], overrides, grid=grid or (), seeds=seeds, baseline=baseline, metric=metric)
    if list_only:
        for point in study.points:
            typer.echo(f"{point.label}{'  (baseline)' if point.label == study.baseline else ''}")
        typer.echo(f"{len(study.points)} points × {len(study.seeds)} seeds")
        return 0
    from keel.lab.studies.report import write_study

    folder = out or Path("runs") / "studies" / study.name
    try:
        results = run_study(study, folder, parallel=jobs, on=on)
    except KeyboardInterrupt:
        typer.echo(f"keel: stopped; go on with the same command, {folder} keeps what is done", err=True)
        return 130
    command = (
        shlex.join(["keel", "ablate", *sys.argv[2:]]) if sys.argv[1:2] == ["ablate"] else f"keel ablate {paths[0]}"
    )
    written = write_study(study, folder, results, command)
    typer.echo(written.text)
    typer.echo(f"{folder}: {', '.join(written.files)}")
    return int(any(result.state == "failed" for result in results.values()))
