"""A training run (`keel.train`) or SFT (`keel sft`), from a checked configuration to a finished run directory."""

from __future__ import annotations

import logging
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from keel.base.errors import KeelError
from keel.base.world import SINGLE_PROCESS, World, open_world
from keel.config import Config, load_config
from keel.config.checks import advice
from keel.envs import Task
from keel.envs.judge import Judge
from keel.envs.rewards import build_rewards, probe_rewards
from keel.loggers import Logger, MultiLogger, RunDirectory, build_loggers
from keel.loggers.rundir import EVENTS
from keel.run.build import (
    Built,
    build_policy,
    build_run,
    build_warmstart,
    learning_rate_schedule,
)
from keel.run.environment import environment, settings_of
from keel.run.evaluate import configured_tasks, entries, evaluate_entry
from keel.run.parts import build_named_task, reward_entries
from keel.run.result import NO_HOOKS, EndHooks, RunOutcome, resume_command
from keel.run.resume import (
    ResumeEvent,
    check_same_data,
    check_same_run,
    choose_checkpoint,
    fingerprint,
    keep_schedule,
    may_change,
    schedule_change,
    truncate_logs,
    write_config,
)
from keel.run.warmstart import build_start, start_reference
from keel.trainer.checkpoint import (
    atomic_folder,
    clean,
    full_state_dict,
    load_checkpoint,
    quarantine,
    save_manifest,
    save_weights,
    saved_state,
    step_of,
)
from keel.trainer.loop import Callback, Interrupt, TrainingJob, interruptible, train_loop
from keel.trainer.memory import OutOfMemory, Remedy
from keel.trainer.rollback import finish_rollback, guard_findings
from keel.trainer.sft import DrawCount, sft
from keel.trainer.state import State
from keel.trainer.step import train_step
from keel.trainer.summary import reward_failures, summarise

logger = logging.getLogger("keel")


def run_training(
    config: Config,
    task: Task | None = None,
    reward: Callable[..., Any] | None = None,
    callbacks: Sequence[Callback] = (),
    *,
    resume: bool = False,
    dry_run: bool = False,
    at_end: EndHooks = NO_HOOKS,
) -> RunOutcome:
    """Run a checked configuration; the arguments are those of `keel.train`. `at_end` computes findings and report."""
    task = task or build_named_task(config.task, config)  # fail on bad data before anything is written or loaded
    if reward is None:
        build_rewards(reward_entries(config), task)  # fail early on rewards that do not fit this task
        probe_rewards(reward_entries(config))
    settings = settings_of(config)
    if dry_run:
        with open_world(config.model.device, settings=settings) as world:
            return _dry_run(config, task, reward, world)
    path = Path(config.run.dir) / config.run.name
    with (
        interruptible() as interrupt,
        open_world(config.model.device, settings=settings, resume=resume_command(path)) as world,
        open_run(config, resume=resume, world=world) as (directory, resumed),
    ):
        return _train(config, directory, resumed, interrupt, task, reward, callbacks, at_end, world)


def _train(
    config: Config,
    directory: RunDirectory,
    resumed: bool,
    interrupt: Interrupt,
    task: Task | None,
    reward: Callable[..., Any] | None,
    callbacks: Sequence[Callback],
    at_end: EndHooks,
    world: World,
) -> RunOutcome:
    began = time.monotonic()
    resume_state = world.broadcast(_prepare_resume(config, directory, resumed, task) if world.is_main else None)
    assert resume_state is not None
    config, checkpoint, events, decay_before = resume_state
    step = -1 if checkpoint is None else step_of(checkpoint)
    write_config(directory, config)
    directory.write_json("env.json", environment())
    loggers = open_loggers(config, directory, None if checkpoint is None else step, world=world)
    at_exit = ExitStack()
    at_exit.callback(loggers.close)
    try:
        for event in events:
            loggers.event(event.kind, step=max(step, 0), message=event.message)
            if event.damaged is not None and world.is_main:
                quarantine(event.damaged)
        loaded = build_start(config, directory.path, checkpoint, loggers, task, interrupt, world)
        built = build_run(config, loaded, task=task, reward=reward, world=world)
        at_exit.callback(built.run.close)
        for note in (*built.notes, *advice(config)):
            loggers.event("note", step=0 if checkpoint is None else step, message=note)
        job = _job(config, built, directory, loggers, callbacks)
        if checkpoint is None:
            state = State(kl=built.run.controller.init(), wall_s=time.monotonic() - began, data=fingerprint(task))
        else:
            state = load_checkpoint(checkpoint, built.run)
            job.saved_at = state.step
            loggers.event("resume", step=state.step, message=f"resumed from {checkpoint.name}")
            old_schedule = learning_rate_schedule(config, decay_before)
            if changed := schedule_change(decay_before, old_schedule, config, built.run.optimizer, state.step):
                loggers.event("schedule", step=state.step, message=changed)
        state = train_loop(job, state, interrupt)
        return _build_result(config, built, job, state, interrupt, at_end)
    except OutOfMemory as error:
        raise KeelError(f"{error}; {resume_hint(config, error.remedy)}") from None
    finally:
        at_exit.close()


