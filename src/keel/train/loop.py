"""The loop around the step: cadence of evaluation, checkpoints and logs, and a clean end whatever ends it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch

from keel.errors import KeelError
from keel.loggers import Fanout, RunDirectory
from keel.train.checkpoint import clean, save_checkpoint
from keel.train.guards import GuardOptions, check_skips, over_budget
from keel.train.records import rollout_records, tracked_records
from keel.train.state import Run, State
from keel.train.step import Step, train_step
from keel.types import Problem

Record = dict[str, Any]
Callback = Callable[[State, Mapping[str, float]], bool | None]


@dataclass(frozen=True)
class Cadence:
    """How often what happens, in steps; 0 is never (evaluations still happen at the start and the end)."""

    max_steps: int
    eval_every: int = 20
    save_every: int = 50
    keep: int = 3
    keep_best: bool = True
    rollouts_every: int = 1
    rollout_groups: int = 2


@dataclass
class Job:
    """A run with everything around it. `evaluate` returns one record a task, the trained one first."""

    run: Run
    directory: RunDirectory
    loggers: Fanout
    cadence: Cadence
    guards: GuardOptions
    evaluate: Callable[[], list[Record]]
    tracked: Sequence[Problem] = ()
    failures: Callable[[], Sequence[Any]] = list
    callbacks: Sequence[Callback] = ()
    about: Mapping[str, Any] | None = None
    saved_at: int | None = None


class Interrupt:
    """Remembers a signal until the step is done; a second one ends the program at once."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number

    @property
    def status(self) -> int:
        """The exit status a shell expects: 128 + the signal's number."""
        return 0 if self.signal is None else 128 + self.signal


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Ctrl-C and SIGTERM wait for the step in flight; outside the main thread signals are left as they are."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train_loop(job: Job, state: State, interrupt: Interrupt) -> State:
    """From `state` to the last step, or to the signal that asked to stop; a failed evaluation is saved before."""
    cadence = job.cadence
    began, before = time.monotonic(), state.wall_s
    if state.step == 0 and state.evaluated_at is None:
        state = _evaluate(job, state)
        state = replace(state, before=state.evaluated)
        _track(job, 0)
    while state.step < cadence.max_steps and interrupt.signal is None:
        torch.manual_seed(step_seed(job.run.options.seed, state))  # for dropout: sampling has noise of its own
        step = train_step(job.run, state)
        state = replace(step.state, wall_s=before + time.monotonic() - began)
        _log(job, step, state)
        stop = [callback(state, step.metrics) for callback in job.callbacks]
        last = state.step == cadence.max_steps or any(stop)
        try:
            if last or _due(state.step, cadence.eval_every):
                state = _evaluate(job, state)
            if last:
                _track(job, state.step)
        except Exception:  # whatever stops an evaluation must not cost the steps before it
            save(job, state)
            raise
        check_skips(state, job.guards)
        _budget(job, state, step.metrics)
        better = cadence.keep_best and state.best is not None and state.best["step"] == state.step
        if last or better or _due(state.step, cadence.save_every):
            save(job, state)
        if any(stop):
            break
    if interrupt.signal is not None and job.saved_at != state.step and state.step > 0:
        save(job, state)
    return state


def step_seed(seed: int, state: State) -> int:
    """A seed for one step, the same however the run got there."""
    return (seed * 1_000_003 + state.attempt * 10_007 + state.step) % 2**63


def save(job: Job, state: State) -> None:
    """Lines to the disk first, then the checkpoint, then the ones that are no longer wanted."""
    job.directory.sync()
    place = save_checkpoint(job.directory.checkpoints, job.run, state, about=job.about)
    best = int(state.best["step"]) if state.best and job.cadence.keep_best else None
    clean(job.directory.checkpoints, keep=job.cadence.keep, best=best)
    job.saved_at = state.step
    job.loggers.event("checkpoint", step=state.step, path=str(place.relative_to(job.directory.path)))


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _log(job: Job, step: Step, state: State) -> None:
    """A complete line a step, skipped or not; a few rollouts; what went wrong in the rewards."""
    job.loggers.step(state.step, step.metrics)
    if _due(state.step - 1, job.cadence.rollouts_every) or state.step == job.cadence.max_steps:
        records = rollout_records(step.batch, job.run.policy.tokenizer, groups=job.cadence.rollout_groups)
        job.loggers.rollouts(state.step, records)
    if step.metrics["guard/skipped"] > 0:
        job.loggers.event("guard/skipped", step=state.step, message="an update was skipped: its gradient is not finite")
    for failure in job.failures():
        job.loggers.event("reward/failed", step=state.step, message=str(failure), function=failure.function)


def _evaluate(job: Job, state: State) -> State:
    """Evaluate all tasks, write the lines, and remember the best of the trained one."""
    records = job.evaluate()
    for record in records:
        job.loggers.evaluation(state.step, record)
    for failure in job.failures():
        message = f"in evaluation: {failure}"
        job.loggers.event("reward/failed", step=state.step, message=message, function=failure.function)
    state = replace(state, evaluated=tuple(records), evaluated_at=state.step)
    value = float(records[0]["pass@1"]) if records else 0.0
    if state.step > 0 and records and (state.best is None or value > state.best["value"]):
        state = replace(state, best={"step": state.step, "value": value})
    return state


def _track(job: Job, step: int) -> None:
    if job.tracked:
        job.loggers.rollouts(step, tracked_records(job.run, job.tracked, step=step))
        job.failures()


def _budget(job: Job, state: State, metrics: Mapping[str, float]) -> None:
    message = over_budget(metrics, job.guards)
    if message is None:
        return
    job.loggers.event("kl/over-budget", step=state.step, message=message)
    if job.guards.budget_action != "warn":
        save(job, state)
        raise KeelError(
            f"{message} at step {state.step}: resume with a larger kl.budget.max, or start anew with a larger kl.beta"
        )
