"""`keel train` and `keel sft`."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from keel.base.errors import KeelError
from keel.base.watchdog import LAUNCH_FLAGS, process_rank
from keel.cli.app import ANY_OPTION, CONFIG_ARGS, PrintConfig, announce_loading, app, configuration, print_config_of
from keel.cli.launch import Nproc, On, launch, launch_on_ray
from keel.lab.watch import PORT

TRAIN_HELP = """Train a model: optional SFT warm start, GRPO with a KL term, evaluations, checkpoints and a report.

The default CONFIG trains a tiny model on arithmetic. Write options as key=value. Short names and option names of TRL,
verl and OpenRLHF work too, also as flags; notes on stderr give their Keel names.

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

--plan computes the peak memory of a step on meta tensors, without reading weights, and suggests changes if it does not
fit (exit status 1). Without --hardware it also times real steps with random weights on this machine, which calls the
reward functions.

On several machines, use Ray or torchrun; see examples/slurm.sh.
"""


@app.command(help=TRAIN_HELP, context_settings=ANY_OPTION)
def train(
    context: typer.Context,
    args: Annotated[list[str] | None, CONFIG_ARGS] = None,
    print_config: PrintConfig = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Build all parts, run one step on one group and exit.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the last checkpoint; CONFIG may be a run folder.")
    ] = False,
    nproc: Nproc = 1,
    on: On = "local",
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve a live page of the run on loopback, like keel watch.")
    ] = False,
    watch_port: Annotated[
        int | None, typer.Option(metavar="PORT", help=f"Port of --watch (default: {PORT}); 0 picks a free one.")
    ] = None,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan", help="Print memory and time of a step without training; --nproc is the number of devices."
        ),
    ] = False,
    hardware: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:GIB]", help="With --plan: cpu, h200, h100, a100, l40s or rtx4090 (default: this machine)."
        ),
    ] = None,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", help="With --plan: prompt length in tokens (default: the task's longest)."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --plan: print data instead of tables.")] = False,
) -> int:
    from keel.run.cluster.placement import check_backend

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
        raise KeelError("the section ray has no effect without --on ray: give --on ray, or set ray=null")
    if nproc != 1:
        return launch(context.obj, nproc, device=config.model.device)
    announce_loading()
    from keel import api
    from keel.base.world import is_main_process
    from keel.lab.report import worst
    from keel.run.result import next_steps, result_line

    with _watched(config, watch_port) if watch and process_rank() == 0 else nullcontext():
        result = api.train(config, resume=resume, dry_run=dry_run)
        if is_main_process():
            found = worst(result.directory) if result.summary.get("findings") and result.stopped is None else []
            print("\n".join([*found, result_line(result), *next_steps(result)]))
    return int(result.exit_status)


def _check_watch(watch: bool, port: int | None, on: str, *, dry_run: bool) -> None:
    if port is not None and not watch:
        raise KeelError(f"--watch-port {port} needs --watch: give both, or neither")
    if port is not None and not 0 <= port <= 65535:
        raise KeelError(f"--watch-port is {port}: give a port from 0 (a free one) to 65535")
    if watch and dry_run:
        raise KeelError("--watch needs a run's files, and --dry-run writes none: give one of them")
    if watch and on != "local":
        raise KeelError(
            f"--watch does not work with --on {on}: run keel watch RUN on the machine that has the run's folder"
        )


def _check_plan(
    plan: bool, hardware: str | None, prompt_tokens: int | None, *, as_json: bool, runs: bool, nproc: int
) -> None:
    given = {"--hardware": hardware is not None, "--prompt-tokens": prompt_tokens is not None, "--json": as_json}
    if not plan and any(given.values()):
        flag = next(flag for flag, is_given in given.items() if is_given)
        raise KeelError(f"{flag} needs --plan: give both, or neither")
    if plan and runs:
        raise KeelError("--plan trains nothing: leave out --dry-run, --watch and --on")
    if prompt_tokens is not None and prompt_tokens < 1:
        raise KeelError(f"--prompt-tokens is {prompt_tokens}: a prompt has at least one token")
    if plan and nproc < 1:
        raise KeelError(f"--nproc is {nproc}: a run has at least one process")


def _watched(config: Any, port: int | None) -> AbstractContextManager[None]:
    from keel.lab.watch.serve import serve_while

    return serve_while(Path(config.run.dir) / config.run.name, PORT if port is None else port, typer.echo)


def _on_ray(on: str, arguments: list[str], args: list[str], nproc: int, *, resume: bool, print_config: bool) -> int:
    from keel.rollout.registry import PLACEHOLDER_URL
    from keel.run.cluster.train import server_overrides

    given = args if nproc == 1 else [*args, f"ray.trainers={nproc}"]
    config = configuration([*given, *server_overrides(PLACEHOLDER_URL)], resume=resume, notes=False)
    if config.ray is not None and config.ray.samplers == 0:
        config = configuration(given, resume=resume, notes=False)
    return print_config_of(config) if print_config else launch_on_ray(on, arguments, config)


SFT_HELP = """Run only the SFT of the warmstart section, on gold answers or on a JSONL file.

Examples:

  keel sft configs/default.yaml

  keel sft configs/default.yaml warmstart.steps=500 warmstart.learning_rate=3e-4

  keel sft configs/default.yaml --nproc 2
"""


@app.command(help=SFT_HELP, context_settings=ANY_OPTION)
def sft(
    context: typer.Context,
    args: Annotated[list[str] | None, CONFIG_ARGS] = None,
    print_config: PrintConfig = False,
    nproc: Nproc = 1,
) -> int:
    config = configuration(args or [], notes=nproc == 1)
    if config.warmstart is None:
        raise KeelError("keel sft needs a warmstart section: set warmstart.steps=200, or add it to the configuration")
    if print_config:
        return print_config_of(config)
    if nproc != 1:
        return launch(context.obj, nproc, device=config.model.device)
    announce_loading()
    from keel import api

    return int(api.supervise(config).exit_status)
