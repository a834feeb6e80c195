"""Several branches of an episode weigh as one: an episode that is cut into branches gives the same update as whole."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from keel.base.types import Completion, Group
from keel.losses import advantages, group_statistics
from keel.losses.advantages import BASELINES, SCALES, centred, deviation
from keel.run.build import build_policy, build_run
from keel.trainer.checkpoint_parts import _group, _record
from keel.trainer.records import rollout_records
from keel.trainer.state import State
from keel.trainer.step import train_step
from trainer.small import small_config

SAME = """loss/policy loss/kl loss/total grad/norm reward/mean reward/std reward/penalized reward/within_group_std
reward/zero_variance_fraction length/mean length/max kl/policy_ref/k3/mean kl/sampler_policy/k1/mean entropy/mean
logp/policy_mean"""


def in_branches(completion: Completion) -> Completion:
    """The same tokens, the later ones trained in the completion and the first in a branch beside it."""
    half = (len(completion.tokens) + 1) // 2
    if half == len(completion.tokens):
        return completion

    def trained(first: int, last: int) -> Completion:
        def part(values: Any, other: Any) -> Any:
            return tuple(x if first <= at < last else other for at, x in enumerate(values))

        action, logp = part(completion.action, False), part(completion.sample_logp, 0.0)
        return replace(completion, action=action, sample_logp=logp, filtered_logp=logp, counts={})

    return replace(trained(half, len(completion.tokens)), branches=(trained(0, half),))


def step(*overrides: str, cut: bool) -> tuple[dict[str, float], torch.Tensor, Any]:
    """Two steps of a small run; its episodes are whole, or cut into branches."""
    config = small_config("rollout.max_completion_length=6", "optim.learning_rate=0.05", *overrides)
    run = build_run(config, build_policy(config)).run
    collect = run.collect

    def collected(*arguments: Any, **options: Any) -> list[Group]:
        groups = collect(*arguments, **options)
        if not cut:
            return groups
        # every second episode only: whole ones and branches stand beside each other
        return [
            replace(g, completions=tuple(in_branches(c) if i % 2 else c for i, c in enumerate(g.completions)))
            for g in groups
        ]

    run.collect = collected
    first = train_step(run, State(kl=run.controller.init()))
    second = train_step(run, first.state)
    weights = torch.cat([p.detach().flatten() for p in run.policy.model.parameters()])
    return (
        {f"{i}:{n}": s.metrics[n] for i, s in enumerate((first, second)) for n in SAME.split()},
        weights,
        second.batch,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["loss.loss_type=grpo"],
        ["loss.loss_type=grpo", "kl.placement=advantage", "kl.estimator=k1", "loss.scale_rewards=batch"],
        ["loss.loss_type=grpo", "kl.placement=reward", "kl.estimator=k1", "kl.beta=0.3"],
        ["loss.loss_type=dapo", "kl.placement=reward", "kl.estimator=k1", "kl.beta=0.3", "loss.baseline=leave_one_out"],
        ["loss.loss_type=dr_grpo", "loss.num_iterations=2"],
        ["loss.loss_type=grpo", "optim.minibatches=3", "optim.microbatch_tokens=40"],
        ["loss.loss_type=grpo", "loss.baseline=none", "loss.scale_rewards=batch"],
    ],
    ids=" ".join,
)
def test_the_update_is_that_of_whole_episodes(overrides: list[str]) -> None:
    (whole, expected, rows), (cut, weights, more) = step(*overrides, cut=False), step(*overrides, cut=True)
    assert len(more.completions) > len(rows.completions), "nothing was cut"
    assert cut == pytest.approx(whole, rel=2e-4, abs=1e-6)
    assert float((weights - expected).abs().max()) < 2e-5


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("scale", SCALES)
def test_advantages_are_those_of_the_episodes(baseline: str, scale: str) -> None:
    rewards, group = torch.tensor([1.0, 0.0, 0.5, 3.0, 4.0, 4.5]), torch.tensor([0, 0, 0, 1, 1, 1])
    rows, weight = (
        torch.tensor([0, 0, 1, 2, 2, 2, 3, 4, 5, 5]),
        torch.tensor([0.3, 0.7, 1, 0.2, 0.2, 0.6, 1, 1, 0.5, 0.5]),
    )
    expected = advantages(rewards, group, baseline=baseline, scale=scale)
    sigma = deviation(rewards[rows], group[rows], baseline=baseline, scale=scale, weight=weight)
    torch.testing.assert_close(centred(rewards[rows], group[rows], baseline, weight) / sigma, expected[rows])
    assert group_statistics(rewards[rows], group[rows], weight)[2].tolist() == pytest.approx([3.0] * 10)


def test_each_branch_is_recorded_and_rollouts_ahead_keep_theirs(tmp_path: Path) -> None:
    config = small_config()
    run = build_run(config, build_policy(config)).run
    (group, *_) = run.collect(run.task.sample(3, seed=0, step=0))
    cut = replace(group, completions=tuple(map(in_branches, group.completions)))
    run.collect = lambda *_, **__: [cut]  # type: ignore[assignment]
    batch = train_step(run, State(kl=run.controller.init())).batch
    records = rollout_records(batch, run.policy.tokenizer, groups=1)
    branches = [branch for c in cut.completions for branch in (c, *c.branches)]
    assert [record["action"] for record in records] == [list(branch.action) for branch in branches]
    assert len({(r["reward"], r["advantage"]) for r in records}) <= len(cut.completions)

    from keel.trainer.overlap import StepRollouts

    saved = json.loads(json.dumps(_record(StepRollouts([cut], {}))))
    assert _group(saved["groups"][0]).completions == cut.completions
