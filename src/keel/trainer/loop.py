"""The training loop: evaluations, checkpoints, logs, guards' actions and the end of a run."""

from __future__ import annotations

import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch

from keel.base.errors import KeelError
from keel.base.types import Problem
from keel.base.watchdog import process_count
from keel.base.world import World
from keel.eval.options import EvalOptions
from keel.loggers import MultiLogger, RunDirectory
from keel.loggers.options import LogOptions
from keel.loggers.rundir import SKIPPED
from keel.trainer.checkpoint import clean, last_good, rewrite_state, save_checkpoint, step_of
from keel.trainer.guards import (
    GuardViolation,
    Step0Mismatch,
    budget_metric,
    final_violation,
    find_violation,
    first_nonfinite,
    may_roll_back,
    no_signal_events,
    sampler_events,
    skipped_record,
    step0_differences,
    tool_error_event,
)
from keel.trainer.memory import OutOfMemory, evaluation_memory, free_frames
from keel.trainer.options import CheckpointOptions, GuardOptions
from keel.trainer.records import measure_final, rollout_records, tracked_records
from keel.trainer.rollback import roll_back, stop_at_last_good
from keel.trainer.sample import wait_for_sampler
from keel.trainer.state import State, TrainingRun, step_seed
from keel.trainer.step import Step, train_step

Record = dict[str, Any]
Callback = Callable[[State, Mapping[str, float]], bool | None]
MAX_SKIPPED_FILES = 20  # largest number of skipped batches kept for inspection
DUPLICATE_SIGNAL_S = 3.0  # torchrun repeats a signal to every process; a second one within this time is ignored
ROLLOUT_GROUPS = 2  # groups per step in rollouts.jsonl


@dataclass
class TrainingJob:
    """A run with its directory, loggers and intervals. `evaluate` returns one record per task, the trained task first.

    `final_kl` is the KL of the final policy. `active_alarms` are the kinds of alarms in the last step. An alarm
    that lasts several steps is logged once.
    """

    run: TrainingRun
    directory: RunDirectory
    loggers: MultiLogger
    max_steps: int
    eval: EvalOptions
    checkpoint: CheckpointOptions
    log: LogOptions
    evaluate: Callable[[], list[Record]]
    tracked: Sequence[Problem] = ()
    failures: Callable[[], Sequence[Any]] = list
    callbacks: Sequence[Callback] = ()
    about: Mapping[str, Any] | None = None
    saved_at: int | None = None
    stopped: str | None = None
    final_kl: Mapping[str, float] | None = None
    active_alarms: frozenset[str] = frozenset()


