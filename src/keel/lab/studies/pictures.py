"""A study's pictures as PNG: figures against the axis, the frontier, the curves, forgetting against KL."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from keel.eval.statistics import Estimate, frontier
from keel.lab.report.picture import picture
from keel.lab.studies.layout import COLOURS, Colouring, bounds, colouring, facets, limits
from keel.lab.studies.results import REWARD_CURVE, kl_curve
from keel.lab.studies.table import Summary
from keel.lab.studies.verdict import forgetting_pairs

PALETTE = ("#1f6fd6", "#d9660f", "#16916f", "#a33ea1", "#b58900", "#d2385b", "#4a8fa8", "#6b6b6b")
POLICY, START, BEFORE = "#12756f", "#7a4ea3", "#9a9a9a"
WAYS: Mapping[str, str] = {"kl_policy_ref": "KL(policy‖start)", "kl_ref_policy": "KL(start‖policy)"}


def write_pictures(summaries: Sequence[Summary], folder: Path, title: str) -> list[str]:
    """axis.png, frontier.png, curves.png, forgetting.png; the names of those that have something to show."""
    made = []
    for name, draw in (("axis", _axis), ("frontier", _frontier), ("curves", _curves), ("forgetting", _forgetting)):
        with picture(folder / f"{name}.png") as plt:
            draw(plt, summaries)
            plt.gcf().suptitle(title, fontsize=11)
        made.append(f"{name}.png")
    return made


def numbered(summaries: Sequence[Summary]) -> list[str]:
    """The points as the table numbers them."""
    return [f"{number}  {one.label}" for number, one in enumerate(summaries, start=1)]


# --------------------------------------------------------------------------------------------- against the axis


def _axis(plt: Any, summaries: Sequence[Summary]) -> None:
    """A line a point, however many: names stand on the left once, and four figures beside them."""
    panels: tuple[tuple[Any, ...], ...] = (
        ("Accuracy on the trained task", "share right", ("accuracy_before", "before", BEFORE),
         ("accuracy_after", "after", PALETTE[0])),
        ("Exact KL, trained task's prompts", "nats per token", ("kl_policy_ref", "KL(policy‖start)", POLICY),
         ("kl_ref_policy", "KL(start‖policy)", START)),
        ("Old skills", "share right, mean over skills", ("retention_before", "before", BEFORE),
         ("retention_after", "after", PALETTE[2])),
        ("Reward", "mean of the last 10 steps", ("reward", "", PALETTE[1])),
    )  # fmt: skip
    count = len(summaries)
    figure, axes = plt.subplots(1, 4, figsize=(15, 2.2 + 0.26 * count), sharey=True, layout="constrained")
    for axis, (title, unit, *figures) in zip(axes, panels, strict=True):
        for index, (name, label, colour) in enumerate(figures):
            _dots(axis, summaries, name, label, colour, 0.16 * (index - (len(figures) - 1) / 2))
        known = {name: [e for one in summaries if (e := one.means.get(name)) is not None] for name, *_ in figures}
        axis.set(title=title, xlabel=unit, xlim=limits(known))
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if len(figures) > 1 and any(known.values()):
            axis.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.55 / axis_inches(count)))
    axes[0].set_yticks(range(count), numbered(summaries), fontsize=8)
    axes[0].set_ylim(count - 0.5, -0.5)
    figure.supxlabel("95 % t-intervals over seeds; one that reaches the edge goes on beyond it", fontsize=8)


def axis_inches(count: int) -> float:
    """The height of the lines themselves."""
    return 0.8 + 0.26 * count


def _dots(axis: Any, summaries: Sequence[Summary], name: str, label: str, colour: str, shift: float) -> None:
    found = [(place + shift, e) for place, one in enumerate(summaries) if (e := one.means.get(name)) is not None]
    if found:
        axis.errorbar(
            [e.mean for _, e in found], [y for y, _ in found], xerr=_arms(name, [e for _, e in found]),
            fmt="o", ms=4, lw=1, color=colour, capsize=2, label=label,
        )  # fmt: skip


def _arms(name: str, found: Sequence[Estimate]) -> list[list[float]]:
    """The two lengths of every error bar, clipped to what is possible."""
    ends = [bounds(name, e) or (e.mean, e.mean) for e in found]
    lower = [max(0.0, e.mean - low) for e, (low, _) in zip(found, ends, strict=True)]
    return [lower, [max(0.0, high - e.mean) for e, (_, high) in zip(found, ends, strict=True)]]


# ---------------------------------------------------------------------------------------------------- frontier


def frontier_points(summaries: Sequence[Summary]) -> dict[str, tuple[Estimate, Estimate]]:
    """(KL(policy‖start) per token, reward) of every point that has both."""
    return {
        one.label: (kl, reward)
        for one in summaries
        if (kl := one.means.get("kl_policy_ref")) is not None and (reward := one.means.get("reward")) is not None
    }


def frontier_line(known: Mapping[str, tuple[Estimate, Estimate]]) -> list[tuple[float, float]]:
    """(√KL, reward) of the points that no other beats in both, by rising KL."""
    kept = frontier({label: (kl.mean, reward.mean) for label, (kl, reward) in known.items()})
    return [(root(known[label][0].mean), known[label][1].mean) for label in kept]


def root(value: float) -> float:
    return math.sqrt(max(0.0, value))


def root_bounds(kl: Estimate) -> tuple[float, float] | None:
    """The interval of the KL under the root."""
    found = bounds("kl_policy_ref", kl)
    return None if found is None else (root(found[0]), root(found[1]))


def _frontier(plt: Any, summaries: Sequence[Summary]) -> None:
    """Every point with its number; the names stand beside the chart, where they cover nothing.

    Of many points only those on the frontier have their intervals here; axis.png has them all.
    """
    known, colours = frontier_points(summaries), colouring(summaries)
    many = len(summaries) > COLOURS
    figure, axis = plt.subplots(figsize=(11, max(5.5, 1.2 + 0.19 * len(summaries))), layout="constrained")
    line = frontier_line(known)
    axis.plot(*_columns(line), color="#888", lw=1, ls="--", zorder=0)
    for number, one in enumerate(summaries, start=1):
        if one.label in known:
            kl, reward = known[one.label]
            x, (low, high) = root(kl.mean), root_bounds(kl) or (root(kl.mean), root(kl.mean))
            arms = not many or (x, reward.mean) in line
            axis.errorbar(
                [x], [reward.mean], xerr=[[max(0.0, x - low)], [max(0.0, high - x)]] if arms else None,
                yerr=_arms("reward", [reward]) if arms else None,
                fmt="o", ms=5, color=_colour(colours, one.label), capsize=2, lw=0.7,
            )  # fmt: skip
            axis.annotate(str(number), (x, reward.mean), xytext=(4, 3), textcoords="offset points", fontsize=8)
    axis.set(title="Reward against √KL(policy‖start)", xlabel="√(nats per token)", ylabel="reward, last 10 steps")
    kept = [[replace(e, low=None, high=None) if many else e for e in pair] for pair in known.values()]
    kls, rewards = limits({"kl_policy_ref": [kl for kl, _ in kept]}), limits({"reward": [reward for _, reward in kept]})
    if rewards is not None and kls is not None:
        axis.set(ylim=rewards, xlim=(-0.02 * root(kls[1]), root(kls[1])))
    axis.grid(alpha=0.25)
    named = [*_keys(plt, colours, summaries if not many else None), plt.Line2D([], [], color="#888", ls="--")]
    texts = [*(numbered(summaries) if not many else colours.names), "frontier of the means"]
    figure.legend(named, texts, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    if many:
        axis.text(1.02, 1, "\n".join(numbered(summaries)), transform=axis.transAxes, va="top", fontsize=7)


def _colour(colours: Colouring, label: str) -> str:
    return PALETTE[colours.of[label]]


def _keys(plt: Any, colours: Colouring, summaries: Sequence[Summary] | None = None) -> list[Any]:
    """A dot for every colour's name, or for every point."""
    used = range(len(colours.names)) if summaries is None else [colours.of[one.label] for one in summaries]
    return [plt.Line2D([], [], marker="o", ls="", color=PALETTE[index]) for index in used]


