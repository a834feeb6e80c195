"""`keel eval`: evaluate a model on several tasks, and a baseline on the same problems under the same noise."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from keel.base.errors import KeelError, unknown
from keel.base.world import SINGLE_PROCESS, World, open_world
from keel.config import Config, TaskOptions, load_config, text
from keel.envs import Task
from keel.envs.judge import Judge
from keel.envs.registry import TASKS, reads_data
from keel.envs.rewards import RewardPart
from keel.eval.evaluate import EvalResult, difference, evaluate
from keel.rollout.engine import Engine
from keel.rollout.registry import build_engine
from keel.run.build import build_collector
from keel.run.environment import settings_of
from keel.run.model_ref import ModelRef
from keel.run.parts import build_named_task, drop_long_prompts, reward_entries, without_long_prompts
from keel.trainer.memory import fewer_rows, memory_guard

# Called with a label and the number of completions to sample; returns a callback for finished ones.
Watch = Callable[[str, int], Callable[[int], None]]
_WITH_PARAMS = re.compile(r"(?P<name>.+?):(?P<params>[A-Za-z_]\w*=.*)", re.DOTALL)


@dataclass(frozen=True)
class Entry:
    """A task to evaluate, its split (trained, retention, given), and its judge."""

    task: Task
    split: str
    judge: Judge


def entries(
    config: Config, tasks: Iterable[tuple[Task, str]], rewards: Sequence[RewardPart] | None = None
) -> list[Entry]:
    """Entries judged by the task's own reward, so that accuracy does not depend on the training rewards.

    A task without answers is judged by the sum of `rewards`, by default the configured ones.
    """
    options = config.reward.model_copy(update={"aggregate": "sum", "shuffle": None})

    def judge(task: Task) -> Judge:
        if not task.prompts_only:
            return Judge.of(task, options=options)
        return Judge.of(task, reward_entries(config), options) if rewards is None else Judge(rewards, options)

    return [Entry(task, split, judge(task)) for task, split in tasks]


def configured_tasks(config: Config, task: Task | None = None) -> list[tuple[Task, str]]:
    """The trained task and, as retention, `eval.tasks`."""
    trained = build_named_task(config.task, config) if task is None else task
    others = [build_named_task(spec, config) for spec in config.eval.tasks]
    return [(trained, "trained"), *((other, "retention") for other in others if other != trained)]


def parse_task(spec: str) -> TaskOptions:
    """The task of `NAME`, or of `NAME:key=value,key=value` with its parameters; a name may be `module:attr`."""
    match = _WITH_PARAMS.fullmatch(spec)
    if match is None:
        return TaskOptions(name=spec)
    pairs = (item.partition("=") for item in re.split(r",(?=[A-Za-z_]\w*=)", match["params"]))
    params = {key: text.parse(value, f"the value of {key} in {spec!r}") for key, _, value in pairs}
    return TaskOptions.model_validate({"name": match["name"], **params})


def _named_tasks(model_ref: ModelRef, names: Sequence[str], data: Sequence[str] = ()) -> list[tuple[Task, str]]:
    """The tasks that a command names, each with its data."""
    specs = [parse_task(name) for name in names]
    for spec in specs:
        if spec.name not in TASKS and ":" not in spec.name:
            raise unknown("task", spec.name, TASKS)
    reads = [reads_data(spec.name) for spec in specs]
    if data and not any(reads):
        raise KeelError(f"{data[0]} is given, but {', '.join(names)} generates its own problems: leave it out")
    configs = [
        _task_config(model_ref, spec, data) if reading else None for spec, reading in zip(specs, reads, strict=True)
    ]
    return [(build_named_task(spec, config), "given") for spec, config in zip(specs, configs, strict=True)]


def _task_config(model_ref: ModelRef, spec: TaskOptions, data: Sequence[str]) -> Config:
    """A configuration with this task and the overrides in `data`.

    A task without a `data` parameter reads the `data` section of the model's configuration, if that configuration names
    no task or this one.
    """
    shared = (not model_ref.has_tasks or spec.name == model_ref.config.task.name) and "data" not in spec.params
    source = model_ref.config.data.source if shared else {}
    return load_config({"task": {"name": spec.name, **spec.params}, "data": source}, data)


def evaluate_entry(
    config: Config,
    engine: Engine,
    tokenizer: Any,
    entry: Entry,
    *,
    seed: int | None = None,
    world: World = SINGLE_PROCESS,
) -> EvalResult:
    """Evaluate one task on fixed held-out problems under fixed noise (`seed`, default run.seed + 1)."""
    collector = replace(
        build_collector(config, engine, entry.task, tokenizer, entry.judge, world),
        seed=config.run.seed + 1 if seed is None else seed,
        max_turns=config.rollout.max_turns if entry.task.multi_turn else 1,
    )
    problems = drop_long_prompts(config, tokenizer, entry.task.held_out(config.eval.samples))
    return evaluate(collector, problems, k=config.eval.k, temperature=_temperature(config))


def run_evaluation(
    model_ref: ModelRef,
    *,
    tasks: Sequence[str] = (),
    data: Sequence[str] = (),
    baseline: ModelRef | None = None,
    seed: int | None = None,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """Evaluate a model; with a baseline also the baseline and the paired differences. Returns plain data.

    `tasks` are specs such as `arithmetic:skill=sort,digits=4`, by default the configuration's tasks. `data` are
    overrides such as `data.on_broken=skip`, for tasks that read data. The baseline uses the model's configuration for
    sampling, rendering and judging: only the weights differ.
    """
    config = model_ref.config
    if not tasks and not model_ref.has_tasks:
        raise KeelError(f"{model_ref.name} is a model without a task: name one, such as --task arithmetic")
    chosen = _named_tasks(model_ref, tasks, data) if tasks else configured_tasks(config)
    with open_world(config.model.device, settings=settings_of(config)) as world:
        after = _evaluated(model_ref, config, chosen, seed, watch, world)
        before = None if baseline is None else _evaluated(baseline, config, chosen, seed, watch, world)
    records = []
    for number, ((_, split), result) in enumerate(zip(chosen, after, strict=True)):
        record = result.record(split)
        if before is not None:
            record["baseline"] = before[number].record(split)
            record["difference"] = difference(before[number], result)
        records.append(record)
    return {
        "model": model_ref.name,
        "baseline": None if baseline is None else baseline.name,
        "seed": config.run.seed + 1 if seed is None else seed,
        "temperature": _temperature(config),
        "max_completion_length": config.rollout.max_completion_length,
        "notes": [note for task, _ in chosen for note in task.notes],
        "tasks": records,
    }


def _temperature(config: Config) -> float:
    return config.rollout.temperature if config.eval.temperature is None else config.eval.temperature


def _samples(config: Config) -> int:
    return max(config.eval.k) if _temperature(config) > 0 else 1


def _evaluated(
    model_ref: ModelRef,
    config: Config,
    chosen: Sequence[tuple[Task, str]],
    seed: int | None,
    watch: Watch | None,
    world: World,
) -> list[EvalResult]:
    """Evaluate all tasks on one model, which is freed before the next one is loaded."""
    loaded = model_ref.load()
    tasks = [  # filter first: a judge is built for one task object
        (without_long_prompts(config, loaded.tokenizer, task)[0] if split == "trained" else task, split)
        for task, split in chosen
    ]
    results = []
    with closing(build_engine(config.rollout, loaded.model, loaded.tokenizer, world=world)) as engine:
        for entry in entries(config, tasks):
            rows = config.eval.samples * _samples(config)
            if watch is not None:
                own = len(world.shard(range(config.eval.samples))) * _samples(config)
                engine.on_finished = watch(f"{model_ref.name}: {entry.task.name}", own)
            with memory_guard(f"the evaluation of {entry.task.name}", partial(fewer_rows, config.rollout, rows)):
                results.append(evaluate_entry(config, engine, loaded.tokenizer, entry, seed=seed, world=world))
    return results
