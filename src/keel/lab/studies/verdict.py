"""What a study's figures say, in sentences: generated from them alone, and no stronger than they allow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from keel.eval.statistics import (
    MIN_SEEDS,
    Correlation,
    Estimate,
    Winner,
    frontier,
    holm,
    paired,
    pearson,
    spearman,
    tested,
    winner,
)
from keel.lab.studies.folder import DONE, FAILED, STOPPED
from keel.lab.studies.grid import Axis
from keel.lab.studies.table import Summary, forgetting_pairs, frontier_points, shown

NAMES = {"accuracy_after": "accuracy", "reward": "reward", "retention_after": "accuracy on the old skills"}
SIGNIFICANT = 0.05
Sentence = tuple[str, str]  # tone (good, warn, bad, plain), words


def verdict(summaries: Sequence[Summary], baseline: str, metric: str, axes: Sequence[Axis] = ()) -> list[Sentence]:
    """The study in a few sentences."""
    found = [*_ended(summaries), *best(summaries, metric), *against_baseline(summaries, baseline, metric)]
    found += forgetting(summaries)
    found += [sentence for axis in axes if len(axes) > 1 for sentence in _axis_effect(summaries, axis, metric)]
    found += correlation(summaries)
    found += _frontier(summaries)
    return found


def _ended(summaries: Sequence[Summary]) -> list[Sentence]:
    rows = [row for one in summaries for row in one.rows]
    found: list[Sentence] = []
    for state, tone, words in ((FAILED, "bad", "failed"), (STOPPED, "warn", "stopped by a guard")):
        labels = list(dict.fromkeys(row.point for row in rows if row.state == state))
        count = sum(row.state == state for row in rows)
        if count:
            found.append((tone, f"{count} of {len(rows)} runs {words}: {', '.join(labels)}."))
    counted = {one.label: sum(row.state in (DONE, STOPPED) for row in one.rows) for one in summaries}
    few = [f"{label} ({count})" for label, count in counted.items() if count < MIN_SEEDS]
    most = max(counted.values())
    if most < MIN_SEEDS:
        seeds = f"{most} seed{'s' * (most != 1)} a point"
        found.append(("warn", f"{seeds}: no point can be told from another beyond chance; run at least {MIN_SEEDS}."))
    elif few:
        found.append(("warn", f"Not tested, for want of {MIN_SEEDS} seeds with a result: {', '.join(few)}."))
    return found


def best(summaries: Sequence[Summary], metric: str) -> list[Sentence]:
    """Which point is best, and whether that is more than chance."""
    name, known = NAMES[metric], {one.label: values for one in summaries if (values := one.by_seed(metric))}
    chosen = winner(known)
    if chosen is None:
        return [("warn", f"No run has a figure for {name}.")]
    missing = [one.label for one in summaries if one.label not in known]
    found: list[Sentence] = [("warn", f"Without a figure for {name}: {_few(missing)}.")] if missing else []
    means = {one.label: held for one in summaries if (held := one.means[metric]) is not None}
    mean = shown(metric, means[chosen.best])
    level = [label for label in known if math.isclose(means[label].mean, means[chosen.best].mean, abs_tol=1e-12)]
    if len(known) == 1:
        only = "" if len(summaries) == 1 else ", with nothing to compare it with"
        return [*found, ("plain", f"{chosen.best}: {name} {mean}{only}.")]
    if len(level) == len(known):
        share = shown(metric, replace(means[chosen.best], low=None, high=None))
        return [*found, ("plain", f"No winner in {name}: all {len(known)} points have the same mean, {share}.")]
    if chosen.name is not None:
        others = [p for p in chosen.p.values() if p is not None]
        why = f"its interval overlaps no other, and every paired difference has p ≤ {max(others):.2g} (Holm)"
        return [*found, ("good", f"{chosen.name} has the best {name}, {mean}, and that is significant: {why}.")]
    if max(len(values) for values in known.values()) < MIN_SEEDS:
        return [*found, ("plain", f"The highest mean in {name} is that of {_few(level)}, {mean}.")]
    first = f"{_few(level)} {'share' if len(level) > 1 else 'has'} the highest mean"
    return [*found, ("plain", f"No winner in {name}: {first}, {mean}, {_rivals(chosen, level)}.")]


def _few(labels: Sequence[str]) -> str:
    return ", ".join(labels[:4]) + (f" and {len(labels) - 4} more" if len(labels) > 4 else "")


def _rivals(chosen: Winner, level: Sequence[str]) -> str:
    rivals = [label for label in chosen.rivals if label not in level]
    if not rivals:
        return "above all others"
    why = f"overlapping 95 % intervals, no spread to test, or Holm's p ≥ {SIGNIFICANT:g}"
    return f"not told apart from {_few(rivals)} ({why})"


def against_baseline(summaries: Sequence[Summary], baseline: str, metric: str) -> list[Sentence]:
    """Which points differ from the baseline, seed by seed, after Holm's correction."""
    name = NAMES[metric]
    if len(summaries) > 1 and not any(one.label == baseline and one.by_seed(metric) for one in summaries):
        return [("warn", f"The baseline {baseline} has no figure for {name}: nothing is compared with it.")]
    found = {one.label: d for one in summaries if (d := one.differences.get(metric)) is not None and d.n >= MIN_SEEDS}
    if not found:
        return []
    telling = _telling(metric, found)
    if not telling:
        count = f"none of {len(found)} points differs" if len(found) > 1 else f"{next(iter(found))} does not differ"
        return [("plain", f"Against {baseline}, {count} significantly in {name} (paired over seeds, Holm).")]
    return [("plain", f"Against {baseline} in {name} (paired over seeds, Holm): {'; '.join(telling)}.")]


