"""A study's pictures as PNG: figures against the axis, the frontier, the curves, forgetting against KL."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keel.report.picture import picture
from keel.studies.stats import Estimate, frontier
from keel.studies.table import Summary
from keel.studies.verdict import forgetting_pairs

COLOURS = ("#1f6fd6", "#d9660f", "#16916f", "#a33ea1", "#b58900", "#d2385b", "#4a8fa8", "#6b6b6b")
POLICY, START = "#12756f", "#7a4ea3"


def write_pictures(summaries: Sequence[Summary], folder: Path, title: str) -> list[str]:
    """axis.png, frontier.png, curves.png, forgetting.png; the names of those that have something to show."""
    made = []
    for name, draw in (("axis", _axis), ("frontier", _frontier), ("curves", _curves), ("forgetting", _forgetting)):
        with picture(folder / f"{name}.png") as plt:
            draw(plt, summaries)
            plt.gcf().suptitle(title, fontsize=11)
        made.append(f"{name}.png")
    return made


def _bars(axis: Any, summaries: Sequence[Summary], figure: str, colour: str, label: str, shift: float = 0.0) -> None:
    found = [
        (place + shift, mean) for place, one in enumerate(summaries) if (mean := one.means.get(figure)) is not None
    ]
    if found:
        means, errors = [mean.mean for _, mean in found], [mean.half or 0.0 for _, mean in found]
        axis.errorbar([x for x, _ in found], means, yerr=errors, fmt="o", color=colour, capsize=4, label=label)


def _named(axis: Any, summaries: Sequence[Summary], title: str, unit: str) -> None:
    longest = max(len(one.label) for one in summaries)
    axis.set_xticks(range(len(summaries)), [one.label for one in summaries])
    if longest * len(summaries) > 60:
        axis.tick_params(axis="x", labelrotation=60, labelsize=7)
    axis.set(title=title, ylabel=unit, xlim=(-0.5, len(summaries) - 0.5))
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def _axis(plt: Any, summaries: Sequence[Summary]) -> None:
    _, axes = plt.subplots(2, 2, figsize=(12.5, 9), layout="constrained")
    _bars(axes[0, 0], summaries, "accuracy_before", COLOURS[7], "before", -0.1)
    _bars(axes[0, 0], summaries, "accuracy_after", COLOURS[0], "after", 0.1)
    _named(axes[0, 0], summaries, "Accuracy on the trained task", "share right")
    _bars(axes[0, 1], summaries, "kl_policy_ref", POLICY, "KL(policy‖start)", -0.1)
    _bars(axes[0, 1], summaries, "kl_ref_policy", START, "KL(start‖policy)", 0.1)
    _named(axes[0, 1], summaries, "Exact KL on the trained task's prompts", "nats per token")
    _bars(axes[1, 0], summaries, "retention_before", COLOURS[7], "before", -0.1)
    _bars(axes[1, 0], summaries, "retention_after", COLOURS[2], "after", 0.1)
    _named(axes[1, 0], summaries, "Old skills", "share right, mean over skills")
    _bars(axes[1, 1], summaries, "reward", COLOURS[1], "mean of the last 10 steps")
    _named(axes[1, 1], summaries, "Reward", "per completion")
    for axis in axes.flat:
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False)


def frontier_points(summaries: Sequence[Summary]) -> dict[str, tuple[Estimate, Estimate]]:
    """(KL(policy‖start) per token, reward) of every point that has both."""
    return {
        one.label: (kl, reward)
        for one in summaries
        if (kl := one.means.get("kl_policy_ref")) is not None and (reward := one.means.get("reward")) is not None
    }


def root(value: float) -> float:
    return math.sqrt(max(0.0, value))


def _frontier(plt: Any, summaries: Sequence[Summary]) -> None:
    _, axis = plt.subplots(figsize=(8, 5.5), layout="constrained")
    known = frontier_points(summaries)
    for index, (label, (kl, reward)) in enumerate(known.items()):
        low, high = root(kl.mean - (kl.half or 0)), root(kl.mean + (kl.half or 0))
        x = root(kl.mean)
        axis.errorbar(
            [x], [reward.mean], xerr=[[x - low], [high - x]], yerr=[reward.half or 0.0],
            fmt="o", color=COLOURS[index % 8], capsize=4, label=label,
        )  # fmt: skip
    kept = frontier({label: (kl.mean, reward.mean) for label, (kl, reward) in known.items()})
    axis.plot([root(known[k][0].mean) for k in kept], [known[k][1].mean for k in kept], color="#888", lw=1, ls="--")
    axis.set(title="Reward against √KL(policy‖start)", xlabel="√(nats per token)", ylabel="reward")
    axis.grid(alpha=0.25)
    if known:
        axis.legend(frameon=False, fontsize=7)


def _curves(plt: Any, summaries: Sequence[Summary]) -> None:
    _, axes = plt.subplots(1, 2, figsize=(12.5, 5), layout="constrained")
    for axis, names, title in (
        (axes[0], ("reward/mean",), "Reward, every run"),
        (axes[1], ("kl/policy_ref/exact/mean", "kl/policy_ref/k3/mean"), "KL(policy‖reference), nats per token"),
    ):
        for index, one in enumerate(summaries):
            for number, row in enumerate(one.rows):
                series = next((row.curves[name] for name in names if name in row.curves), [])
                points = [(x, y) for x, y in series if y is not None]
                label = one.label if number == 0 else None
                axis.plot(*_columns(points), color=COLOURS[index % 8], lw=0.9, alpha=0.7, label=label)
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.25)
    axes[0].legend(frameon=False, fontsize=7)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _forgetting(plt: Any, summaries: Sequence[Summary]) -> None:
    _, axes = plt.subplots(1, 2, figsize=(12.5, 5), layout="constrained")
    ways: Mapping[str, str] = {"kl_policy_ref": "KL(policy‖start)", "kl_ref_policy": "KL(start‖policy)"}
    for axis, (figure, name) in zip(axes, ways.items(), strict=True):
        for index, one in enumerate(summaries):
            points = forgetting_pairs(one.rows, figure)
            axis.plot(*_columns(points), "o", color=COLOURS[index % 8], label=one.label)
        axis.axhline(0, color="#888", lw=0.8)
        axis.set(title=f"Forgetting against {name}", xlabel="nats per token", ylabel="old skills: before − after")
        axis.grid(alpha=0.25)
    axes[0].legend(frameon=False, fontsize=7)
