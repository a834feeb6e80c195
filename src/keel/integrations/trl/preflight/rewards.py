"""Check the rewards: numbers, and differences within groups."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean, pstdev

from keel.doctor.evidence import SAME, chance_of_all_but, level
from keel.doctor.findings import Finding, finding
from keel.doctor.probes.collection import NONE_OF_GROUPS
from keel.doctor.thresholds import Thresholds
from keel.doctor.verdict import Outcome
from keel.integrations.trl.preflight.batch import Subject


def probe_rewards(subject: Subject, thresholds: Thresholds) -> Outcome:
    """Whether every reward is a number, and whether rewards within groups differ, as advantages require."""
    judged, size = subject.judged, int(subject.trainer.num_generations)
    if judged.error is not None:
        failed = finding(
            "reward/failed",
            f"on the trainer's first batch a reward raised {judged.error}",
            "the reward does not take what TRL gives it: prompts, completions, completion_ids and the data's columns",
            "mend the reward; it is called with keyword arguments and returns a number for each completion",
        )
        return Outcome("collection", (failed,), unchecked=("reward/*: a reward raised",))
    broken = list(_not_numbers(subject))
    weights = subject.trainer.reward_weights.to(judged.rewards)
    totals = (judged.rewards * weights).nansum(1).tolist()
    if any(not math.isfinite(total) for total in totals):
        return Outcome("collection", tuple(broken), unchecked=("reward/constant: rewards are no numbers",))
    groups = [totals[start : start + size] for start in range(0, len(totals), size)]
    spread = fmean(pstdev(group) for group in groups)
    differing = sum(pstdev(group) > SAME for group in groups)
    rare = thresholds["healthy_solved"]
    chance = chance_of_all_but(differing, [(1 - rare) ** size + rare**size] * len(groups))
    figures = {"within_group_std": spread, "groups": float(len(groups)), "groups_differing": float(differing)}
    lines = (f"rewards: {differing} of {len(groups)} groups differ, mean standard deviation {spread:.3g}",)
    undecided: tuple[str, ...] = ()
    flat = 1 - differing / len(groups)
    if flat > thresholds["zero_variance_groups"]:
        sure, none = chance <= level(thresholds), differing == 0 and len(groups) >= NONE_OF_GROUPS
        if sure or none:
            broken.append(_constant(totals, groups, flat, chance, rare, sure))
        else:
            undecided = (f"reward/constant: undecided after {len(totals)} completions of {len(groups)} prompts",)
    return Outcome("collection", tuple(broken), figures, lines, undecided=undecided)


def _not_numbers(subject: Subject) -> Iterator[Finding]:
    rewards = subject.judged.rewards
    infinite = int(rewards.isinf().any(1).sum())
    if infinite:
        yield finding(
            "reward/non-finite",
            f"{infinite} of {len(rewards)} completions earn an infinite reward",
            "TRL makes the advantages of such a group 0 or as large as a float goes",
            "let the reward return a bounded number",
        )
    nothing = int(rewards.isnan().all(1).sum())
    if nothing:
        yield finding(
            "reward/non-finite",
            f"{nothing} of {len(rewards)} completions earn NaN or None of every reward",
            "TRL leaves such a completion out of its group's mean and gives it no advantage",
            "let one reward at least return a number for every completion",
            severity="error" if nothing == len(rewards) else "warning",
        )


def _constant(
    totals: list[float], groups: list[list[float]], flat: float, chance: float, rare: float, sure: bool
) -> Finding:
    seen = sorted({round(total, 6) for total in totals})[:4]
    return finding(
        "reward/constant",
        f"in {100 * flat:.0f} % of {len(groups)} groups all completions earn the same (seen: {seen}; a chance of "
        f"{chance:.1g} where one in {1 / rare:.0f} completions earns otherwise)",
        "without a spread there is no advantage and no policy gradient",
        "choose prompts that the model solves now and then, reward partial success, or raise num_generations",
        severity=None if sure else "warning",
        share=flat,
    )


__all__ = ["probe_rewards"]
