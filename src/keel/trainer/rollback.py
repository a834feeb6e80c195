"""Roll back to the last good checkpoint, and report rollbacks and stops. The process may be killed at any time.

`rollback.json` in the run directory records the decision. Each part of a rollback can be repeated: log the event, move
the abandoned log lines, remove later checkpoints, rewrite the checkpoint's state (next attempt, lower learning rate).
The file is removed last. If a resume finds it, the rollback is finished first.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
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
from keel.trainer.integrity import find_damage
from keel.trainer.optim import MIN_LOSS_SCALE
from keel.trainer.state import State, TrainingRun


@dataclass(frozen=True)
class Rollback:
    """The decision to return from a step to a checkpoint, with the state to continue from. `kind`: rollback or stop."""

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
    max_loss_scale: float | None = None  # the fp16 loss scale at the decision; a larger one would overflow again


def roll_back(
    directory: RunDirectory, loggers: MultiLogger, run: TrainingRun, state: State, violation: GuardViolation
) -> State | None:
    """Roll the run back and return its state; None if there is no good checkpoint.

    The retry uses new problems and new noise, and multiplies the learning rate by `guards.recovery_lr_factor`.
    """
    attempt, factor = state.attempt + 1, state.lr_factor * run.guards.recovery_lr_factor
    changes = {"attempt": attempt, "rollbacks": state.rollbacks + 1, "lr_factor": factor}
    outcome = f"and continues as attempt {attempt} with learning rate × {factor:g}"
    return _go_back(directory, loggers, run, state, violation, "rollback", outcome, **changes)


def stop_at_last_good(
    directory: RunDirectory, loggers: MultiLogger, run: TrainingRun, state: State, violation: GuardViolation
) -> State | None:
    """Stop at the last good checkpoint. Attempt and learning rate do not change, so the run can resume."""
    tried = f" after {state.rollbacks} rollback{'s' * (state.rollbacks > 1)}" if state.rollbacks else ""
    changes = {"attempt": state.attempt, "rollbacks": state.rollbacks, "lr_factor": state.lr_factor}
    outcome = f"and stops{tried}"
    back = _go_back(directory, loggers, run, state, violation, "stop", outcome, **changes)
    if back is None:
        message = f"{violation.message}: the run stops{tried}, and there is no good checkpoint to return to"
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
    world, scale = run.world, run.optimizer.loss_scale
    if scale is not None and scale > MIN_LOSS_SCALE:  # at the least scale, the scale was not the cause
        changes["max_loss_scale"] = scale
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
        message=f"{violation.message}: the run returns to checkpoint step-{step} {outcome}",
        time=round(time.time(), 3),
        **changes,
    )
    directory.sync()
    directory.write_json(ROLLBACK, asdict(plan))
    _announce(loggers, plan)
    _carry_out(directory, plan)


def _intact_target(directory: RunDirectory, loggers: MultiLogger, state: State) -> Path | None:
    """The last good checkpoint without damage. Damaged checkpoints are logged."""
    for path in good_checkpoints(directory.checkpoints, state.confirmed):
        wrong = find_damage(path, record=RECORD)
        if not wrong:
            return path
        message = f"the checkpoint {path.name} is damaged: {wrong[0]}; an earlier one is used"
        loggers.event("checkpoint/damaged", step=state.step, message=message, file=wrong[0].file)
    return None


def finish_rollback(directory: RunDirectory) -> bool:
    """Finish an interrupted rollback; return whether there was one."""
    data = directory.read_json(ROLLBACK)
    if data is None:
        return False
    try:
        plan = Rollback(**data)
    except TypeError as error:
        path = directory.path / ROLLBACK
        raise KeelError(
            f"{path} does not hold a rollback ({error}): remove it to resume without the rollback"
        ) from error
    events = directory.read_lines(EVENTS)
    if not any(event.get("kind") == plan.kind and event.get("time") == plan.time for event in events):
        _announce(MultiLogger(JsonlLogger(directory)), plan)
    _carry_out(directory, plan)
    return True


def _announce(loggers: MultiLogger, plan: Rollback) -> None:
    unlogged = ("kind", "from_step", *(("max_loss_scale",) if plan.max_loss_scale is None else ()))
    fields = {name: value for name, value in asdict(plan).items() if name not in unlogged}
    loggers.event(plan.kind, step=plan.from_step, **fields)


def _carry_out(directory: RunDirectory, plan: Rollback) -> None:
    directory.set_aside(plan.to, plan.abandoned)
    drop_after(directory.checkpoints, plan.to)
    checkpoint = directory.checkpoints / f"step-{plan.to}"
    state = saved_state(checkpoint)
    if state is not None:
        if state.best is not None and not (directory.checkpoints / f"step-{int(state.best['step'])}").is_dir():
            state = replace(state, best=None)  # its checkpoint was removed in favour of a later, better one
        state = replace(state, attempt=plan.attempt, rollbacks=plan.rollbacks, lr_factor=plan.lr_factor)
        state = replace(state, max_loss_scale=plan.max_loss_scale)
        rewrite_state(
            checkpoint, replace(state, consecutive_skips=0, spike_skips=0, over_budget=False, confirmed=plan.to)
        )
    directory.sync()
    (directory.path / ROLLBACK).unlink(missing_ok=True)


def guard_findings(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The findings of the guards in a finished run: its stop and its rollbacks, read from the run's events."""
    stops = [event for event in events if event.get("kind") == "stop"]
    rollbacks = [event for event in events if event.get("kind") == "rollback"]
    findings = []
    if stops and events and _last(events) is stops[-1]:
        code = str(stops[-1].get("code"))
        findings.append(_finding(code, "error", _message(stops[-1])))
    if rollbacks:
        evidence = "; ".join(map(_message, rollbacks))
        findings.append(_finding("guard/rolled-back", "warning", evidence))
    return findings