# ------------------------------------------------------------------------------------------------------ curves


def _curves(plt: Any, summaries: Sequence[Summary]) -> None:
    """Reward and KL of every run, side by side; many points in several pairs of charts on the same scales."""
    parts, colours, kl = (
        facets(summaries),
        colouring(summaries),
        kl_curve([row for one in summaries for row in one.rows]),
    )
    across = 1 if len(parts) == 1 else 2
    down = math.ceil(len(parts) / across)
    size = (12.5, 5.5) if len(parts) == 1 else (15, 0.8 + 1.9 * down)
    figure, axes = plt.subplots(
        down, 2 * across, figsize=size, layout="constrained", squeeze=False, sharex=True, sharey=False
    )
    for index, axis in enumerate(axes.flat):
        if index // 2 >= len(parts):
            axis.set_visible(False)
            continue
        title, members = parts[index // 2]
        what, name = (("reward", REWARD_CURVE), (f"KL(policy‖reference) per token, {kl.split('/')[2]}", kl))[index % 2]
        for one in members:
            for row in one.rows:
                points = [(x, y) for x, y in row.curves.get(name, ()) if y is not None]
                axis.plot(*_columns(points), color=_colour(colours, one.label), lw=0.9, alpha=0.8)
        axis.set_title(f"{title}: {what}" if title else f"{what}, every run", fontsize=8 if title else 11)
        axis.set_xlabel("step" if index >= len(axes.flat) - 2 * across else "", fontsize=8)
        axis.tick_params(labelsize=7 if title else 9)
        axis.grid(alpha=0.25)
    for column in range(2):  # one scale for all rewards, one for all KLs: charts can be compared by eye
        same = [axis for index, axis in enumerate(axes.flat) if index % 2 == column and index // 2 < len(parts)]
        low, high = min(axis.get_ylim()[0] for axis in same), max(axis.get_ylim()[1] for axis in same)
        for axis in same:
            axis.set_ylim(low, high)
    figure.legend(_keys(plt, colours), colours.names, loc="outside lower center", ncols=4, frameon=False, fontsize=8)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


# -------------------------------------------------------------------------------------------------- forgetting


def _forgetting(plt: Any, summaries: Sequence[Summary]) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(12.5, 5.5), layout="constrained")
    colours = colouring(summaries)
    for axis, (name, words) in zip(axes, WAYS.items(), strict=True):
        for one in summaries:
            axis.plot(*_columns(forgetting_pairs(one.rows, name)), "o", ms=4, color=_colour(colours, one.label))
        axis.axhline(0, color="#888", lw=0.8)
        axis.set(title=f"Forgetting against {words}", xlabel="nats per token", ylabel="old skills: before − after")
        axis.grid(alpha=0.25)
    figure.legend(_keys(plt, colours), colours.names, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
