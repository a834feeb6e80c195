"""`keel plan`: memory and time before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from keel.cli.app import ANY_OPTION, CONFIG_ARGS, app, configuration, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keel.lab.plan.plan import Plan
    from keel.lab.plan.ranks import RankPlan

PLAN_HELP = """Estimate memory and time of a step before anything runs, and say what would make it fit.

The passes of the reference and of the update are rehearsed on tensors that have shapes and no memory, with every
completion as long as it may be, so that peaks are counted; no weights are read. Where the hardware is this machine's,
times are measured for a few seconds: real steps of a random model of this shape, or of a part of it, scaled to the
whole; the run's own rewards are called for them. For other hardware, and with --no-measure, they are counted operations
over an assumed speed, without Python's own work: steps take longer, small models many times. Exit status 1 if a step
does not fit.

A second table has each layout of the weights on 1, 2, 4 and 8 devices; with --nproc it is for that number, by part,
and the exit status is that of the layout that such a run would take.

Examples:

  keel plan configs/default.yaml

  keel plan configs/gsm8k.yaml model.name=Qwen/Qwen2.5-7B-Instruct --hardware h200

  keel plan configs/gsm8k.yaml model.lora.r=16 --hardware rtx4090 --prompt-tokens 512 --json

  keel plan configs/gsm8k.yaml model.name=Qwen/Qwen2.5-7B-Instruct --hardware h100 --nproc 8
"""


@app.command(help=PLAN_HELP, context_settings=ANY_OPTION)
def plan(
    args: Annotated[list[str] | None, CONFIG_ARGS] = None,
    hardware: Annotated[str, typer.Option(help="auto, cpu, h200, h100, a100, l40s or rtx4090.")] = "auto",
    memory_gib: Annotated[float | None, typer.Option(help="Memory of the device in GiB, in place of its own.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(help="Tokens of a prompt; by default the task's.")] = None,
    nproc: Annotated[int | None, typer.Option(help="Devices; by default one, with a table for 2, 4 and 8.")] = None,
    measure: Annotated[bool, typer.Option(help="Measure times here, where this is the hardware.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print data instead of tables.")] = False,
) -> int:
    from keel.base.errors import KeelError

    if memory_gib is not None and not memory_gib > 0:
        raise KeelError(f"--memory-gib is {memory_gib:g}: give the device's memory in GiB")
    if prompt_tokens is not None and prompt_tokens < 1:
        raise KeelError(f"--prompt-tokens is {prompt_tokens}: a prompt has at least one token")
    if nproc is not None and nproc < 1:
        raise KeelError(f"--nproc is {nproc}: a run has at least one process")
    config = configuration(args or [])
    from keel.lab.plan.hardware import find_hardware
    from keel.lab.plan.plan import make_it_fit
    from keel.lab.plan.plan import plan as planned

    device = find_hardware(hardware, memory_gib)
    if nproc is not None:
        return _several(planned(config, device, prompt_tokens, devices=(nproc,)), as_json)
    estimate = planned(config, device, prompt_tokens, measured=measure, report=_report)
    remedies = [] if estimate.fits else make_it_fit(config, device, prompt_tokens)
    if as_json:
        rows = [{"overrides": overrides, "peak": after.peak, "fits": after.fits} for overrides, after in remedies]
        print_json({**estimate.as_dict(), "remedies": rows})
    else:
        _show(estimate, remedies)
    return 0 if estimate.fits else 1


def _several(estimate: Plan, as_json: bool) -> int:
    """The plan of one device of several."""
    if as_json:
        print_json(estimate.as_dict())
    else:
        _show_ranks(estimate.ranks, estimate.hardware.name)
    return 0 if next(rank for rank in estimate.ranks if rank.chosen).fits else 1


def _report(text: str) -> None:
    typer.echo(f"{text} …", err=True)


def _show(plan: Plan, remedies: list[tuple[list[str], Plan]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from keel.lab.plan.ranks import fewest

    console = Console()
    table = Table(title="Memory", title_justify="left")
    table.add_column("part")
    table.add_column("size", justify="right")
    for name, size in plan.parts.items():
        table.add_row(name, _size(size))
    table.add_section()
    for name, size in plan.phases.items():
        table.add_row(f"peak of the {name}", _size(size))
    if plan.host:
        table.add_row("in main memory", _size(plan.host))
    console.print(table)
    console.print(
        f"{plan.parameters:,} parameters, {plan.trainable:,} trained; prompts of {plan.prompt_tokens} tokens; "
        f"{plan.flops:.3g} operations a step"
    )
    step, run = (
        ", ".join(f"{name} {_duration(value)}" for name, value in parts.items() if value)
        for parts in (plan.seconds, plan.run)
    )
    console.print(f"a step: {step}\nthe run: {run}\n({plan.timing})")
    _show_devices(plan.ranks)
    total = plan.hardware.memory_bytes
    if plan.fits:
        console.print(f"fits: {_size(plan.peak)} of {_size(total)} on {plan.hardware.name}")
        return
    console.print(f"does not fit: {_size(plan.peak)} of {_size(total)} on {plan.hardware.name}", style="bold red")
    for overrides, after in remedies:
        verdict = "fits" if after.fits else "does not fit yet"
        console.print(f"  {' '.join(overrides)}: {_size(after.peak)}, {verdict}", markup=False)
    if not remedies or not remedies[-1][1].fits:
        console.print("  nothing of this is enough: take a smaller model, a larger device or more of them")
    if (several := fewest(plan.ranks)) is not None:
        devices, sharding = several.layout.devices, several.layout.sharding
        console.print(f"  --nproc {devices} parallel.sharding={sharding}: {_size(several.peak)}, fits", markup=False)


def _show_devices(ranks: Sequence[RankPlan]) -> None:
    """Each layout on each number of devices, a line each."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="On several devices (a run takes the starred layout)", title_justify="left")
    for name in ("devices", "sharding", "peak of a device", "", "sent by it in a step"):
        table.add_column(name, justify="left" if name in ("sharding", "") else "right")
    for rank in ranks:
        verdict, star = "fits" if rank.fits else "does not fit", " *" if rank.chosen else ""
        devices, sharding = str(rank.layout.devices), f"{rank.layout.sharding}{star}"
        table.add_row(devices, sharding, _size(rank.peak), verdict, _size(sum(rank.sent.values())))
    Console().print(table)


