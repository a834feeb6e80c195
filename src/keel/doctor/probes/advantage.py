"""Advantages: how much the division by the standard deviation amplifies rewards, and the loss's length bias."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean, stdev

import torch
from torch import Tensor

from keel.base.types import Group
from keel.doctor.evidence import SAME, chance_above, level, more_groups
from keel.doctor.findings import Finding, finding, propose
from keel.doctor.keel_subject import KeelSubject
from keel.doctor.thresholds import Thresholds
from keel.doctor.verdict import Outcome
from keel.losses import count_denominators, group_statistics, zero_variance
from keel.losses.advantages import EPSILON
from keel.losses.recipes import scale_rewards


def probe_advantage(setup: KeelSubject, thresholds: Thresholds) -> Outcome:
    """How much reward differences are amplified by the normalisation of advantages, and the loss's length bias."""
    rows, scale = setup.batch.rows, scale_rewards(setup.run.loss)
    assert rows.rewards is not None
    assert rows.group is not None
    finite = bool(rows.rewards.isfinite().all())
    figures: dict[str, float] = {"divides": float(scale != "none")}
    findings: tuple[Finding, ...] = ()
    lines: list[str] = []
    if not finite:
        return Outcome("advantage", unchecked=("advantage/amplified: a reward is not finite",))
    spread = group_spreads(rows.rewards, rows.group)
    figures["groups_with_spread"] = float(len(spread))
    if len(spread):
        figures |= amplification(spread, rows.rewards, scale)
        findings = tuple(_amplified(setup, figures, scale, thresholds))
        lines.append(
            f"group std from {figures['smallest_std']:.3g} to {figures['largest_std']:.3g}; differences of reward are "
            f"multiplied by {figures['amplification']:.3g} (typical), {figures['amplification_max']:.3g} (largest)"
        )
    else:
        lines.append("no group has rewards that differ: there is no spread to divide by")
    findings = (*findings, *_dealt_out(setup))
    return Outcome("advantage", findings, figures, tuple(lines))


def _dealt_out(setup: KeelSubject) -> Iterator[Finding]:
    """Whether rewards are shuffled within groups, a control experiment in which nothing can be learned."""
    seed = setup.config.reward.shuffle
    if seed is None:
        return
    yield finding(
        "reward/gold",
        f"reward.shuffle={seed} deals the rewards of each group out at random: a right answer earns no more than a "
        "wrong one",
        "this is a control that must not learn: whatever moves in it is not the rewards' doing",
        propose("nothing, if the control is meant; to train, set {}", {"reward.shuffle": None}),
        severity="warning",
    )


def group_spreads(rewards: Tensor, group: Tensor) -> Tensor:
    """The standard deviations of the groups whose rewards differ, ascending."""
    _, std, _ = group_statistics(rewards.double(), group)
    alive = ~zero_variance(rewards, group)
    per_group = {int(g): float(s) for g, s, a in zip(group, std, alive, strict=True) if bool(a)}
    return torch.tensor(sorted(per_group.values()), dtype=torch.float64)


def amplification(spread: Tensor, rewards: Tensor, scale: str) -> dict[str, float]:
    """1 / (std + ε) if advantages are divided by a standard deviation, else 1."""
    divisors = {"group": spread, "batch": rewards.double().std().reshape(1)}.get(scale)
    times = torch.ones(1) if divisors is None else 1.0 / (divisors + EPSILON)
    return {
        "smallest_std": spread[0].item(),
        "largest_std": spread[-1].item(),
        "amplification": times.median().item(),
        "amplification_max": times.max().item(),
    }


def _amplified(setup: KeelSubject, figures: dict[str, float], scale: str, thresholds: Thresholds) -> Iterator[Finding]:
    rewards = [abs(reward.total) for group in setup.groups for reward in group.rewards]
    # for rewards on a small scale, small differences are intended
    size = min(1.0, max(*rewards, setup.shared.get("gold size", 1.0)))
    limit = thresholds["advantage_amplification"] / size
    if figures["amplification_max"] <= limit:
        return

    def tiny(groups: Sequence[Group]) -> list[float]:
        """For each group with spread, whether it is amplified beyond the limit."""
        deviations = [stdev(reward.total for reward in group.rewards) for group in groups]
        return [float(1.0 / (deviation + EPSILON) > limit) for deviation in deviations if deviation > SAME]

    def by_chance(groups: Sequence[Group]) -> bool:
        return chance_above(tiny(groups), thresholds["healthy_amplified"]) > level(thresholds)

    typical = figures["amplification"] > limit
    if typical and scale == "group":
        groups = more_groups(
            setup, "advantage/amplified", lambda groups: fmean(tiny(groups)) > 0.5 and by_chance(groups)
        )
        typical = not by_chance(groups)
    times = figures["amplification" if typical else "amplification_max"]
    yield finding(
        "advantage/amplified",
        f"the {'typical' if typical else 'smallest'} within-group std is {1 / times - EPSILON:.3g}: differences "
        f"of reward are multiplied by {times:.3g} (over {limit:g})",
        f"loss.scale_rewards={scale} divides advantages by a spread that is nearly nothing, so noise in the "
        "reward becomes an update of full size",
        propose("set {} (as dr_grpo does), or make the reward tell completions apart", {"loss.scale_rewards": "none"}),
        severity=None if typical else "note",
    )


def token_weights(mask: Tensor, reduction: object, max_completion_length: int) -> Tensor:
    """∂loss/∂(a token's term) `[B, T]`: the weight that the reduction gives to each token."""
    values = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device, requires_grad=True)
    total = reduction(values, mask, count_denominators(mask, max_completion_length))  # type: ignore[operator]
    (weights,) = torch.autograd.grad(total, values)
    return weights
