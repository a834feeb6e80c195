"""`keel ablate`: run a grid of options over several seeds and write the tables."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from keel.base.errors import KeelError
from keel.cli.app import ANY_OPTION, app, split

ABLATE_HELP = """Run a grid of options over several seeds and report tables, plots and a verdict.

Give a configuration with --grid, or a study file (config, grid, seeds, baseline), and options for all points. After an
interruption, repeat the command: finished runs are kept. If a run fails or a guard stops it, the table gives the
reason.

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
        list[str],
        typer.Argument(metavar="CONFIG|STUDY [KEY=VALUE]...", help="Configuration or study, and options for all runs."),
    ],
    grid: Annotated[
        list[str] | None, typer.Option("--grid", metavar="OPTION=VALUES", help="One axis of the grid; repeatable.")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Number of seeds, or a list of seeds: 3 (default), or 1,2,5.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Output folder (default: runs/studies/NAME).")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Number of parallel runs; they share the CPU cores.")] = 1,
    on: Annotated[
        str, typer.Option(metavar="local|ray[:ADDRESS]", help="Where to run: this machine or a Ray cluster.")
    ] = "local",
    baseline: Annotated[
        str | None, typer.Option(metavar="POINT", help="Point that the others are compared with (default: the first).")
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="Metric of the verdict: accuracy_after, reward or retention_after.")
    ] = None,
    list_only: Annotated[bool, typer.Option("--list", help="Check the grid, list its points and exit.")] = False,
) -> int:
    from keel.lab.studies import read_study
    from keel.lab.studies.run import run_study
    from keel.run.cluster.placement import check_backend

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
        typer.echo(f"keel: interrupted; repeat the command to continue, finished runs are kept in {folder}", err=True)
        return 130
    command = (
        shlex.join(["keel", "ablate", *sys.argv[2:]]) if sys.argv[1:2] == ["ablate"] else f"keel ablate {paths[0]}"
    )
    written = write_study(study, folder, results, command)
    typer.echo(written.text)
    typer.echo(f"{folder}: {', '.join(written.files)}")
    return int(any(result.state == "failed" for result in results.values()))