class Interrupt:
    """Stores a signal until the step is done. A second signal ends the program at once.

    A signal within `duplicate_s` of the first is ignored, because torchrun repeats the first signal.
    """

    def __init__(self, duplicate_s: float = 0.0) -> None:
        self.signal: int | None = None
        self.duplicate_s, self.received_at = duplicate_s, 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self.received_at = number, time.monotonic()
        elif time.monotonic() - self.received_at >= self.duplicate_s:
            raise KeyboardInterrupt

    def on_any_rank(self, world: World) -> bool:
        """Whether any process received a signal; the signal is then stored on all processes."""
        first = next((number for number in world.all_gather(self.signal) if number is not None), None)
        if first is not None and self.signal is None:  # a signal may have arrived here during the gather
            self.signal, self.received_at = first, time.monotonic()
        return first is not None

    @property
    def status(self) -> int:
        """The exit status by shell convention: 128 + the signal's number."""
        return 0 if self.signal is None else 128 + self.signal


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Defer Ctrl-C and SIGTERM to the end of the step. This has no effect outside the main thread."""
    interrupt = Interrupt(DUPLICATE_SIGNAL_S if process_count() > 1 else 0.0)
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train_loop(job: TrainingJob, state: State, interrupt: Interrupt) -> State:
    """Train from `state` until the last step, a guard's stop or a signal. If an evaluation fails, save, then raise."""
    guards, budget, world = job.run.guards, job.run.kl.budget, job.run.world
    began, before = time.monotonic(), state.wall_s
    if state.step == 0 and state.evaluated_at is None:
        state = _evaluate(job, state)
        state = replace(state, before=state.evaluated)
        _track(job, state)
        if may_roll_back(guards, budget):
            save(job, state)
    elif state.step >= job.max_steps:  # a finished run was resumed: reproduce its summary
        _measure_final(job, state)
    if _missed_evaluation(job, state):
        state = _evaluate_and_save(job, state, last=state.step >= job.max_steps, missed=True)
    while state.step < job.max_steps and not interrupt.on_any_rank(world):
        torch.manual_seed(step_seed(job.run.seed, state) + world.rank)  # for dropout; sampling has its own noise
        try:
            step = _step(job, state)
        except Step0Mismatch as mismatch:
            _log_violations(job, state, mismatch.violations)
            return _stop(job, state, mismatch.violations[0])
        if state.step == 0 and guards.on_step0_kl == "warn":
            _log_violations(job, step.state, step0_differences(step.metrics, job.run))
        earlier, state = state, replace(step.state, wall_s=before + time.monotonic() - began)
        _log(job, step, earlier, state)
        stop = world.broadcast([callback(state, step.metrics) for callback in job.callbacks] if world.is_main else [])
        last = state.step == job.max_steps or any(stop)
        violation = find_violation(state, step.metrics, guards, budget)
        if violation is not None and _is_new(violation, earlier, state, guards):
            job.loggers.event(violation.code, step=state.step, message=violation.message)
        if last and (
            violation is None or violation.action == "warn"
        ):  # no later step measures the effect of the last update
            violation = final_violation(state.step, _measure_final(job, state), guards, budget)
            if violation is not None and not (state.over_budget and violation.code == "kl/over-budget"):
                job.loggers.event(violation.code, step=state.step, message=violation.message)
        if violation is not None and violation.action != "warn":
            if violation.action == "rollback" and state.rollbacks < guards.max_rollbacks and not any(stop):
                restored = roll_back(job.directory, job.loggers, job.run, state, violation)
                if restored is not None:
                    state = _at_checkpoint(job, restored)
                    continue
            return _stop(job, state, violation)
        state = _evaluate_and_save(job, state, last=last)
        if any(stop):
            break
    if interrupt.on_any_rank(world) and job.saved_at != state.step and state.step > 0:
        save(job, state)
    _log_engine(job, state, world.all_gather(job.run.engine.events()))
    return state


def _log_violations(job: TrainingJob, state: State, violations: Sequence[GuardViolation]) -> None:
    for violation in violations:
        job.loggers.event(violation.code, step=state.step, message=violation.message)


def _step(job: TrainingJob, state: State) -> Step:
    """Run one step; if memory runs out before its first update, save the state before the step."""
    try:
        return train_step(job.run, state)
    except OutOfMemory as error:
        job.loggers.event("out-of-memory", step=state.step, message=str(error))
        free_frames(error)
        if not job.run.optimizer.stepped and job.saved_at != state.step:
            try:
                _save_if_single_process(job, state)
            except KeelError as failed:  # raise the memory error instead, which is the cause
                job.loggers.event("checkpoint/failed", step=state.step, message=str(failed))
        raise


def _missed_evaluation(job: TrainingJob, state: State) -> bool:
    """Whether a checkpoint was saved because the evaluation after its step failed."""
    due = state.step >= job.max_steps or _due(state.step, job.eval.every)
    return state.step > 0 and due and state.evaluated_at != state.step


def _evaluate_and_save(job: TrainingJob, state: State, *, last: bool, missed: bool = False) -> State:
    """Evaluate and save if due; if the evaluation fails, save first, so that no step is lost."""
    try:
        if last or _due(state.step, job.eval.every):
            state = _evaluate(job, state)
        if last:
            _track(job, state)
    except Exception as error:
        if isinstance(error, OutOfMemory):
            free_frames(error)
        _save_if_single_process(job, state)
        raise
    better = job.checkpoint.best and state.best is not None and state.best["step"] == state.step
    if last or missed or better or _due(state.step, job.checkpoint.every):
        save(job, state)
    return state