def _telling(metric: str, differences: Mapping[str, Estimate]) -> list[str]:
    """The differences beyond chance after Holm's correction, and those that are the same at every seed, untested."""
    adjusted = holm({label: tested(found) for label, found in differences.items()})
    telling = []
    for label, found in differences.items():
        p = adjusted[label]
        if p is not None and p < SIGNIFICANT:
            telling.append(f"{label} {_signed(metric, found)} (p {p:.2g})")
        elif found.p is None and found.n >= MIN_SEEDS:
            telling.append(f"{label} {_signed(metric, found)} at every seed (no spread, so no test)")
    return telling


def _signed(metric: str, found: Estimate) -> str:
    text = shown(metric, found)
    return text if text.startswith("-") else f"+{text}"


def forgetting(summaries: Sequence[Summary]) -> list[Sentence]:
    """Where the old skills suffer: points whose loss, over seeds, is beyond chance; on a scale, where it begins."""
    known = {one.label: found for one in summaries if (found := one.means.get("forgetting")) is not None}
    if not known:
        return []
    if max(found.n for found in known.values()) < MIN_SEEDS:
        return []
    adjusted = holm({label: tested(found) for label, found in known.items()})
    lost = [
        label
        for label, found in known.items()
        if found.mean > 0 and (p := adjusted[label]) is not None and p < SIGNIFICANT
    ]
    worst = max(known, key=lambda label: known[label].mean)
    if not lost:
        mean = shown("forgetting", known[worst])
        largest = (
            f"the largest mean loss is {mean}, at {worst}" if known[worst].mean > 0 else "no point lost on average"
        )
        return [("plain", f"No point forgets the old skills significantly; {largest}.")]
    said = ", ".join(f"{label} ({shown('forgetting', known[label])})" for label in lost)
    scale = _scale(summaries)
    if scale is not None and len(lost) < len(known):
        option, at = scale
        edge = max(at[label] for label in lost) if all(label in at for label in lost) else None
        beyond = edge is not None and all(at.get(label, edge + 1) > edge or label in lost for label in known)
        if beyond and edge is not None:
            return [("warn", f"Forgetting is significant at {option} ≤ {edge:g} and not above: {said}.")]
    return [("warn", f"Forgetting is significant (Holm) at {said}.")]


