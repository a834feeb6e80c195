"""Back to the last good checkpoint, so that a kill at any moment of it changes nothing.

`rollback.json` in the run directory is the decision. While it is there, every part of it may be done again: the event,
the abandoned lines set aside, the later checkpoints removed, the state of the checkpoint rewritten (next attempt,
lower learning rate). It is removed last; a resume that finds it does the rest first.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from keel.base.errors import KeelError
from keel.loggers import MultiLogger, RunDirectory
from keel.loggers.rundir import EVENTS, ROLLBACK, JsonlLogger
from keel.trainer.checkpoint import (
    RECORD,
    drop_after,
    good_checkpoints,
    load_checkpoint,
    restore_weights,
    rewrite_state,
    saved_state,
    step_of,
)
from keel.trainer.guards import GuardViolation
from keel.trainer.integrity import damages
from keel.trainer.state import State, TrainingRun


@dataclass(frozen=True)
class Rollback:
    """A decision: from which step to which checkpoint, what is given up, and how the run goes on (`kind` stop: not)."""

    kind: str
    from_step: int
    to: int
    abandoned: int
    attempt: int
    rollbacks: int
    lr_factor: float
    code: str
    message: str
    time: float


def roll_back(
    directory: RunDirectory, loggers: MultiLogger, run: TrainingRun, state: State, violation: GuardViolation
) -> State | None:
    """Take the run back and return where it stands; None where there is no checkpoint to go back to.

    The attempt moves on, so that problems and noise differ, and the learning rate is multiplied by its factor.
    """
    attempt, factor = state.attempt + 1, state.lr_factor * run.guards.recovery_lr_factor
    changes = {"attempt": attempt, "rollbacks": state.rollbacks + 1, "lr_factor": factor}
    outcome = f"attempt {attempt}, learning rate × {factor:g}"
    return _go_back(directory, loggers, run, state, violation, "rollback", outcome, **changes)


def stop_at_last_good(
    directory: RunDirectory, loggers: MultiLogger, run: TrainingRun, state: State, violation: GuardViolation
) -> State | None:
    """The same for a run that ends there: nothing else changes, so that it can be resumed under other limits."""
    tried = f" after {state.rollbacks} rollbacks" if state.rollbacks else ""
    changes = {"attempt": state.attempt, "rollbacks": state.rollbacks, "lr_factor": state.lr_factor}
    outcome = f"the run stops{tried}"
    back = _go_back(directory, loggers, run, state, violation, "stop", outcome, **changes)
    if back is None:
        message = f"{violation.message}: {outcome}, without a good checkpoint to go back to"
        loggers.event("stop", step=state.step, code=violation.code, message=message)
    return back


def _go_back(
    directory: RunDirectory,
    loggers: MultiLogger,
    run: TrainingRun,
    state: State,
    violation: GuardViolation,
    kind: str,
    outcome: str,
    **changes: Any,
) -> State | None:
    world = run.world
    target = world.broadcast(_intact_target(directory, loggers, state) if world.is_main else None)
    if target is None:
        return None
    if world.is_main:
        _decide(directory, loggers, state, violation, target, kind, outcome, **changes)
    world.barrier()
    restore_weights(target, run.policy.model)
    return load_checkpoint(target, run)


def _decide(
    directory: RunDirectory,
    loggers: MultiLogger,
    state: State,
    violation: GuardViolation,
    target: Path,
    kind: str,
    outcome: str,
    **changes: Any,
) -> None:
    step = step_of(target)
    plan = Rollback(
        kind=kind,
        from_step=state.step,
        to=step,
        abandoned=directory.unused_attempt(state.attempt),
        code=violation.code,
        message=f"{violation.message}: back to checkpoint step-{step}, {outcome}",
        time=round(time.time(), 3),
        **changes,
    )
    directory.sync()
    directory.write_json(ROLLBACK, asdict(plan))
    _announce(loggers, plan)
    _carry_out(directory, plan)


def _intact_target(directory: RunDirectory, loggers: MultiLogger, state: State) -> Path | None:
    """The last good checkpoint whose files are as they were saved; skipped ones are logged."""
    for path in good_checkpoints(directory.checkpoints, state.confirmed):
        wrong = damages(path, record=RECORD)
        if not wrong:
            return path
        message = f"the checkpoint {path.name} is damaged: {wrong[0]}; it is passed over for one before it"
        loggers.event("checkpoint/damaged", step=state.step, message=message, file=wrong[0].file)
    return None


def finish_rollback(directory: RunDirectory) -> bool:
    """Do what a killed rollback has left undone; whether there was one."""
    data = directory.read_json(ROLLBACK)
    if data is None:
        return False
    try:
        plan = Rollback(**data)
    except TypeError as error:
        path = directory.path / ROLLBACK
        raise KeelError(f"{path} does not hold a rollback ({error}): remove it to resume without that") from error
    events = directory.read_lines(EVENTS)
    if not any(event.get("kind") == plan.kind and event.get("time") == plan.time for event in events):
        _announce(MultiLogger(JsonlLogger(directory)), plan)
    _carry_out(directory, plan)
    return True


def _announce(loggers: MultiLogger, plan: Rollback) -> None:
    fields = {name: value for name, value in asdict(plan).items() if name not in ("kind", "from_step")}
    loggers.event(plan.kind, step=plan.from_step, **fields)


def _carry_out(directory: RunDirectory, plan: Rollback) -> None:
    directory.set_aside(plan.to, plan.abandoned)
    drop_after(directory.checkpoints, plan.to)
    checkpoint = directory.checkpoints / f"step-{plan.to}"
    state = saved_state(checkpoint)
    if state is not None:
        if state.best is not None and not (directory.checkpoints / f"step-{int(state.best['step'])}").is_dir():
            state = replace(state, best=None)  # removed since, when a later one was better
        state = replace(state, attempt=plan.attempt, rollbacks=plan.rollbacks, lr_factor=plan.lr_factor)
        rewrite_state(
            checkpoint, replace(state, consecutive_skips=0, spike_skips=0, over_budget=False, confirmed=plan.to)
        )
    directory.sync()
    (directory.path / ROLLBACK).unlink(missing_ok=True)