class ResumeState(NamedTuple):
    """The state to resume from: configuration, checkpoint, events to log, and the end of the learning rate's decay."""

    config: Config
    checkpoint: Path | None = None
    events: Sequence[ResumeEvent] = ()
    decay_before: int | None = None


def _prepare_resume(config: Config, directory: RunDirectory, resumed: bool, task: Task | None) -> ResumeState:
    """Check and clean up the run directory, and choose the checkpoint to resume from."""
    clean(directory.checkpoints)
    if not resumed:
        return ResumeState(config)
    check_same_run(directory.path, config)
    finish_rollback(directory)
    checkpoint, events = choose_checkpoint(directory, lambda: start_reference(config, directory.path))
    decay_before: int | None = None
    if checkpoint is not None:
        check_same_data(checkpoint, config, task)
        config, decay_before, schedule_events = keep_schedule(directory.path, config)
        events += schedule_events
    step = -1 if checkpoint is None else step_of(checkpoint)
    skipped_damaged = any(event.damaged is not None for event in events)
    state = saved_state(checkpoint) if skipped_damaged and checkpoint is not None else None
    events += truncate_logs(directory, step, keep_as=None if state is None else state.attempt)
    return ResumeState(config, checkpoint, events, decay_before)


def _build_result(
    config: Config, built: Built, job: TrainingJob, state: State, interrupt: Interrupt, at_end: EndHooks
) -> RunOutcome:
    directory = job.directory
    if interrupt.on_any_rank(built.run.world) and interrupt.signal and state.step < config.run.max_steps:
        name = signal.Signals(interrupt.signal).name
        saved = f"step {state.step}" if job.saved_at == state.step else "nothing yet"
        message = (
            f"{name}: stopped after step {state.step}, saved {saved}; resume with: {resume_command(directory.path)}"
        )
        job.loggers.event("interrupted", step=state.step, message=message)
        return RunOutcome({}, directory.path, state.step, interrupt.status)
    summary = built.run.world.broadcast(_write_outputs(built, job, state, at_end) if built.run.world.is_main else {})
    best = None if state.best is None else directory.checkpoints / f"step-{int(state.best['step'])}"
    best_folder = best if best is not None and best.is_dir() else None
    return RunOutcome(summary, directory.path, state.step, int(job.stopped is not None), best_folder, job.stopped)


def _write_outputs(built: Built, job: TrainingJob, state: State, at_end: EndHooks) -> dict[str, Any]:
    """Write findings, summary and report of a finished run."""
    directory = job.directory
    directory.sync()
    findings = collect_findings(directory, job.loggers, at_end)
    directory.write_json("findings.json", findings)
    summary = summarise(built.run.task.name, state, findings, reward_failures(directory.path), job.final_kl)
    directory.write_json("summary.json", summary)
    directory.sync()
    write_run_report(directory.path, job.loggers, at_end)
    return summary


def resume_hint(config: Config, remedy: Remedy) -> str:
    """Advice after an out-of-memory error: resume if the option may change, else start a new run."""
    if may_change(remedy.option):
        return f"resume with: {resume_command(Path(config.run.dir) / config.run.name)} {remedy.override}"
    return "this option cannot change on resume: start a new run with another run.name"


