"""Measure the time of a step on this machine: real steps with random weights of the job's shape."""

from __future__ import annotations

import gc
import statistics
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from keel.base.types import Group, Reward
from keel.config import Config
from keel.lab.plan.shapes import model_source, random_model, weights_dtype
from keel.models.load import load_model
from keel.models.loaded import LoadedModel
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
        rewards = tuple(
            Reward(float(i % 2)) for i in range(rollout.num_generations)
        )  # distinct, so that every group has a gradient
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
