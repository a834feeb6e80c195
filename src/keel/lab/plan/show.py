"""`keel train --plan`: measure the time of a step, print its memory, its time and the changes that make it fit."""

from __future__ import annotations

import gc
import json
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from keel.base.types import Group, Reward
from keel.config import Config
from keel.lab.plan.plan import Plan, RankPlan, fewest, make_it_fit
from keel.lab.plan.plan import plan as planned
from keel.lab.plan.shapes import find_hardware, model_source, random_model, weights_dtype
from keel.models.load import load_model
from keel.models.options import LoadedModel
from keel.rollout import SamplingParams
from keel.run.build import Built, build_run
from keel.trainer.memory import OutOfMemory, is_out_of_memory
from keel.trainer.state import State
from keel.trainer.step import train_step

PHASES = ("rollout", "score", "update", "sync")
STEP_S = 5.0  # seconds: double the groups while the expected time of a step is below this
_REPEAT_S = 0.6  # seconds: repeat short steps for this long and take the median


class StepTime(NamedTuple):
    """Seconds of a step by phase and in total, on `groups` of the configured `of` groups."""

    seconds: dict[str, float]
    groups: int
    of: int


def obstacle(config: Config, *, kind: str, fits: bool) -> str | None:
    """The reason why a step of this job cannot be measured here, or None."""
    device, engine = config.model.device, config.rollout.named_engine.name
    if not fits:
        return "a step does not fit"
    if (kind == "cpu") != (device == "cpu" or not torch.cuda.is_available()):
        return f"model.device={device} is not the planned device"
    if engine != "native":
        return f"rollout.engine={engine} is not measured"
    if config.rollout.max_turns > 1:
        return "rollout.max_turns above 1 is not measured"
    return "model.quantization is not measured" if config.model.quantization is not None else None


def measure(config: Config, report: Callable[[str], None] = lambda text: None) -> StepTime | None:
    """Time steps with 1, 2, 4, … groups per minibatch, up to all of them; None if memory runs out.

    Completions have full length. Rewards are called, but their values are replaced. `report` gets progress messages.
    """
    loaded = _load(config)
    try:
        built = build_run(config, loaded)
        with closing(built.run) as run:
            groups, full = config.optim.minibatches, config.rollout.prompts_per_step
            run.guards = run.guards.model_copy(update={"on_step0_kl": "warn"})  # not meaningful with random weights
            state = State(kl=run.controller.init())
            while True:
                report(f"timing a step of {groups} of {full} groups")
                seconds, state = _step_s(config, built, groups, state)
                if groups == full or 2 * seconds["step"] > STEP_S:
                    return StepTime(seconds, groups, full)
                groups = min(full, 2 * groups)
    except Exception as error:
        if not isinstance(error, OutOfMemory) and not is_out_of_memory(error):
            raise
        return None
    finally:
        del loaded
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _load(config: Config) -> LoadedModel:
    """A random model of the configured shape, prepared as loading prepares the real one."""
    tokenizer, shape = model_source(config)

    def load(options: Any, *, seed: int, **_: Any) -> Any:
        cuda = options.device != "cpu" and torch.cuda.is_available()
        dtype = weights_dtype(config, shape, "cuda" if cuda else "cpu")
        with torch.random.fork_rng(devices=None if cuda else []), torch.device("cuda" if cuda else "cpu"):
            torch.manual_seed(seed)
            return random_model(shape, config, dtype=dtype), tokenizer, ()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_model(config.model, seed=config.run.seed, loader=load)


def _step_s(config: Config, built: Built, groups: int, state: State) -> tuple[dict[str, float], State]:
    """Median seconds of real steps on `groups` groups by phase, after a warm-up step; and the state after them."""
    rollout = config.rollout.model_copy(update={"prompts_per_step": groups})
    collector = replace(built.collector, sampling=SamplingParams.of(rollout, ignore_eos=True, stop=()))

    def collected(problems: Any, **when: Any) -> list[Group]:
        judged = collector.collect(problems, **when)
        # rewards differ within a group, so that every group has a gradient
        rewards = tuple(Reward(float(i % 2)) for i in range(rollout.num_generations))
        return [replace(group, rewards=rewards) for group in judged]

    part: Any = replace(built.run, rollout=rollout, collect=collected, queue=None)
    state = train_step(part, state).state  # the warm-up step selects kernels and creates the moments
    lines: list[dict[str, float]] = []
    while len(lines) < 3 and sum(line["time/total_s"] for line in lines) < _REPEAT_S:
        state, metrics, _ = train_step(part, state)
        lines.append(metrics)
    phases = {name: statistics.median(line[f"time/{name}_s"] for line in lines) for name in PHASES}
    total = statistics.median(line["time/total_s"] for line in lines)
    return {**phases, "other": max(0.0, total - sum(phases.values())), "step": total}, state