def collect_findings(directory: RunDirectory, loggers: MultiLogger, at_end: EndHooks) -> list[dict[str, Any]] | None:
    """The findings of the hook and of the guards; a failing hook is logged.

    None if the run was not judged and no guard has a finding.
    """
    guards = guard_findings(directory.read_lines(EVENTS))
    if at_end.findings is None:
        return guards or None
    try:
        judged = at_end.findings(directory.path)
    except Exception as error:
        loggers.event("doctor/failed", message=f"the run could not be judged: {type(error).__name__}: {error}")
        return guards or None
    codes = {finding["code"] for finding in judged}
    return [*(finding for finding in guards if finding["code"] not in codes), *judged]


def write_run_report(folder: Path, loggers: MultiLogger, at_end: EndHooks) -> None:
    """Write the report; an error is only logged, since the run itself is complete."""
    if at_end.report is None:
        return
    try:
        at_end.report(folder)
    except Exception as error:
        loggers.event("report/failed", message=f"report.html could not be written: {type(error).__name__}: {error}")


def _job(
    config: Config, built: Built, directory: RunDirectory, loggers: MultiLogger, callbacks: Sequence[Callback]
) -> TrainingJob:
    judges: dict[str, Judge] = {}
    return TrainingJob(
        run=built.run,
        directory=directory,
        loggers=loggers,
        max_steps=config.run.max_steps,
        eval=config.eval,
        checkpoint=config.checkpoint,
        log=config.log,
        evaluate=evaluator(config, built, judges),
        tracked=built.run.task.held_out(4),
        failures=lambda: [*built.judge.drain(), *(failure for judge in judges.values() for failure in judge.drain())],
        callbacks=callbacks,
        about={"name": config.run.name, "model": config.model.name},
    )


def evaluator(
    config: Config, built: Built, judges: dict[str, Judge] | None = None
) -> Callable[[], list[dict[str, Any]]]:
    """A function that evaluates the trained task and, as retention, `eval.tasks` on fixed problems under fixed noise.

    `judges` is filled with the tasks' judges, which record failures.
    """
    run = built.run
    chosen = entries(config, configured_tasks(config, run.task), built.judge.parts)
    if judges is not None:
        judges.update({f"{number}": entry.judge for number, entry in enumerate(chosen)})

    def records() -> list[dict[str, Any]]:
        evaluated = partial(evaluate_entry, config, run.engine, run.policy.tokenizer, world=run.world)
        return [evaluated(entry).record(entry.split) for entry in chosen]

    return records


def open_loggers(
    config: Config,
    directory: RunDirectory,
    resumed_from: int | None,
    total_steps: int | None = None,
    *,
    world: World = SINGLE_PROCESS,
) -> MultiLogger:
    """The JSONL logger and those of `log`; only rank 0 logs."""
    if not world.is_main:
        return MultiLogger(Logger())
    return build_loggers(
        config.log,
        directory,
        total_steps=total_steps or config.run.max_steps,
        name=config.run.name,
        config=config.to_dict(),
        resumed_from=resumed_from,
    )


@contextmanager
def open_run(config: Config, *, resume: bool, world: World = SINGLE_PROCESS) -> Iterator[tuple[RunDirectory, bool]]:
    """Create or resume the run directory, by `--resume` and `run.if_exists`; rank 0 owns it."""
    path = Path(config.run.dir) / config.run.name
    resumed = world.broadcast(resume or (config.run.if_exists == "resume" and (path / "config.yaml").exists()))
    if not world.is_main:
        directory = RunDirectory.follow(path)
    elif resumed:
        directory = RunDirectory.resume(path)
    else:
        directory = RunDirectory.create(path, overwrite=config.run.if_exists == "replace")
    with directory:
        yield directory, resumed