def _at_checkpoint(job: TrainingJob, state: State) -> State:
    """Update the job after a rollback to a checkpoint."""
    job.saved_at = state.step
    return state


def _is_new(violation: GuardViolation, before: State, state: State, guards: GuardOptions) -> bool:
    """Whether to log a violation here: a newly exceeded budget, or with `warn`, skips that just reached their limit."""
    if violation.code == "kl/over-budget":
        return not before.over_budget
    return violation.action == "warn" and state.consecutive_skips == guards.max_consecutive_nans


def _measure_final(job: TrainingJob, state: State) -> Mapping[str, float]:
    """Measure the final policy, for the guards, the summary and the doctor."""
    wait_for_sampler(job.run, state)
    measured = measure_final(job.run, state)
    job.failures()  # discard reward failures, because these rewards are not used
    job.final_kl = {name: value for name, value in measured.items() if name.startswith("kl/policy_ref/")}
    name = budget_metric(measured, "per_token")
    if name is not None:
        value = measured[f"{name}/mean"]
        message = f"KL(policy‖reference) of the policy of step {state.step} is {value:.4g} nats per token ({name})"
        job.loggers.event("kl/final", step=state.step, message=message, metrics=dict(job.final_kl))
    return measured


def _stop(job: TrainingJob, state: State, violation: GuardViolation) -> State:
    """Stop at the last good checkpoint, or at the current state if there is none, and evaluate there."""
    wall = state.wall_s
    restored = stop_at_last_good(job.directory, job.loggers, job.run, state, violation)
    job.stopped = violation.message
    state = replace(state if restored is None else _at_checkpoint(job, restored), wall_s=wall)
    if state.evaluated_at != state.step:
        state = _evaluate(job, state)
        _track(job, state)
    _measure_final(job, state)
    checkpoint = job.directory.checkpoints / f"step-{state.step}"
    if restored is None:
        save(job, state)
    elif job.run.world.is_main:
        job.directory.sync()
        rewrite_state(checkpoint, state)
    _log_engine(job, state, job.run.world.all_gather(job.run.engine.events()))
    return state


def save(job: TrainingJob, state: State) -> None:
    """Flush logs, write the checkpoint, then remove old checkpoints."""
    job.directory.sync()
    saved = save_checkpoint(job.directory.checkpoints, job.run, state, about=job.about)
    if job.run.world.is_main:
        best = int(state.best["step"]) if state.best and job.checkpoint.best else None
        finished = state.step >= job.max_steps
        good = None if finished else last_good(job.directory.checkpoints, state.confirmed)
        clean(job.directory.checkpoints, keep=job.checkpoint.keep, also=(best, None if good is None else step_of(good)))
    job.saved_at = state.step
    job.loggers.event("checkpoint", step=state.step, path=str(saved.relative_to(job.directory.path)))


