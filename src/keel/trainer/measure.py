"""The metrics of a step: KL between policy, reference and sampler; rewards, lengths, times."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from keel.base.metrics import Last, Metric, Number, Sum, values
from keel.base.types import Completion, Group
from keel.base.world import World
from keel.envs import Task
from keel.envs.curriculum import has_signal
from keel.kl import k3, log_ratio
from keel.kl.measure import depth_metrics, kl_statistics, metric_of, positions, prefix_gap
from keel.losses import behaviour_logp, group_statistics, mismatch_ratio, zero_variance
from keel.models.pack import to_device
from keel.models.scorer import FullScores
from keel.trainer.batch import StepBatch, assemble, rewards_of
from keel.trainer.overlap import RolloutQueue
from keel.trainer.state import Anchor, TrainingRun

_LOGGED = {"tool/calls": "tool/calls_mean", "turn/count": "turn/count_mean"}


class Clock:
    """Measures seconds per phase. On a GPU `score` returns before its kernels end, so CUDA events time it.

    Phases are those of the main thread. With a `queue`, `rollout` is the time spent waiting for the sampling thread.
    """

    def __init__(self, device: torch.device, queue: RolloutQueue | None = None) -> None:
        self.device, self.started, self.queue = device, time.perf_counter(), queue
        self.sampled_before = 0.0 if queue is None else queue.busy_s()
        self.phases: dict[str, float] = defaultdict(float)
        self.events: dict[str, list[torch.cuda.Event]] = defaultdict(list)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = time.perf_counter()
        self._mark(phase)
        try:
            yield
        finally:
            self._mark(phase)
            self.phases[phase] += time.perf_counter() - began

    def _mark(self, phase: str) -> None:
        if self.device.type == "cuda":
            self.events[phase].append(torch.cuda.Event(enable_timing=True))
            self.events[phase][-1].record()

    def metrics(self, tokens: int) -> dict[str, float]:
        """`time/…`, `speed/tokens_per_s` (sampled tokens over the whole step) and `memory/peak_gib`."""
        total, rollout = time.perf_counter() - self.started, self.phases["rollout"]
        sampled = rollout if self.queue is None else self.queue.busy_s() - self.sampled_before
        waits = {"time/trainer_wait_s": rollout, "time/sampler_wait_s": max(0.0, total - sampled)}
        if self.events["score"]:
            begun, done = self.events["score"]
            launched, self.phases["score"] = self.phases["score"], begun.elapsed_time(done) / 1000
            self.phases["update"] += launched - self.phases["score"]
        phases = {f"time/{name}_s": self.phases.get(name, 0.0) for name in ("rollout", "score", "update", "sync")}
        speed = {"speed/tokens_per_s": tokens / max(total, 1e-9)}
        return {**phases, "time/total_s": total, **waits, **speed, "memory/peak_gib": peak_gib(self.device)}


def peak_gib(device: torch.device) -> float:
    """Peak memory in GiB, of the GPU if there is one, otherwise of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**30 if sys.platform == "darwin" else 2**20)


def measure(batch: StepBatch, passes: Sequence[FullScores], run: TrainingRun) -> dict[str, Metric]:
    """The metrics of a step that are computed on the device, after all microbatches of an iteration."""
    assert batch.rejected is not None
    penalty = sum(batch.mean(view.penalty.double()) for view in batch.views if view.penalty is not None)
    shaped = {
        "reward/penalized": Last(batch.mean(rewards_of(batch.groups)[0]).item() + penalty),
        "kl/rejected_fraction": Last(batch.rejected.float().mean()),
        "mismatch/unreported_fraction": Last(batch.unreported),
    }
    return {
        **shaped,
        **measure_policy(batch, run),
        **measure_filters(batch),
        **measure_old(batch, assemble(batch, [scores.logp for scores in passes], run)),
    }


