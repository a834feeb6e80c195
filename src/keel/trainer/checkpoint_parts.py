"""Two parts of a checkpoint: the optimizer's state, and the rollouts that were sampled ahead.

The optimizer's state is a single file, or torch.distributed.checkpoint for sharded weights. Both can be loaded on any
number of processes. Problems of rollouts are not saved, because JSON may not support them. On resume the task samples
the same problems again, so the run trains on the same rollouts.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor

from keel.base.errors import KeelError
from keel.base.types import Completion, Group, Problem, Reward, RewardFailure
from keel.models.sharding import is_sharded
from keel.rollout.collect import with_prompt_tokens_cut
from keel.trainer.optim import Optimizer
from keel.trainer.overlap import StepRollouts
from keel.trainer.sample import draw_problems
from keel.trainer.state import State, TrainingRun


def optimizer_state(optimizer: Optimizer, model: nn.Module, folder: Path) -> dict[str, Any]:
    """The state to write into one file. Sharded moments are written to `folder` by all processes."""
    state = optimizer.state_dict()
    sharded = is_sharded(model) and any(isinstance(p, DTensor) for p in optimizer.parameters)
    if not sharded or not optimizer.inner.state:  # without a state, get_optimizer_state_dict would create one
        return state
    moments = {"optimizer": get_optimizer_state_dict(model, optimizer.inner)}
    try:
        with _quiet():
            dcp.save(moments, checkpoint_id=folder)
    except CheckpointException as error:
        raise OSError(str(next(iter(error.failures.values()))[0])) from error
    return {**state, "inner": None}


def load_optimizer(optimizer: Optimizer, model: nn.Module, saved: Mapping[str, Any], folder: Path) -> None:
    """Load the result of `optimizer_state`, and shard it like the current weights."""
    if saved["inner"] is not None:
        optimizer.load_state_dict({**saved, "inner": _distributed_state(optimizer, saved["inner"])})
        return
    state = {"optimizer": get_optimizer_state_dict(model, optimizer.inner)}
    with _quiet():
        dcp.load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    set_optimizer_state_dict(model, optimizer.inner, state["optimizer"])
    optimizer.load_state_dict({**saved, "inner": optimizer.inner.state_dict()})


def _distributed_state(optimizer: Optimizer, inner: Mapping[str, Any]) -> dict[str, Any]:
    """Shard unsharded moments like their parameters."""
    parameters = [p for group in optimizer.inner.param_groups for p in group["params"]]

    def like(parameter: Tensor, value: Any) -> Any:
        if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or value.shape != parameter.shape:
            return value
        local = value.to(parameter.to_local().device)
        return distribute_tensor(local, parameter.device_mesh, parameter.placements, src_data_rank=None)

    state = {
        index: {name: like(parameters[index], value) for name, value in entries.items()}
        for index, entries in inner["state"].items()
    }
    return {**inner, "state": state}


class _quiet(warnings.catch_warnings):
    """Ignore torch's warnings about its internals."""

    def __enter__(self) -> Any:
        entered = super().__enter__()
        warnings.simplefilter("ignore")
        return entered


PENDING = "pending.json"


def save_pending(folder: Path, run: TrainingRun, state: State) -> None:
    """Write the rollouts sampled ahead of `state` to `pending.json`. Without a queue, no file is written."""
    if run.queue is None:
        return
    steps = [{"step": step, **_record(rollouts)} for step, rollouts in run.queue.ready(state.step).items()]
    record = {"max_staleness": run.queue.max_staleness, "attempt": state.attempt, "steps": steps}
    (folder / PENDING).write_text(json.dumps(record), encoding="utf-8")


def load_pending(folder: Path, run: TrainingRun, state: State) -> dict[int, StepRollouts]:
    """The saved rollouts by step; empty if max_staleness has changed, or if a rollback changed the attempt."""
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
