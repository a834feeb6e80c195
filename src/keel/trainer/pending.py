"""Save rollouts that were sampled ahead in a checkpoint, so that a resumed run trains on the same ones.

Problems are not saved, because they may not be serialisable as JSON. The task samples them again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from keel.base.errors import KeelError
from keel.base.types import Completion, Group, Problem, Reward, RewardFailure
from keel.rollout.collect import with_prompt_tokens_cut
from keel.trainer.overlap import StepRollouts
from keel.trainer.sample import draw_problems
from keel.trainer.state import State, TrainingRun

PENDING = "pending.json"


def save_pending(folder: Path, run: TrainingRun, state: State) -> None:
    """Write the rollouts after `state` to `pending.json`. Without a queue, no file is written."""
    if run.queue is None:
        return
    steps = [{"step": step, **_record(rollouts)} for step, rollouts in run.queue.ready(state.step).items()]
    record = {"max_staleness": run.queue.max_staleness, "attempt": state.attempt, "steps": steps}
    (folder / PENDING).write_text(json.dumps(record), encoding="utf-8")


def load_pending(folder: Path, run: TrainingRun, state: State) -> dict[int, StepRollouts]:
    """The saved rollouts by step; empty if max_staleness, or by a rollback the attempt, has changed."""
    path = folder / PENDING
    if run.queue is None or not path.exists():
        return {}
    record = json.loads(path.read_text(encoding="utf-8"))
    if (record["max_staleness"], record["attempt"]) != (run.queue.max_staleness, state.attempt):
        return {}
    return {step["step"]: _rollouts(step, run, state.attempt) for step in record["steps"]}


def _record(rollouts: StepRollouts) -> dict[str, Any]:
    groups = [
        {
            "problem": group.problem.key,
            "cut": group.problem.info.get("prompt_tokens_cut", 0),
            "prompt_tokens": group.prompt_tokens,
            "completions": [asdict(completion) for completion in group.completions],
            "rewards": [asdict(reward) for reward in group.rewards],
        }
        for group in rollouts.groups
    ]
    failures = [asdict(failure) for failure in rollouts.failures]
    return {"groups": groups, "counts": dict(rollouts.counts), "failures": failures, "draws": rollouts.draws}


def _rollouts(record: Mapping[str, Any], run: TrainingRun, attempt: int) -> StepRollouts:
    groups = [_group(group) for group in record["groups"]]
    rounds = [draw_problems(run, attempt, record["step"], *drawn) for drawn in enumerate(record["draws"])]
    problems = {problem.key: problem for drawn in rounds for problem in drawn}
    missing = next((group.problem.key for group in groups if group.problem.key not in problems), None)
    if missing is not None:
        raise KeelError(
            f"the checkpoint's rollouts of step {record['step'] + 1} are of problem {missing!r}, which the task no "
            "longer draws: restore the task, or resume with rollout.max_staleness=0"
        )
    cuts = [group["cut"] for group in record["groups"]]
    groups = [
        replace(group, problem=with_prompt_tokens_cut(problems[group.problem.key], cut))
        for group, cut in zip(groups, cuts, strict=True)
    ]
    failures = tuple(RewardFailure(**failure) for failure in record["failures"])
    return StepRollouts(groups, record["counts"], failures, tuple(record["draws"]))


def _completion(record: Mapping[str, Any]) -> Completion:
    fields: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in record.items()}
    return Completion(**{**fields, "branches": tuple(map(_completion, fields["branches"]))})


def _group(record: Mapping[str, Any]) -> Group:
    completions = map(_completion, record["completions"])
    rewards = tuple(Reward(**reward) for reward in record["rewards"])
    return Group(Problem(record["problem"], ""), tuple(record["prompt_tokens"]), tuple(completions), rewards)