def measure_policy(batch: StepBatch, run: TrainingRun) -> dict[str, Metric]:
    """KL of the policy before the updates against anchors and sampler, from `batch.scores`."""
    rows, scores, mean = batch.rows, batch.scores, batch.actions.mean
    mask, logp = rows.action_mask, rows.old_logp
    assert scores is not None
    assert logp is not None
    metrics: dict[str, Number] = {"logp/policy_mean": mean(logp)}
    if scores.entropy is not None:
        metrics["entropy/mean"] = mean(scores.entropy)
    for view, anchor in zip(batch.views, run.anchors, strict=True):
        own = measure_anchor(view, anchor)
        metrics |= {metric_of(name, anchor.name): number for name, number in own.items()}
    if rows.sample_logp is not None and "sample_logp" in batch.reported:
        d = log_ratio(rows.sample_logp, logp, mask).d
        metrics["kl/sampler_policy/k1/mean"] = mean(-d)
        metrics["kl/sampler_policy/k3/mean"] = mean(k3(d))
        metrics["logp/sampler_gap_max"] = d.abs().max() if d.numel() else 0.0  # 0 outside the mask
        prompts = [len(group.prompt_tokens) for group in batch.groups for _ in group.completions]
        places = to_device(positions(prompts, mask.shape[1]), mask.device)
        metrics |= depth_metrics(k3(d), mask, places, batch.depth_bins)
    return {name: Last(number) for name, number in metrics.items()}


def measure_anchor(view: StepBatch, anchor: Anchor) -> dict[str, Number]:
    """Compare the policy before the updates with an anchor. The metrics have the reference's names."""
    rows, scores, where = view.rows, view.scores, view.actions
    if rows.ref_logp is None:
        return {}
    assert rows.old_logp is not None
    assert scores is not None
    clamp, weights = anchor.kl.log_ratio_clamp, sample_weights(view)
    logp, ref_logp, mask = rows.old_logp, rows.ref_logp, rows.action_mask
    metrics = kl_statistics(logp, ref_logp, mask, where, exact_kl=scores.exact_kl, clamp=clamp, weights=weights)
    if rows.stale and rows.filtered_logp is None and rows.sample_logp is not None and "sample_logp" in view.reported:
        metrics |= prefix_gap(logp, ref_logp, rows.sample_logp, mask, where, clamp=clamp)
    metrics["logp/ref_mean"] = where.mean(ref_logp)
    if scores.ref_policy_kl is not None:
        metrics["kl/ref_policy/exact/mean"] = where.mean(scores.ref_policy_kl)
    return metrics


def sample_weights(batch: StepBatch) -> Tensor | None:
    """Importance weights w = π_old/μ `[B, T]` for off-policy samples; None for on-policy samples.

    The limits of `loss.mismatch` are not applied, because they would bias the mean.
    """
    rows = batch.rows
    assert rows.old_logp is not None
    drawn = behaviour_logp(rows, rows.old_logp) if rows.stale or rows.filtered_logp is not None else None
    return None if drawn is None else mismatch_ratio(rows.old_logp, drawn, rows.action_mask)


def measure_filters(batch: StepBatch) -> dict[str, Metric]:
    """The probability mass that top-p, top-k and min-p keep at the sampled tokens, if the engine reports it."""
    rows = batch.rows
    if rows.filtered_logp is None or not {"sample_logp", "filtered_logp"} <= batch.reported:
        return {}
    assert rows.sample_logp is not None
    mass = batch.actions.select(mismatch_ratio(rows.sample_logp, rows.filtered_logp, rows.action_mask)).double()
    if not mass.numel():
        return {}
    return {"rollout/kept_mass/mean": Last(mass.mean()), "rollout/kept_mass/min": Last(mass.min())}


def measure_old(batch: StepBatch, last: Tensor) -> dict[str, Metric]:
    """k3 between the policy before this batch's updates and the last pass."""
    rows, weights = batch.rows, sample_weights(batch)
    assert rows.old_logp is not None
    values = k3(log_ratio(rows.old_logp, last, rows.action_mask).d)
    return {"kl/old_policy/k3/mean": Last(batch.actions.mean(values if weights is None else weights * values))}