def _scale(summaries: Sequence[Summary]) -> tuple[str, dict[str, float]] | None:
    """(option, value by label) where the study has one axis of numbers."""
    axes = list(summaries[0].options)
    if len(axes) != 1:
        return None
    try:
        return axes[0], {one.label: float(one.options[axes[0]]) for one in summaries}
    except ValueError:
        return None


def _axis_effect(summaries: Sequence[Summary], axis: Axis, metric: str) -> list[Sentence]:
    """Which value of an axis differs from its first, over all points that differ in nothing else, paired."""
    others = [name for name in summaries[0].options if name != axis.name]
    at: dict[str, dict[tuple[str, ...], dict[int, float]]] = {}
    for one in summaries:
        value = one.options.get(axis.name, "")
        if value:
            at.setdefault(value, {})[tuple(one.options[name] for name in others)] = one.by_seed(metric)
    if len(at) < 2:
        return []
    first, *rest = at
    where = f"{axis.name}, averaged over the other axes and paired with {first}"
    differences: dict[str, Estimate] = {}
    left: list[str] = []
    for value in rest:
        found, without = _over_cells(at[first], at[value])
        if found is not None and found.n >= MIN_SEEDS:
            differences[value] = found
        left += [" ".join((value, *cell)) for cell in without]
    apart = f" Left out for want of a result on either side: {_few(left)}." if left else ""
    if not differences:
        return [("warn", f"{where}: nothing to compare.{apart}")] if left else []
    telling = "; ".join(_telling(metric, differences))
    said = f"{telling} in {NAMES[metric]} (Holm)" if telling else f"no significant difference in {NAMES[metric]} (Holm)"
    return [("plain", f"{where}: {said}.{apart}")]


Cells = Mapping[tuple[str, ...], Mapping[int, float]]


def _over_cells(first: Cells, second: Cells) -> tuple[Estimate | None, list[tuple[str, ...]]]:
    """One difference a seed, the mean over the cells that both have figures in (seeds are what repeats); the others."""
    shared = [cell for cell in first if cell in second]
    cells = [cell for cell in shared if first[cell] and second[cell]]
    seeds = set.intersection(*(set(first[c]) & set(second[c]) for c in cells)) if cells else set()
    means = [{seed: fmean(side[c][seed] for c in cells) for seed in seeds} for side in (first, second)]
    return paired(*means), [cell for cell in shared if cell not in cells]


def correlation(summaries: Sequence[Summary]) -> list[Sentence]:
    """Forgetting against KL on the new task over all runs: the claim of RL's Razor (2509.04259)."""
    rows = [row for one in summaries for row in one.rows if row.state in (DONE, STOPPED)]
    found = []
    for figure, name in (("kl_policy_ref", "KL(policy‖start)"), ("kl_ref_policy", "KL(start‖policy)")):
        pairs = forgetting_pairs(rows, figure)
        rank, linear = spearman(*_columns(pairs)), pearson(*_columns(pairs))
        if rank is not None and linear is not None:
            way = "grows" if rank.value > 0 else "falls"
            says = f"{way} with {name}" if rank.excludes_zero else f"is not shown to be tied to {name}"
            text = f"Forgetting {says} over {len(pairs)} runs: Spearman {_r(rank)}, Pearson {_r(linear)}"
            found.append(("plain", f"{text} (Fisher's intervals; runs of one seed share their start)."))
    return found


def _columns(pairs: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in pairs], [y for _, y in pairs]


def _r(found: Correlation) -> str:
    if found.p is not None:
        return f"{found.value:.2f} (exact p {found.p:.2g})"
    ci = "" if found.low is None or found.high is None else f" [{found.low:.2f}, {found.high:.2f}]"
    return f"{found.value:.2f}{ci}"


def _frontier(summaries: Sequence[Summary]) -> list[Sentence]:
    known = {label: (kl.mean, reward.mean) for label, (kl, reward) in frontier_points(summaries).items()}
    if len(known) < 2:
        return []
    kept = frontier(known)
    words = ", ".join(f"{label} ({known[label][1]:.3g} at {known[label][0]:.3g})" for label in kept)
    return [("plain", f"On the frontier of mean reward against KL (nats per token): {words}.")]
