"""Advantage scale: what dividing by the spread does to the rewards, and what a token weighs in a long completion."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from keel.losses.recipes import get_loss, scale_rewards
from keel.losses.reductions import get_reduction


def probe_advantage(setup: KeelSubject, thresholds: Thresholds) -> Outcome:
    """How often a reward's difference is multiplied before it becomes an advantage, and the loss's length bias."""
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
    findings = (*findings, *_amplified_parts(setup, thresholds), *_dealt_out(setup))
    figures |= length_bias(rows.action_mask, setup)
    lines.append(
        f"loss_type={setup.run.loss.loss_type}: a token of the shortest completion ({figures['shortest']:.0f} tokens) "
        f"weighs {figures['length_bias']:.3g} times one of the longest ({figures['longest']:.0f})"
    )
    return Outcome("advantage", findings, figures, tuple(lines))


def _dealt_out(setup: KeelSubject) -> Iterator[Finding]:
    """Rewards that are dealt out within their groups: a control, and no training."""
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
    """The standard deviation of each group whose rewards differ, ascending."""
    _, std, _ = group_statistics(rewards.double(), group)
    alive = ~zero_variance(rewards, group)
    per_group = {int(g): float(s) for g, s, a in zip(group, std, alive, strict=True) if bool(a)}
    return torch.tensor(sorted(per_group.values()), dtype=torch.float64)


def amplification(spread: Tensor, rewards: Tensor, scale: str) -> dict[str, float]:
    """1 / (std + ε) where the advantage divides by a std, 1 where it does not."""
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
    size = min(1.0, max(*rewards, setup.shared.get("gold size", 1.0)))  # in small units differences are meant
    limit = thresholds["advantage_amplification"] / size
    if figures["amplification_max"] <= limit:
        return

    def tiny(groups: Sequence[Group]) -> list[float]:
        """Of the groups with spread, which have one that is multiplied beyond the limit."""
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


def _amplified_parts(setup: KeelSubject, thresholds: Thresholds) -> Iterator[Finding]:
    """Parts that are normalised one by one: one whose differences are nothing beside its own size is noise.

    A part that is counted in small units differs by as much as its size, and normalising it is meant.
    """
    if setup.config.reward.aggregate != "normalised_sum":
        return
    limit = thresholds["advantage_amplification"]
    for part in (part for part in setup.built.judge.parts if part.weight != 0.0):

        def tiny(groups: Sequence[Group], name: str = part.name) -> list[float]:
            """Of the groups that a part tells apart, which it does by next to nothing."""
            rows = [[reward.parts[name] for reward in group.rewards if name in reward.parts] for group in groups]
            spreads = [(stdev(row), max(map(abs, row))) for row in rows if len(row) > 1]
            return [float(limit * spread < min(1.0, size)) for spread, size in spreads if spread > SAME]

        def by_chance(groups: Sequence[Group], tiny: Callable[[Sequence[Group]], list[float]] = tiny) -> bool:
            return chance_above(tiny(groups), thresholds["healthy_amplified"]) > level(thresholds)

        def undecided(
            groups: Sequence[Group],
            tiny: Callable[[Sequence[Group]], list[float]] = tiny,
            by_chance: Callable[[Sequence[Group]], bool] = by_chance,
        ) -> bool:
            return fmean(tiny(groups) or [0.0]) > 0.5 and by_chance(groups)

        groups = more_groups(setup, "advantage/amplified", undecided)
        shares = tiny(groups)
        if fmean(shares or [0.0]) <= 0.5 or by_chance(groups):
            continue
        yield finding(
            "advantage/amplified",
            f"in {sum(shares):.0f} of {len(shares)} groups that {part.name} tells apart it does so by under "
            f"1/{limit:g} of its size, and reward.aggregate=normalised_sum gives that a spread of {abs(part.weight):g}",
            "each part is divided by its own spread before parts are added, so that noise in one counts as much as a "
            "right answer in another",
            propose("set {}, or leave that part out", {"reward.aggregate": "sum"}),
        )


def length_bias(mask: Tensor, setup: KeelSubject) -> dict[str, float]:
    """The weight of one token in the shortest completion over that of one in the longest, under this loss."""
    reduction = get_reduction(get_loss(setup.run.loss.loss_type).reduction)
    weights = token_weights(mask, reduction, setup.run.rollout.max_completion_length)
    lengths = mask.sum(-1)
    present = lengths > 0
    short, long = lengths[present].argmin(), lengths[present].argmax()
    per_row = weights[present].max(-1).values
    return {
        "shortest": float(lengths[present][short]),
        "longest": float(lengths[present][long]),
        "length_bias": (per_row[short] / per_row[long]).item(),
    }


def token_weights(mask: Tensor, reduction: object, max_completion_length: int) -> Tensor:
    """∂loss/∂(a token's term) `[B, T]`: what the reduction gives each token."""
    values = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device, requires_grad=True)
    total = reduction(values, mask, count_denominators(mask, max_completion_length))  # type: ignore[operator]
    (weights,) = torch.autograd.grad(total, values)
    return weights