def _dry_run(config: Config, task: Task | None, reward: Callable[..., Any] | None, world: World) -> RunOutcome:
    """Build everything and run one step on one group, in a temporary directory."""
    changes = {"rollout.prompts_per_step": 1, "optim.minibatches": 1, "eval.samples": 1}
    overrides = [f"{name}={value}" for name, value in changes.items()]
    if config.warmstart is not None:
        overrides.append("warmstart.steps=1")
    small = load_config(config, overrides)
    folder = world.broadcast(Path(tempfile.mkdtemp(prefix="keel-dry-run-")) if world.is_main else Path())
    try:
        with RunDirectory.create(folder) if world.is_main else RunDirectory.follow(folder) as directory:
            loggers = MultiLogger(Logger())  # writes no files
            loaded = build_start(small, directory.path, None, loggers, task, Interrupt(), world)
            built = build_run(small, loaded, task=task, reward=reward, world=world)
            with closing(built.run):
                evaluator(small, built)
                step = train_step(built.run, State(kl=built.run.controller.init()))
    finally:
        if world.is_main:
            shutil.rmtree(folder, ignore_errors=True)
    return RunOutcome({"dry_run": True, "metrics": step.metrics}, folder, 1)


def run_sft(config: Config, at_end: EndHooks = NO_HOOKS) -> RunOutcome:
    """Supervised fine-tuning by the `warmstart` section; saves the model in `checkpoints/step-N`."""
    if config.run.if_exists == "resume":
        raise KeelError("keel sft cannot resume a run: use run.if_exists=replace, or another run.name")
    with (
        open_world(config.model.device, settings=settings_of(config)) as world,
        open_run(config, resume=False, world=world) as (directory, _),
    ):
        return _run_sft(config, directory, at_end, world)


def _run_sft(config: Config, directory: RunDirectory, at_end: EndHooks, world: World) -> RunOutcome:
    began = time.monotonic()
    write_config(directory, config)
    directory.write_json("env.json", environment())
    loaded = build_policy(config)
    draws = DrawCount()
    start = build_warmstart(config, loaded, draws=draws)
    steps = start.options.steps
    loggers = open_loggers(config, directory, None, total_steps=steps, world=world)
    with ExitStack() as at_exit:
        at_exit.callback(loggers.close)
        # SFT measures no KL, so no reference is built
        built = build_run(load_config(config, ["kl.beta=0", "kl.measure_every=0"]), loaded, world=world)
        at_exit.callback(built.run.close)
        evaluate = evaluator(config, built)
        before = evaluate()
        for record in before:
            loggers.evaluation(0, record)

        def report(step: int, line: Mapping[str, float]) -> None:
            loggers.step(step, line)

        sft(loaded, *start, report, world)
        built.run.engine.sync(loaded.model)
        for note in draws.notes:
            loggers.event("note", step=steps, message=note)
        after = evaluate()
        for record in after:
            loggers.evaluation(steps, record)
        checkpoint = _save_sft(directory.checkpoints / f"step-{steps}", config, loaded, world)
        loggers.event("checkpoint", step=steps, path=str(checkpoint.relative_to(directory.path)))
        state = State(
            kl=built.run.controller.init(),
            step=steps,
            before=tuple(before),
            evaluated=tuple(after),
            wall_s=time.monotonic() - began,
        )
        summary: dict[str, Any] = summarise(built.run.task.name, state)
        directory.write_json("findings.json", None)  # not judged
        directory.write_json("summary.json", summary)
        directory.sync()
        if world.is_main:
            write_run_report(directory.path, loggers, at_end)
    return RunOutcome(summary, directory.path, steps)


def _save_sft(target: Path, config: Config, loaded: Any, world: World) -> Path:
    weights = full_state_dict(loaded.model, wanted=world.is_main)
    if world.is_main:
        _write_sft(target, config, loaded, weights)
    world.barrier()
    return target


def _write_sft(target: Path, config: Config, loaded: Any, weights: Any) -> None:
    card = f"# {config.run.name}\n\n`{config.model.name}` after supervised fine-tuning with Keel (`keel sft`).\n"
    with atomic_folder(target) as temporary:
        save_weights(temporary, loaded.model, loaded.tokenizer, weights)
        (temporary / "README.md").write_text(card, encoding="utf-8")
        save_manifest(temporary)
