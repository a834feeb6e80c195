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

HELP = """Train a model with an SFT warm start, GRPO with a KL term, evaluations, checkpoints and a report.

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

  keel train configs/default.yaml --plan

  keel train configs/gsm8k.yaml model.name=Qwen/Qwen2.5-7B-Instruct --plan --hardware h100 --nproc 8

--plan counts the memory of the largest step on tensors without data, so no weights are read, and lists what would make
it fit; exit status 1 if it does not fit. Without --hardware it also times real steps with random weights on this
machine, and calls the rewards for them.

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
    plan: Annotated[
        bool, typer.Option("--plan", help="Show the memory and time of a step and train nothing; --nproc are devices.")
    ] = False,
    hardware: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:GIB]", help="Of --plan: cpu, h200, h100, a100, l40s or rtx4090; this machine by default."
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Of --plan: tokens of a prompt; the task's longest by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Of --plan: print data instead of tables.")] = False,
) -> int:
    from keel.run.cluster.connect import check_backend

    check_backend(on)
    _check_watch(watch, watch_port, on, dry_run=dry_run)
    _check_plan(plan, hardware, prompt_tokens, as_json=as_json, runs=dry_run or watch or on != "local", nproc=nproc)
    if on != "local":
        return _on_ray(on, context.obj, args or [], nproc, resume=resume, print_config=print_config)
    config = configuration(args or [], resume=resume, notes=plan or nproc == 1)
    if print_config:
        return print_config_of(config)
    if plan:
        from keel.lab.plan.show import show_plan

        return show_plan(config, hardware, prompt_tokens=prompt_tokens, nproc=nproc, as_json=as_json)
    if config.ray is not None and LAUNCH_FLAGS not in os.environ:
        raise KeelError("the section ray is for --on ray: give --on ray, or ray=null to train without it")
    if nproc != 1:
        return launch(context.obj, nproc, device=config.model.device)
    announce_loading()
    from keel import api
    from keel.base.world import first_process
    from keel.lab.hooks import worst
    from keel.run.result import next_steps, result_line

    with _watched(config, watch_port) if watch and process_rank() == 0 else nullcontext():
        result = api.train(config, resume=resume, dry_run=dry_run)
        if first_process():
            found = worst(result.directory) if result.summary.get("findings") and result.stopped is None else []
            print("\n".join([*found, result_line(result), *next_steps(result)]))
    return int(result.exit_status)


def _check_watch(watch: bool, port: int | None, on: str, *, dry_run: bool) -> None:
    if port is not None and not watch:
        raise KeelError(f"--watch-port {port} is for --watch: give both, or neither")
    if port is not None and not 0 <= port <= 65535:
        raise KeelError(f"--watch-port {port}: give a port up to 65535, or 0 for a free one")
    if watch and dry_run:
        raise KeelError("--watch shows a run's files, and --dry-run writes none: leave one of them out")
    if watch and on != "local":
        raise KeelError(f"--watch shows a run of this machine, not one --on {on}: keel watch RUN where its folder is")


def _check_plan(
    plan: bool, hardware: str | None, prompt_tokens: int | None, *, as_json: bool, runs: bool, nproc: int
) -> None:
    given = {"--hardware": hardware is not None, "--prompt-tokens": prompt_tokens is not None, "--json": as_json}
    if not plan and any(given.values()):
        flag = next(flag for flag, is_given in given.items() if is_given)
        raise KeelError(f"{flag} is for --plan: give both, or neither")
    if plan and runs:
        raise KeelError("--plan trains nothing: leave out --dry-run, --watch and --on")
    if prompt_tokens is not None and prompt_tokens < 1:
        raise KeelError(f"--prompt-tokens is {prompt_tokens}: a prompt has at least one token")
    if plan and nproc < 1:
        raise KeelError(f"--nproc is {nproc}: a run has at least one process")


def _watched(config: Any, port: int | None) -> AbstractContextManager[None]:
    from keel.lab.watch.serve import beside

    return beside(Path(config.run.dir) / config.run.name, PORT if port is None else port, typer.echo)


def _on_ray(on: str, arguments: list[str], args: list[str], nproc: int, *, resume: bool, print_config: bool) -> int:
    from keel.rollout.vllm import PLACEHOLDER_URL
    from keel.run.cluster.train import server_overrides

    given = args if nproc == 1 else [*args, f"ray.trainers={nproc}"]
    config = configuration([*given, *server_overrides(PLACEHOLDER_URL)], resume=resume, notes=False)
    if config.ray is not None and config.ray.samplers == 0:
        config = configuration(given, resume=resume, notes=False)
    return print_config_of(config) if print_config else launch_on_ray(on, arguments, config)
