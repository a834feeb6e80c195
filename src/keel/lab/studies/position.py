"""The progress of a process of a study, from the files that it has written."""

from __future__ import annotations

import json
from pathlib import Path

from keel.lab.studies.folder import OUTCOME, StudyRun
from keel.lab.studies.pace import EVALUATION, FIRST_STEP, MEASURE, START, STEP, WorkList, training_plan
from keel.loggers.rundir import CONFIG, EVAL, METRICS, SUMMARY

TAIL_BYTES = 1 << 17  # more than any line of metrics
PHASES = {START: "starting", MEASURE: "measuring the drift"}


def job_plan(job: StudyRun) -> WorkList:
    """The pieces of a run; seeds of one point have one pace."""
    return WorkList(job.point.label, training_plan(job.config.run.max_steps, job.config.eval.every))


def job_pieces(job: StudyRun, plan: WorkList) -> int:
    """The pieces that are finished: the last step of metrics.jsonl, and the evaluations up to it."""
    if (job.folder / OUTCOME).exists():
        return len(plan.pieces)
    if not (job.folder / CONFIG).exists():
        return 0
    evaluated, trained = last_step(job.folder / EVAL), last_step(job.folder / METRICS)
    if evaluated is None and trained is None:
        return plan.pieces.index(EVALUATION)
    if (job.folder / SUMMARY).exists():
        return plan.pieces.index(MEASURE)
    step, done = 0, 2
    for piece in plan.pieces[2:]:  # up to the last step, and its evaluation if that is there
        step += piece in (FIRST_STEP, STEP)
        if step > (trained or 0) or (piece == EVALUATION and step == trained and evaluated != step):
            break
        done += 1
    return min(done, plan.pieces.index(MEASURE))


def job_phase(plan: WorkList, done: int) -> str:
    """`step 34/120`, `evaluation at step 40/120`, `starting`, `measuring the drift`."""
    piece = plan.pieces[min(done, len(plan.pieces) - 1)]
    if piece in PHASES:
        return PHASES[piece]
    steps = [kind in (FIRST_STEP, STEP) for kind in plan.pieces]
    if piece == EVALUATION:
        return f"evaluation at step {sum(steps[:done])}/{sum(steps)}"
    return f"step {sum(steps[: done + 1])}/{sum(steps)}"


def warmstart_pieces(folder: Path, plan: WorkList) -> int:
    """The pieces of a warm start that are finished, by the lines beside its folder."""
    step = last_step(supervised_lines(folder))
    return 0 if step is None else min(1 + step, len(plan.pieces))


def warmstart_phase(plan: WorkList, done: int) -> str:
    """`warm start, step 34/500`."""
    steps = len(plan.pieces) - 1
    return f"warm start, step {min(done, steps)}/{steps}" if done else "warm start, starting"


def supervised_lines(folder: Path) -> Path:
    """Where a warm start writes a line a step: beside its folder, which appears when it is complete."""
    return folder.with_name(f"{folder.name}.jsonl")


def last_step(path: Path) -> int | None:
    """The step of a file's last complete line; None where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
        return int(json.loads(lines[-1])["step"])
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