def token_kl(batch: StepBatch) -> Tensor | None:
    """log π − log p of every token `[B, T]`, for reports; None if not measured."""
    rows = batch.rows
    if rows.ref_logp is None or rows.old_logp is None:
        return None
    return torch.where(rows.action_mask, rows.old_logp - rows.ref_logp, 0.0)


def describe_groups(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of a step's rewards, lengths and parsing."""
    completions = [completion for group in groups for completion in group.completions]
    rewards = [reward for group in groups for reward in group.rewards]
    totals, group = rewards_of(groups)
    _, std, _ = group_statistics(totals, group)
    lengths = [sum(sum(branch.action) for branch in (c, *c.branches)) for c in completions]
    truncated = [completion.stop_reason == "length" for completion in completions]
    line = {
        "reward/mean": totals.mean().item(),
        "reward/std": totals.std(correction=min(1, len(totals) - 1)).item(),
        "reward/within_group_std": std.mean().item(),
        "reward/zero_variance_fraction": zero_variance(totals, group).double().mean().item(),
        "length/mean": statistics.fmean(lengths),
        "length/max": float(max(lengths)),
        "length/truncated_fraction": statistics.fmean(truncated),
        "prompt/truncated_fraction": statistics.fmean("prompt_tokens_cut" in g.problem.info for g in groups),
        "parse/ok_fraction": statistics.fmean(reward.parsed for reward in rewards),
    }
    parts = sorted({name for reward in rewards for name in reward.parts})
    for name in parts:
        line[f"reward/part/{name}"] = statistics.fmean(reward.parts.get(name, 0.0) for reward in rewards)
    return {**line, **describe_episodes(completions)}


def describe_tasks(task: Task, groups: Sequence[Group]) -> dict[str, float]:
    """For each task of a mixture: its share of the groups, mean reward, and share of groups with differing rewards."""
    metrics: dict[str, float] = {}
    for label in task.labels() if len(task.labels()) > 1 else ():
        own = [group for group in groups if task.label(group.problem) == label]
        metrics[f"task/{label}/share"] = len(own) / len(groups)
        if own:
            metrics[f"task/{label}/reward"] = statistics.fmean(r.total for group in own for r in group.rewards)
            metrics[f"task/{label}/signal_fraction"] = statistics.fmean(map(has_signal, own))
    return metrics


def describe_staleness(completions: Sequence[Completion], version: int) -> dict[str, float]:
    """The number of policy updates between the weights that sampled and the weights in training (`version`)."""
    ages = [0 if c.policy_version is None else version - c.policy_version for c in completions]
    return {"staleness/mean": statistics.fmean(ages), "staleness/max": float(max(ages))}


def task_totals(task: Task) -> dict[str, float]:
    """A task's counters since this process began."""
    return {f"task/{name}": float(total) for name, total in task.counters().items()}


def task_counts(task: Task, before: Mapping[str, float], world: World) -> dict[str, float]:
    """The increase of the task's counters since `before`, summed over processes."""
    counts = {name: Sum(total - before.get(name, 0.0)) for name, total in task_totals(task).items()}
    return values(world.reduce(counts))


def describe_episodes(completions: Sequence[Completion]) -> dict[str, float]:
    """Metrics of multi-turn episodes; empty for single turns.

    Counters are means over episodes, and tool errors are a share of tool calls. `turn/unfinished_fraction` is the share
    of episodes that `rollout.max_turns` ended.
    """
    names = sorted({name for completion in completions for name in completion.counts})
    if not names:
        return {}
    totals = {name: sum(c.counts.get(name, 0.0) for c in completions) for name in names}
    means = {_LOGGED.get(name, name): total / len(completions) for name, total in totals.items()}
    if "tool/errors" in totals:
        del means["tool/errors"]
        means["tool/error_fraction"] = totals["tool/errors"] / max(1.0, totals["tool/calls"])
    unfinished = statistics.fmean(completion.stop_reason == "turns" for completion in completions)
    return {**means, "turn/unfinished_fraction": unfinished}
