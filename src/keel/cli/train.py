"""`keel train`."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from keel.base.alive import LAUNCH_FLAGS
from keel.base.errors import KeelError
from keel.cli.app import ANY_OPTION, CONFIG_ARGS, PrintConfig, app, configuration, print_config_of
from keel.cli.launch import Nproc, On, launch, launch_on_ray

HELP = """Train a model: warm start, GRPO under the KL term, evaluation, checkpoints, report.

Without CONFIG the default is trained, a tiny model on arithmetic. Options are written key=value; the names of TRL,
verl and OpenRLHF and short ones work too, also as flags, and the first lines say what they became.

Examples:

  keel train configs/default.yaml

  keel train configs/default.yaml kl.beta=0.05 run.name=stronger

  keel train default --kl-beta 0.05 --num-generations 16 --max-steps 50

  keel train configs/default.yaml --print-config

  keel train --resume runs/default

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
) -> int:
    from keel.run.cluster.connect import check_backend

    check_backend(on)
    if on != "local":
        return _on_ray(on, context.obj, args or [], nproc, resume=resume, print_config=print_config)
    config = configuration(args or [], resume=resume, notes=nproc == 1)
    if print_config:
        return print_config_of(config)
    if config.ray is not None and LAUNCH_FLAGS not in os.environ:
        raise KeelError("the section ray is for --on ray: give --on ray, or ray=null to train without it")
    if nproc != 1:
        return launch(context.obj, nproc, device=config.model.device)
    from keel import api

    return int(api.main(config, resume=resume, dry_run=dry_run).exit_status)


def _on_ray(on: str, arguments: list[str], args: list[str], nproc: int, *, resume: bool, print_config: bool) -> int:
    from keel.rollout.vllm import TO_BE_PLACED
    from keel.run.cluster.train import by_servers

    given = args if nproc == 1 else [*args, f"ray.trainers={nproc}"]
    config = configuration([*given, *by_servers(TO_BE_PLACED)], resume=resume, notes=False)
    if config.ray is not None and config.ray.samplers == 0:
        config = configuration(given, resume=resume, notes=False)
    return print_config_of(config) if print_config else launch_on_ray(on, arguments, config)
