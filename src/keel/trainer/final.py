"""Measure the final policy, because no later step measures the effect of the last update."""

from __future__ import annotations

import math

import torch

from keel.base.metrics import values
from keel.kl.measure import metric_of
from keel.models.sharding import local_tensor
from keel.trainer.batch import StepBatch, each_anchor, pack_step, score_policy, score_reference
from keel.trainer.checkpoint import rng_state, set_rng_state
from keel.trainer.measure import measure_policy
from keel.trainer.memory import StepMemory
from keel.trainer.sample import sample_groups
from keel.trainer.state import Anchor, State, TrainingRun, step_seed


def measure_final(run: TrainingRun, state: State) -> dict[str, float]:
    """Measure the current policy's KL on the rollouts of the next step.

    `state` and the random states are unchanged, so a run that is extended later samples the same rollouts. Without a
    reference, the weights are only checked for NaN and infinity.
    """
    finite = bool(torch.stack([local_tensor(p).isfinite().all() for p in run.optimizer.parameters]).all())
    if run.world.any(not finite):
        return {"logp/policy_mean": math.nan}
    if all(anchor.reference is None for anchor in run.anchors):
        return {}
    before, memory = rng_state(), StepMemory(run, state.step)
    try:
        torch.manual_seed(step_seed(run.seed, state))
        with memory("rollout"):
            groups = sample_groups(run, run.collect, state.attempt, state.step, state.curriculum).groups
        with memory("score"):
            batch = each_anchor(pack_step(groups, run), run, lambda view, anchor: _scored(view, run, anchor))
            measured = values(measure_policy(score_policy(batch, run), run))
    finally:
        set_rng_state(before)
    prefixes = (*(metric_of("kl/policy_ref/", anchor.name) for anchor in run.anchors), "logp/policy_mean")
    return {name: value for name, value in measured.items() if name.startswith(prefixes)}


def _scored(view: StepBatch, run: TrainingRun, anchor: Anchor) -> StepBatch:
    return view if anchor.reference is None else score_reference(view, run, anchor)