def _message(event: Mapping[str, Any]) -> str:
    """An event's message, or a placeholder if it is missing: files may be edited or truncated."""
    return str(event.get("message") or f"{event.get('kind')} at step {event.get('step', '?')}, without a message")


def _last(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The last stop, rollback or resume. A run that was resumed does not count as stopped."""
    return next((event for event in reversed(events) if event.get("kind") in ("stop", "rollback", "resume")), None)


_WHY = {
    "optim/spike": (
        "Several steps in a row had gradient norms far above the running median, and their updates were skipped: the "
        "scale of the gradient has changed, or a few completions dominate every update.",
        "Look at skipped/step-N.json; set optim.max_grad_norm near the running median, or raise guards.grad_spike if "
        "the new scale is intended.",
    ),
    "optim/non-finite": (
        "Several steps in a row had a non-finite loss or gradient: overflow in the dtype, or a loss that divides by 0.",
        "skipped/step-N.json names the first non-finite quantity; lower optim.learning_rate, or set "
        "model.dtype=float32.",
    ),
    "kl/at-start": (
        "Policy and reference have equal weights before the first update, but their passes give different results.",
        "Run keel doctor on the run's config.yaml to find the cause; guards.on_step0_kl=warn continues training.",
    ),
    "sampler/mismatch": (
        "Before the first update the sampler's log-probabilities differ from the policy's training pass.",
        "Run keel doctor on the run's config.yaml to find the cause; guards.on_step0_kl=warn continues training.",
    ),
    "kl/over-budget": (
        "The KL exceeded the KL budget: the KL penalty is too weak for the size of the updates.",
        "Raise kl.beta or lower optim.learning_rate; if a larger KL is intended, raise kl.budget.max and resume.",
    ),
    "guard/rolled-back": (
        "A guard rolled the run back to the last good checkpoint and lowered the learning rate.",
        "The run continued. To avoid the rollback, start with the lower optim.learning_rate or a larger kl.beta.",
    ),
}


def _finding(code: str, severity: str, evidence: str) -> dict[str, Any]:
    cause, advice = _WHY.get(code, ("A guard stopped the run.", "See the run's events.jsonl."))
    return {"code": code, "severity": severity, "evidence": evidence, "cause": cause, "advice": advice}