def _save_if_single_process(job: TrainingJob, state: State) -> None:
    """Save after an error, but not with several processes, because the error may be on this one only."""
    if job.run.world.size == 1:
        save(job, state)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _log(job: TrainingJob, step: Step, before: State, state: State) -> None:
    """Log a step: all metrics (even if it was skipped), a few rollouts, alarms and failed rewards."""
    engine_events = job.run.world.all_gather(job.run.engine.events())
    if not job.run.world.is_main:
        job.failures()
        return
    job.loggers.step(state.step, step.metrics)
    if _due(state.step - 1, job.log.rollouts_every) or state.step == job.max_steps:
        records = rollout_records(step.batch, job.run.policy.tokenizer, groups=ROLLOUT_GROUPS)
        job.loggers.rollouts(state.step, records)
    if step.metrics["guard/spike"] > 0:
        norm, median = job.run.optimizer.spiked, statistics.median(before.norms)
        message = f"the gradient norm {norm:.4g} is {norm / max(median, 1e-300):.3g} × the running median {median:.4g}"
        job.loggers.event("guard/spike", step=state.step, message=message)
    overflows = step.metrics.get("guard/overflow", 0.0)
    if overflows > 0:
        scale = job.run.optimizer.loss_scale
        message = f"the gradient overflowed in fp16: the update was skipped and the loss scale reduced to {scale:g}"
        job.loggers.event("guard/overflow", step=state.step, message=message)
    if step.metrics["guard/skipped"] > overflows:
        _log_skipped(job, step, state)
    for kind, message in no_signal_events(state, job.run.guards) if job.run.loss.policy_weight else ():
        job.loggers.event(kind, step=state.step, message=message)
    alarms = sampler_events(step.metrics, job.run.loss.mismatch, job.run.limits)
    tool_errors = tool_error_event(step.metrics, step.batch.completions, job.run.limits)
    alarms |= {} if tool_errors is None else {"tool/errors": tool_errors}
    for kind in sorted(alarms.keys() - job.active_alarms):
        job.loggers.event(kind, step=state.step, **alarms[kind])
    job.active_alarms = frozenset(alarms)
    for failure in job.failures():
        job.loggers.event("reward/failed", step=state.step, message=str(failure), function=failure.function)
    _log_engine(job, state, engine_events)


def _log_engine(job: TrainingJob, state: State, events: Sequence[Sequence[tuple[str, str]]]) -> None:
    """Log the engines' events with their rank."""
    for rank, of_rank in enumerate(events):
        for kind, message in of_rank:
            job.loggers.event(kind, step=state.step, message=f"rank {rank}: {message}" if rank else message)


def _log_skipped(job: TrainingJob, step: Step, state: State) -> None:
    """Log why an update was skipped, and save the batch; at most `MAX_SKIPPED_FILES` batches are saved."""
    spike = step.metrics["guard/nonfinite"] == 0.0
    first = None if spike else first_nonfinite(step.batch.rows, step.metrics, job.run.optimizer.nonfinite)
    reason = "the gradient was a spike" if spike else f"the {first or 'gradient norm'} is not finite"
    fields: Record = {
        "message": f"an update was skipped: {reason}",
        "cause": "spike" if spike else "non-finite",
        "nonfinite": first,
    }
    name = f"{SKIPPED}/step-{state.step}{f'.attempt-{state.attempt}' if state.attempt else ''}.json"
    folder = job.directory.path / SKIPPED
    if (job.directory.path / name).exists() or len(list(folder.glob("*.json"))) < MAX_SKIPPED_FILES:
        record = {"step": state.step, **skipped_record(step.batch, step.metrics, first)}
        job.directory.write_json(name, record, raw=True)  # no redaction: texts must match the tokens
        fields["batch"] = name
    job.loggers.event("guard/skipped", step=state.step, **fields)


def _evaluate(job: TrainingJob, state: State) -> State:
    """Evaluate all tasks, log the records, and update the best evaluation of the trained task."""
    wait_for_sampler(job.run, state)
    with evaluation_memory(job.run, job.eval, state.step):
        records = job.evaluate()
    for record in records:
        job.loggers.evaluation(state.step, record)
    for failure in job.failures():
        message = f"in evaluation: {failure}"
        job.loggers.event("reward/failed", step=state.step, message=message, function=failure.function)
    state = replace(state, evaluated=tuple(records), evaluated_at=state.step)
    value = float(records[0]["pass@1" if "pass@1" in records[0] else "reward"]) if records else 0.0
    if state.step > 0 and records and (state.best is None or value > state.best["value"]):
        state = replace(state, best={"step": state.step, "value": value})
    return state


def _track(job: TrainingJob, state: State) -> None:
    if job.tracked:
        wait_for_sampler(job.run, state)
        with evaluation_memory(job.run, job.eval, state.step):
            records = tracked_records(job.run, job.tracked, step=state.step)
        job.loggers.rollouts(state.step, records)
        job.failures()