def _show_ranks(ranks: Sequence[RankPlan], hardware: str) -> None:
    """The layouts of one number of devices beside each other, by part."""
    from rich.console import Console
    from rich.table import Table

    console, chosen = Console(), next(rank for rank in ranks if rank.chosen)
    table = Table(title=f"One of {chosen.layout.devices} devices, by parallel.sharding", title_justify="left")
    table.add_column("part")
    for rank in ranks:
        table.add_column(rank.layout.sharding, justify="right")
    for name in chosen.parts:
        table.add_row(name, *(_size(rank.parts[name]) for rank in ranks))
    table.add_section()
    for name in chosen.phases:
        table.add_row(f"peak of the {name}", *(_size(rank.phases[name]) for rank in ranks))
    table.add_section()
    for name in chosen.sent:
        table.add_row(f"sent, {name}", *(_size(rank.sent[name]) for rank in ranks))
    table.add_row("sent in a step", *(_size(sum(rank.sent.values())) for rank in ranks))
    console.print(table)
    verdict = "fits" if chosen.fits else "does not fit"
    console.print(
        f"parallel.sharding={chosen.layout.sharding} is what this run takes, and {verdict}: {_size(chosen.peak)} of "
        f"{_size(chosen.limit)} on {hardware}"
    )
    others = [rank.layout.sharding for rank in ranks if rank.fits]
    if not chosen.fits:
        console.print(f"fits: parallel.sharding={others[0]}" if others else "no layout fits: take more devices")


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.1f} MiB"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
