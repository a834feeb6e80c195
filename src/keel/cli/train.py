"""`keel train`."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from keel.base.alive import LAUNCH_FLAGS, process_rank
from keel.base.errors import KeelError
from keel.cli.app import ANY_OPTION, CONFIG_ARGS, PrintConfig, announce_loading, app, configuration, print_config_of
from keel.cli.launch import Nproc, On, launch, launch_on_ray
from keel.lab.watch import PORT

HELP = """Train a model: warm start, GRPO under the KL term, evaluation, checkpoints, report.

Without CONFIG the default is trained, a tiny model on arithmetic. Options are written key=value; the names of TRL,
verl and OpenRLHF and short ones work too, also as flags, and the first lines say what they became.

Examples:

  keel train configs/default.yaml

  keel train configs/default.yaml kl.beta=0.05 run.name=stronger

  keel train default --kl-beta 0.05 --num-generations 16 --max-steps 50

  keel train configs/default.yaml --print-config

  keel train --resume runs/default

  keel train configs/default.yaml --watch

  keel train configs/default.yaml --nproc 2

  keel train configs/default.yaml --on ray ray.trainers=2 ray.samplers=2

Several machines: a Ray cluster, or torchrun's own flags, as in examples/slurm.sh.
"""


@app.command(help=HELP, context_settings=ANY_OPTION)
def train(
    context: typer.Context,
    args: Annotated[list[str] | None, CONFIG_ARGS] = None,
    print_config: PrintConfig = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Build everything, run one step on one group, and stop.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint; a run's folder may stand for CONFIG.")
    ] = False,
    nproc: Nproc = 1,
    on: On = "local",
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve the run's page on loopback while it trains, as keel watch does.")
    ] = False,
    watch_port: Annotated[
        int | None, typer.Option(metavar="PORT", help=f"Port of --watch; {PORT} by default, 0 takes a free one.")
    ] = None,
) -> int:
    from keel.run.cluster.connect import check_backend

    check_backend(on)
    _check_watch(watch, watch_port, on, dry_run=dry_run)
    if on != "local":
        return _on_ray(on, context.obj, args or [], nproc, resume=resume, print_config=print_config)
    announce_loading()
    config = configuration(args or [], resume=resume, notes=nproc == 1)
    if print_config:
        return print_config_of(config)
    if config.ray is not None and LAUNCH_FLAGS not in os.environ:
        raise KeelError("the section ray is for --on ray: give --on ray, or ray=null to train without it")
    if nproc != 1:
        return launch(context.obj, nproc, device=config.model.device)
    from keel import api

    with _watched(config, watch_port) if watch and process_rank() == 0 else nullcontext():
        return int(api.main(config, resume=resume, dry_run=dry_run).exit_status)


def _check_watch(watch: bool, port: int | None, on: str, *, dry_run: bool) -> None:
    if port is not None and not watch:
        raise KeelError(f"--watch-port {port} is for --watch: give both, or neither")
    if port is not None and not 0 <= port <= 65535:
        raise KeelError(f"--watch-port {port}: give a port up to 65535, or 0 for a free one")
    if watch and dry_run:
        raise KeelError("--watch shows a run's files, and --dry-run writes none: leave one of them out")
    if watch and on != "local":
        raise KeelError(f"--watch shows a run of this machine, not one --on {on}: keel watch RUN where its folder is")


def _watched(config: Any, port: int | None) -> AbstractContextManager[None]:
    from keel.lab.watch.serve import beside

    return beside(Path(config.run.dir) / config.run.name, PORT if port is None else port, typer.echo)


def _on_ray(on: str, arguments: list[str], args: list[str], nproc: int, *, resume: bool, print_config: bool) -> int:
    from keel.rollout.vllm import TO_BE_PLACED
    from keel.run.cluster.train import by_servers

    given = args if nproc == 1 else [*args, f"ray.trainers={nproc}"]
    config = configuration([*given, *by_servers(TO_BE_PLACED)], resume=resume, notes=False)
    if config.ray is not None and config.ray.samplers == 0:
        config = configuration(given, resume=resume, notes=False)
    return print_config_of(config) if print_config else launch_on_ray(on, arguments, config)