def show_plan(
    config: Config, hardware: str | None, *, prompt_tokens: int | None = None, nproc: int = 1, as_json: bool = False
) -> int:
    """Print the plan of a step for one device or for `nproc`; without `hardware` also measure the time.

    Returns the exit status: 0 if the step fits, else 1.
    """
    device = find_hardware(hardware or "auto")
    if nproc > 1:
        estimate = planned(config, device, prompt_tokens, devices=(nproc,))
        if as_json:
            _print_json(estimate.as_dict())
        else:
            _show_ranks(estimate.ranks, estimate.hardware.name)
        return 0 if next(rank for rank in estimate.ranks if rank.chosen).fits else 1
    estimate = planned(config, device, prompt_tokens)
    remedies = [] if estimate.fits else make_it_fit(config, device, prompt_tokens)
    if not as_json:
        _show(estimate, remedies)
    timed, timing = None, "not measured: --hardware is given"
    if hardware is None:
        timed, timing = _time(config, estimate)
    if as_json:
        rows = [{"overrides": overrides, "peak": after.peak, "fits": after.fits} for overrides, after in remedies]
        seconds = {} if timed is None else timed.seconds
        _print_json({**estimate.as_dict(), "remedies": rows, "seconds": seconds, "timing": timing})
    elif timed is not None:
        parts = ", ".join(f"{name} {_duration(value)}" for name, value in timed.seconds.items() if value)
        Console().print(f"a step: {parts}\n({timing})")
    elif hardware is None:
        Console().print(f"a step's time is {timing}")
    return 0 if estimate.fits else 1


def _time(config: Config, estimate: Plan) -> tuple[StepTime | None, str]:
    """Time a step on this machine; returns the time, and how it was measured or why it was not."""
    if (why := obstacle(config, kind=estimate.hardware.kind, fits=estimate.fits)) is not None:
        return None, f"not measured: {why}"
    timed = measure(config, lambda text: print(f"{text} …", file=sys.stderr))
    if timed is None:
        return None, "not measured: out of memory"
    extent = "all groups" if timed.groups == timed.of else f"{timed.groups} of {timed.of} groups"
    return timed, f"measured here on random weights, {extent}, completions of full length"


def _print_json(data: Any) -> None:
    print(json.dumps(data, ensure_ascii=False, allow_nan=False, indent=2))


def _show(plan: Plan, remedies: list[tuple[list[str], Plan]]) -> None:
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
    console.print(f"{plan.parameters:,} parameters, {plan.trainable:,} trained; prompts of {plan.prompt_tokens} tokens")
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
        console.print("  not enough: use a smaller model, a larger device or more devices")
    if (several := fewest(plan.ranks)) is not None:
        devices, sharding = several.layout.devices, several.layout.sharding
        console.print(f"  --nproc {devices} parallel.sharding={sharding}: {_size(several.peak)}, fits", markup=False)


def _show_devices(ranks: Sequence[RankPlan]) -> None:
    """Print one line per layout and number of devices."""
    table = Table(title="On several devices (* is the layout of a run)", title_justify="left")
    for name in ("devices", "sharding", "peak per device", ""):
        table.add_column(name, justify="left" if name in ("sharding", "") else "right")
    for rank in ranks:
        verdict, star = "fits" if rank.fits else "does not fit", " *" if rank.chosen else ""
        devices, sharding = str(rank.layout.devices), f"{rank.layout.sharding}{star}"
        table.add_row(devices, sharding, _size(rank.peak), verdict)
    Console().print(table)


def _show_ranks(ranks: Sequence[RankPlan], hardware: str) -> None:
    """A table of the layouts on one number of devices, by part."""
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
    console.print(table)
    verdict = "fits" if chosen.fits else "does not fit"
    console.print(
        f"this run uses parallel.sharding={chosen.layout.sharding}, which {verdict}: {_size(chosen.peak)} of "
        f"{_size(chosen.limit)} on {hardware}"
    )
    others = [rank.layout.sharding for rank in ranks if rank.fits]
    if not chosen.fits:
        console.print(f"fits: parallel.sharding={others[0]}" if others else "no layout fits: use more devices")


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**27 else f"{count / 2**20:.1f} MiB"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
