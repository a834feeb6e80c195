"""One step of GRPO with a KL term."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from keel.base.metrics import Mean, Metric, Metrics, Sum, merge, values
from keel.base.types import Group
from keel.envs.curriculum import Curriculum
from keel.kl import KLState, estimate, reward_penalty
from keel.kl.facts import over_vocabulary
from keel.kl.measure import controlled_kl, metric_of
from keel.losses import (
    KLTerm,
    centred,
    deviation,
    global_denominators,
    objective,
    scale_rewards,
    vocabulary_kl,
    with_policy_mask,
    zero_variance,
)
from keel.models.fused_linear import cast_weights_once
from keel.models.pack import to_device
from keel.models.scorer import FullScores
from keel.trainer.batch import (
    Microbatch,
    StepBatch,
    detached,
    dummy_loss,
    each_anchor,
    pack_step,
    score_micro,
    score_policy,
    score_reference,
    store_old_scores,
)
from keel.trainer.guards import check_step0, over_budget, spike_limit, update_guard_state
from keel.trainer.measure import Clock, describe_groups, describe_staleness, describe_tasks, measure
from keel.trainer.memory import StepMemory
from keel.trainer.sample import next_rollouts, sample_ahead, sync_engine
from keel.trainer.state import Anchor, Skipped, State, TrainingRun


class Step(NamedTuple):
    """The result of a step: the next state, all metrics, and the batch."""

    state: State
    metrics: dict[str, float]
    batch: StepBatch


def train_step(run: TrainingRun, state: State) -> Step:
    """Sample, pack, score, compute advantages, update the policy, measure, update β and reference."""
    # fmt: off
    clock, memory = Clock(run.policy.device, run.queue), StepMemory(run, state.step)
    run.optimizer.begin()
    with clock("rollout"), memory("rollout"):
        rollouts = next_rollouts(run, state)                            # groups with rewards and sample_logp
    with clock("sync"), memory("sync"):
        sample_ahead(run, state)                                        # rollout.max_staleness: sample later steps
    with clock("score"), memory("score"):
        stale = run.rollout.max_staleness > 0
        batch = pack_step(rollouts.groups, run, stale=stale)            # one row per group, the prompt once
        batch = score(batch, run, state)                                # ref_logp, and old_logp if needed now
    batch = reject(batch, run)                                          # kl.collect_max, truncated completions
    batch = each_anchor(batch, run, lambda view, anchor: penalize_rewards(view, anchor, state.kl_of(anchor).beta))
    batch = with_advantages(batch, run, state.step)
    metrics: Metrics = {}
    spike = spike_limit(state.norms, run.limits)
    guard: dict[str, Any] = {"spike": spike, "skip_spike": run.guards.on_spike == "skip"}
    with clock("update"), memory("update", batch):
        for _ in range(run.loss.num_iterations):
            passes: list[FullScores] = []
            minibatches = batch.minibatches
            for minibatch in minibatches:
                counts = global_denominators(batch.view(minibatch), run.rollout.max_completion_length)
                info: Metrics = {}
                for micro in cast_weights_once(minibatch.micros):               # this process's share
                    scores = score_micro(micro, batch, run)             # logp, entropy, exact KL: each [b, t]
                    out = objective(                                    # KL placement: advantage or loss
                        scores, batch.view(micro), run.loss, run.kl, state.beta, counts,
                        pairing=run.pairing, more=other_terms(scores, batch, micro, run, state),
                    )
                    run.optimizer.backward(out.loss)
                    info = merge(info, out.metrics)
                    passes.append(detached(scores))
                for _ in range(minibatch.dummy_passes):                 # match FSDP's collectives
                    run.optimizer.backward(dummy_loss(run))
                batch = batch if batch.scores else store_old_scores(batch, passes, run)
                check_step0(batch, run, state)                          # guards.on_step0_kl: before any update
                if minibatch is minibatches[-1]:
                    info = {**info, **measure(batch, passes, run)}      # stays on the device: no synchronisation
                with memory("optimizer"):                               # guarded: the host waits for the device
                    metrics = merge(metrics, per_update(run.optimizer.step(info, **guard)))
    groups = rollouts.groups
    line = {**values(metrics), **describe_groups(groups), **describe_tasks(run.task, groups), **rollouts.counts}
    line |= {metric_of("kl/beta", anchor.name): state.kl_of(anchor).beta for anchor in run.anchors}
    line |= describe_staleness(batch.completions, state.policy_version)
    line = run.world.broadcast(line)                                        # broadcast, so that all ranks branch alike
    line["guard/over_budget"] = float(over_budget(line, run.kl.budget) is not None)
    skipped = Skipped.of(line)
    tokens = len(batch.actions.tokens)
    last_kl = {name: value for name, value in line.items() if name.startswith("kl/policy_ref/")}
    kl = {anchor.name: steered(anchor, state, line) for anchor in run.anchors}
    state = state.next(kl=kl, skipped=skipped, tokens=tokens, last_kl=last_kl, curriculum=observed(run, state, groups))
    norms, baseline = run.optimizer.applied_norms, run.loss.baseline
    state = update_guard_state(state, line, batch, run.kl.budget, applied_norms=norms, baseline=baseline)
    with clock("sync"), memory("sync"):
        move_reference(run, state, line)
        sync_engine(run, state)                                         # a queue syncs the engine itself
    line |= {"guard/rollbacks": float(state.rollbacks), **clock.metrics(tokens)}
    return Step(state, line, batch)
    # fmt: on


def score(batch: StepBatch, run: TrainingRun, state: State) -> StepBatch:
    """Compute `ref_logp` if β or a measurement needs it, and `old_logp` if it is needed before the first update.

    Otherwise the detached logp of the first update's pass becomes `old_logp`, which saves a pass.
    """
    measured = run.kl.collect_max is not None or run.kl.measures(state.step)
    in_reward = {a.name for a in run.anchors if a.kl.placement == "reward" and state.kl_of(a).beta != 0.0}

    def scored(view: StepBatch, anchor: Anchor) -> StepBatch:
        needed = measured or state.kl_of(anchor).beta != 0.0
        return score_reference(view, run, anchor) if needed and anchor.reference is not None else view

    def estimated(view: StepBatch, anchor: Anchor) -> StepBatch:
        return replace(view, kl=sampled_kl(view, anchor)) if anchor.name in in_reward else view

    batch = each_anchor(batch, run, scored)
    if run.kl.collect_max is not None or in_reward or run.optim.minibatches > 1:
        batch = score_policy(batch, run)
    return each_anchor(batch, run, estimated)


def sampled_kl(batch: StepBatch, of: TrainingRun | Anchor) -> Tensor:
    """The exact or estimated KL `[B, T]` for a penalty in the reward, under the rollout weights."""
    rows, kl = batch.rows, of.kl
    if over_vocabulary(kl.estimator):
        assert batch.scores is not None
        return vocabulary_kl(kl, batch.scores)
    assert rows.old_logp is not None
    assert rows.ref_logp is not None
    return estimate(kl.estimator, rows.old_logp, rows.ref_logp, rows.action_mask, clamp=kl.log_ratio_clamp)


def reject(batch: StepBatch, run: TrainingRun) -> StepBatch:
    """Exclude completions from the policy term but not from the KL penalty.

    Excluded are completions above `kl.collect_max`, truncated completions (`loss.mask_truncated_completions`) and
    groups without signal (`loss.dynamic_sampling`).
    """
    rows = batch.rows
    assert rows.group is not None
    keep = torch.ones_like(rows.group, dtype=torch.bool)
    rejected = torch.zeros_like(keep)
    if run.kl.collect_max is not None and rows.old_logp is not None and rows.ref_logp is not None:
        k1 = torch.where(rows.action_mask, rows.old_logp - rows.ref_logp, 0.0).sum(-1)
        rejected = k1 / rows.action_mask.sum(-1).clamp_min(1) > run.kl.collect_max
        keep &= ~rejected
    if run.loss.mask_truncated_completions:
        keep &= to_device(torch.tensor([c.stop_reason != "length" for c in batch.completions]), keep.device)
    if run.loss.dynamic_sampling and rows.rewards is not None:
        keep &= ~zero_variance(rows.rewards, rows.group)
    leaves = run.kl.collect_max is not None or run.loss.mask_truncated_completions or run.loss.dynamic_sampling
    mask = with_policy_mask(rows.action_mask, keep) if leaves else None
    return replace(batch.with_rows(policy_mask=mask), rejected=rejected)


def penalize_rewards(batch: StepBatch, of: TrainingRun | Anchor, beta: float) -> StepBatch:
    """Compute the KL penalty of each completion if it is placed in the reward."""
    if of.kl.placement != "reward" or beta == 0.0 or batch.kl is None:
        return batch
    return replace(batch, penalty=batch.over_episodes(reward_penalty(batch.kl, batch.rows.action_mask, beta)))


def with_advantages(batch: StepBatch, run: TrainingRun, step: int) -> StepBatch:
    """Compute advantages of rewards and of KL penalties. Both are centred per group.

    Both are divided by the standard deviation of the penalized rewards. The warm-up then scales the advantages of
    rewards only.
    """
    rows, baseline, warmup = batch.rows, run.loss.baseline, run.reward.warmup_steps
    assert rows.rewards is not None
    group, weight = rows.group, rows.weight
    assert group is not None
    penalized = rows.rewards + sum(view.penalty for view in batch.views if view.penalty is not None)
    scale = deviation(penalized, group, baseline=baseline, scale=scale_rewards(run.loss), weight=weight)
    advantage = centred(rows.rewards, group, baseline, weight) / scale
    if warmup:
        advantage = advantage * min(1.0, (step + 1) / warmup)

    def shaped(view: StepBatch, anchor: Anchor) -> StepBatch:
        if view.penalty is None:
            return view
        return view.with_rows(kl_advantages=centred(view.penalty, group, baseline, weight) / scale)

    return each_anchor(batch.with_rows(advantages=advantage), run, shaped)


def other_terms(
    scores: FullScores, batch: StepBatch, micro: Microbatch, run: TrainingRun, state: State
) -> list[KLTerm]:
    """The KL terms of a microbatch, for all anchors except the reference."""
    return [
        KLTerm(anchor.name, anchor.kl, state.kl_of(anchor).beta, anchor.pairing, own, view.view(micro))
        for anchor, own, view in zip(run.anchors[1:], scores.others, batch.others, strict=True)
    ]


def steered(anchor: Anchor, state: State, line: Mapping[str, float]) -> KLState:
    """The next state of an anchor's controller, from the step's KL to the anchor."""
    controller = anchor.controller
    return controller.update(state.kl_of(anchor), controlled_kl(line, controller.unit, anchor.name))


def observed(run: TrainingRun, state: State, groups: Sequence[Group]) -> Curriculum | None:
    """The curriculum after this step's groups; None without a curriculum."""
    if run.curriculum is None:
        return None
    return state.curriculum.observe(run.task, groups, run.curriculum, state.step)


def per_update(info: Metrics) -> dict[str, Metric]:
    """Convert sums over microbatches to means over updates."""
    return {name: Mean(metric.total, 1.0) if isinstance(metric, Sum) else metric for name, metric in info.items()}


def move_reference(run: TrainingRun, state: State, metrics: dict[str, float]) -> None:
    """Update the reference if due, and reset the optimizer if the reference has `reset_optimizer`."""
    if run.reference is None:
        return
    kl = metrics.get("kl/policy_ref/k3/mean")
    moved = run.reference.update(run.policy.model, state.step, kl if kl is None or math.isfinite(kl) else None)
    if moved and run.reference.reset_optimizer:
        run.optimizer.reset()
