"""The policy that a run ends with, measured: no later step looks at what the last update has done."""

from __future__ import annotations

import math

import torch

from keel.base.metrics import values
from keel.kl.measure import metric_of
from keel.models.sharding import own_part
from keel.trainer.batch import StepBatch, each_anchor, pack_step, score_policy, score_reference
from keel.trainer.checkpoint import rng_state, set_rng_state
from keel.trainer.measure import measure_policy
from keel.trainer.memory import StepMemory
from keel.trainer.sample import sample_groups
from keel.trainer.state import Anchor, State, TrainingRun, step_seed


def measure_final(run: TrainingRun, state: State) -> dict[str, float]:
    """KL of the policy as it is, on the rollouts that the next step would begin with: the numbers it would report.

    `state` and the random states stay as they are, so a run that goes on later meets the same rollouts and is the run
    that never ended. Without a reference only the weights are looked at.
    """
    finite = bool(torch.stack([own_part(p).isfinite().all() for p in run.optimizer.parameters]).all())
    if run.world.any(not finite):
        return {"logp/policy_mean": math.nan}
    if all(anchor.reference is None for anchor in run.anchors):
        return {}
    before, memory = rng_state(), StepMemory(run, state.step)
    try:
        torch.manual_seed(step_seed(run.seed, state))
        with memory("rollout"):
            groups, _ = sample_groups(run, run.collect, state.attempt, state.step)
        with memory("score"):
            batch = each_anchor(pack_step(groups, run), run, lambda view, anchor: _scored(view, run, anchor))
            measured = values(measure_policy(score_policy(batch, run), run))
    finally:
        set_rng_state(before)
    prefixes = (*(metric_of("kl/policy_ref/", anchor.name) for anchor in run.anchors), "logp/policy_mean")
    return {name: value for name, value in measured.items() if name.startswith(prefixes)}


def _scored(view: StepBatch, run: TrainingRun, anchor: Anchor) -> StepBatch:
    return view if anchor.reference is None else score_reference(view, run, anchor)
