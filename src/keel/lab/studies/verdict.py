"""The verdict of a study in sentences, with statistical tests."""

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
    holm,
    p_value_of,
    paired,
    pareto_frontier,
    pearson,
    spearman,
    winner,
)
from keel.lab.report.verdict import Sentence
from keel.lab.studies.folder import DONE, FAILED, STOPPED
from keel.lab.studies.grid import Axis
from keel.lab.studies.table import PointSummary, forgetting_pairs, format_figure, frontier_points, skill_names

NAMES = {"accuracy_after": "accuracy", "reward": "reward", "retention_after": "accuracy on the old skills"}
SIGNIFICANT = 0.05


def verdict(summaries: Sequence[PointSummary], baseline: str, metric: str, axes: Sequence[Axis] = ()) -> list[Sentence]:
    """The study in a few sentences."""
    sentences = [*_run_states(summaries), *best(summaries, metric), *against_start(summaries)]
    sentences += against_baseline(summaries, baseline, metric)
    sentences += forgetting(summaries)
    sentences += lost_skills(summaries)
    sentences += [sentence for axis in axes if len(axes) > 1 for sentence in _axis_effect(summaries, axis, metric)]
    sentences += correlation(summaries)
    sentences += _frontier(summaries)
    return sentences


def _run_states(summaries: Sequence[PointSummary]) -> list[Sentence]:
    rows = [row for point in summaries for row in point.rows]
    sentences: list[Sentence] = []
    for state, tone, ending in ((FAILED, "bad", "failed"), (STOPPED, "warn", "stopped by a guard")):
        labels = list(dict.fromkeys(row.point for row in rows if row.state == state))
        count = sum(row.state == state for row in rows)
        if count:
            sentences.append((tone, f"{count} of {len(rows)} runs {ending}: {', '.join(labels)}."))
    counts = {point.label: sum(row.state in (DONE, STOPPED) for row in point.rows) for point in summaries}
    few = [f"{label} ({count})" for label, count in counts.items() if count < MIN_SEEDS]
    most = max(counts.values())
    if most < MIN_SEEDS:
        seeds = f"{most} seed{'s' * (most != 1)} a point"
        text = f"{seeds}: too few to test differences; run at least {MIN_SEEDS}."
        sentences.append(("warn", text))
    elif few:
        sentences.append(("warn", f"Not tested, because fewer than {MIN_SEEDS} seeds have a result: {', '.join(few)}."))
    return sentences


def best(summaries: Sequence[PointSummary], metric: str) -> list[Sentence]:
    """Which point is best, and whether that is more than chance."""
    name, known = NAMES[metric], {point.label: values for point in summaries if (values := point.by_seed(metric))}
    result = winner(known)
    if result is None:
        return [("warn", f"No run has a value for {name}.")]
    missing = [point.label for point in summaries if point.label not in known]
    sentences: list[Sentence] = [("warn", f"Without a value for {name}: {_shortened(missing)}.")] if missing else []
    means = {point.label: estimate for point in summaries if (estimate := point.means[metric]) is not None}
    mean = format_figure(metric, means[result.best])
    tied = [label for label in known if math.isclose(means[label].mean, means[result.best].mean, abs_tol=1e-12)]
    if len(known) == 1:
        remark = "" if len(summaries) == 1 else ", the only point with a result"
        return [*sentences, ("plain", f"{result.best}: {name} {mean}{remark}.")]
    if len(tied) == len(known):
        mean_only = format_figure(metric, replace(means[result.best], low=None, high=None))
        return [*sentences, ("plain", f"No winner in {name}: all {len(known)} points have the same mean, {mean_only}.")]
    if result.name is not None:
        others = [p for p in result.p.values() if p is not None]
        why = f"its interval overlaps no other, and every paired difference has p ≤ {max(others):.2g} (Holm)"
        return [*sentences, ("good", f"{result.name} has the best {name}, {mean}, significantly: {why}.")]
    if max(len(values) for values in known.values()) < MIN_SEEDS:
        return [*sentences, ("plain", f"The highest mean in {name} is that of {_shortened(tied)}, {mean}.")]
    first = f"{_shortened(tied)} {'share' if len(tied) > 1 else 'has'} the highest mean"
    return [*sentences, ("plain", f"No winner in {name}: {first}, {mean}, {_rivals(result, tied)}.")]


def _shortened(labels: Sequence[str]) -> str:
    return ", ".join(labels[:4]) + (f" and {len(labels) - 4} more" if len(labels) > 4 else "")


def _rivals(result: Winner, tied: Sequence[str]) -> str:
    rivals = [label for label in result.rivals if label not in tied]
    if not rivals:
        return "above all others"
    why = f"overlapping 95 % intervals, no spread to test, or Holm's p ≥ {SIGNIFICANT:g}"
    return f"not significantly different from {_shortened(rivals)} ({why})"


def against_start(summaries: Sequence[PointSummary]) -> list[Sentence]:
    """Whether any point is better at the trained task than the start of training, and which are worse."""
    figure = "accuracy_change"
    changes = _changes(summaries, figure)
    if not changes:
        return []
    top = max(changes, key=lambda label: changes[label].mean)
    highest = f"the highest mean change is {format_figure(figure, changes[top])}, at {top}"
    gained = changes[top].mean > 0
    if not _enough_seeds(changes):
        if not gained:
            return [("bad", f"No point is better than the start in accuracy: {highest} (too few seeds to test).")]
        fallen = sorted((label for label in changes if changes[label].mean < 0), key=lambda label: changes[label].mean)
        listed = _shortened([f"{label} {format_figure(figure, changes[label])}" for label in fallen])
        text = f"Worse than the start in accuracy on average, too few seeds to test: {listed}."
        return [("warn", text)] if fallen else []
    significant = _significant(figure, changes)
    better, worse = ([text for label, text in significant.items() if s * changes[label].mean > 0] for s in (1, -1))
    if len(worse) == len(changes):
        return [("bad", f"Every point lost accuracy against the start (paired over seeds, Holm): {'; '.join(worse)}.")]
    lost = f"; worse: {'; '.join(worse)}" if worse else ""
    if better:
        text = f"Against the start in accuracy (paired over seeds, Holm), better: {'; '.join(better)}{lost}."
        return [("warn" if worse else "good", text)]
    none = f"No point is {'shown to be ' if gained else ''}better than the start in accuracy"
    return [("warn" if gained else "bad", f"{none} (paired over seeds, Holm): {highest}{lost}.")]


def lost_skills(summaries: Sequence[PointSummary]) -> list[Sentence]:
    """The skills, and the likelihood of plain text, that points lost against the start: one sentence each.

    The test corrects for all of them at all points. Of a single skill over enough seeds `forgetting` tells it.
    """
    skills = skill_names([row for point in summaries for row in point.rows])
    names = {f"{skill}:change": f"on {skill}" for skill in skills}
    names["text_logprob_change"] = "log-probability of plain text"
    known = {figure: changes for figure in names if (changes := _changes(summaries, figure))}
    if len(skills) == 1 and _enough_seeds(known.get(f"{skills[0]}:change", {})):
        del known[f"{skills[0]}:change"]
    family = {f"{figure} {label}": p_value_of(change) for figure in known for label, change in known[figure].items()}
    adjusted = holm(family)
    sentences: list[Sentence] = []
    for figure, changes in known.items():
        significant = _significant(figure, changes, {label: adjusted[f"{figure} {label}"] for label in changes})
        worse = [text for label, text in significant.items() if changes[label].mean < 0]
        means = [change.mean for change in changes.values()]
        if worse:
            every = len(worse) == len(changes)
            who = "Every point" if every else f"{len(worse)} of {len(changes)} points"
            text = f"{who} lost {names[figure]} against the start (paired over seeds, Holm): {'; '.join(worse)}."
            sentences.append(("bad" if every else "warn", text))
        elif max(means) < 0:
            ends = [format_figure(figure, Estimate(m, None, None, 1)) for m in dict.fromkeys((max(means), min(means)))]
            why = "none beyond chance (paired over seeds, Holm)" if _enough_seeds(changes) else "too few seeds to test"
            text = f"Every point lost {names[figure]} against the start on average, {' to '.join(ends)}: {why}."
            sentences.append(("warn", text))
    return sentences


def _changes(summaries: Sequence[PointSummary], figure: str) -> dict[str, Estimate]:
    return {point.label: change for point in summaries if (change := point.means.get(figure)) is not None}


def _enough_seeds(changes: Mapping[str, Estimate]) -> bool:
    return max((change.n for change in changes.values()), default=0) >= MIN_SEEDS


def against_baseline(summaries: Sequence[PointSummary], baseline: str, metric: str) -> list[Sentence]:
    """Which points differ from the baseline, seed by seed, after Holm's correction."""
    name = NAMES[metric]
    if len(summaries) > 1 and not any(point.label == baseline and point.by_seed(metric) for point in summaries):
        return [("warn", f"The baseline {baseline} has no value for {name}, so there is no comparison.")]
    differences = {
        point.label: difference
        for point in summaries
        if (difference := point.differences.get(metric)) is not None and difference.n >= MIN_SEEDS
    }
    if not differences:
        return []
    significant = _significant(metric, differences)
    if not significant:
        none = f"none of {len(differences)} points differs"
        text = none if len(differences) > 1 else f"{next(iter(differences))} does not differ"
        return [("plain", f"Against {baseline}, {text} significantly in {name} (paired over seeds, Holm).")]
    return [("plain", f"Against {baseline} in {name} (paired over seeds, Holm): {'; '.join(significant.values())}.")]


def _significant(
    metric: str, differences: Mapping[str, Estimate], adjusted: Mapping[str, float | None] | None = None
) -> dict[str, str]:
    """The differences beyond chance after Holm's correction, and those that are the same at every seed, untested."""
    if adjusted is None:
        adjusted = holm({label: p_value_of(difference) for label, difference in differences.items()})
    significant = {}
    for label, difference in differences.items():
        p, text = adjusted[label], f"{label} {format_figure(metric, difference, difference=True)}"
        if p is not None and p < SIGNIFICANT:
            significant[label] = f"{text} (p {p:.2g})"
        elif difference.p is None and difference.n >= MIN_SEEDS:
            significant[label] = f"{text} at every seed (no spread, so no test)"
    return significant


def forgetting(summaries: Sequence[PointSummary]) -> list[Sentence]:
    """Points with a significant loss of old skills over seeds; on a scale, the first such value."""
    known = {point.label: estimate for point in summaries if (estimate := point.means.get("forgetting")) is not None}
    if max((estimate.n for estimate in known.values()), default=0) < MIN_SEEDS:
        return []
    adjusted = holm({label: p_value_of(estimate) for label, estimate in known.items()})
    lost = [
        label
        for label, estimate in known.items()
        if estimate.mean > 0 and (p := adjusted[label]) is not None and p < SIGNIFICANT
    ]
    worst = max(known, key=lambda label: known[label].mean)
    if not lost:
        mean = format_figure("forgetting", known[worst])
        largest = f"the largest mean loss is {mean}, at {worst}"
        every = "every point lost on average, and " if min(loss.mean for loss in known.values()) > 0 else ""
        remark = every + largest if known[worst].mean > 0 else "no point lost on average"
        return [("plain", f"No point forgets the old skills significantly; {remark}.")]
    listed = ", ".join(f"{label} ({format_figure('forgetting', known[label])})" for label in lost)
    scale = _scale(summaries)
    if len(lost) == len(known):
        return [("bad", f"Every point forgets the old skills significantly (Holm): {listed}.")]
    if scale is not None:
        option, values = scale
        edge = max(values[label] for label in lost) if all(label in values for label in lost) else None
        beyond = edge is not None and all(values.get(label, edge + 1) > edge or label in lost for label in known)
        if beyond and edge is not None:
            return [("warn", f"Forgetting is significant at {option} ≤ {edge:g} and not above: {listed}.")]
    return [("warn", f"Forgetting is significant (Holm) at {listed}.")]


def _scale(summaries: Sequence[PointSummary]) -> tuple[str, dict[str, float]] | None:
    """(option, value by label) where the study has one axis of numbers."""
    axes = list(summaries[0].options)
    if len(axes) != 1:
        return None
    try:
        return axes[0], {point.label: float(point.options[axes[0]]) for point in summaries}
    except ValueError:
        return None


def _axis_effect(summaries: Sequence[PointSummary], axis: Axis, metric: str) -> list[Sentence]:
    """Which value of an axis differs from its first, over all points that differ in nothing else, paired."""
    others = [name for name in summaries[0].options if name != axis.name]
    by_value: dict[str, dict[tuple[str, ...], dict[int, float]]] = {}
    for point in summaries:
        value = point.options.get(axis.name, "")
        if value:
            by_value.setdefault(value, {})[tuple(point.options[name] for name in others)] = point.by_seed(metric)
    if len(by_value) < 2:
        return []
    first, *rest = by_value
    where = f"{axis.name}, averaged over the other axes and paired with {first}"
    differences: dict[str, Estimate] = {}
    left_out: list[str] = []
    for value in rest:
        difference, missing = _over_cells(by_value[first], by_value[value])
        if difference is not None and difference.n >= MIN_SEEDS:
            differences[value] = difference
        left_out += [" ".join((value, *cell)) for cell in missing]
    note = f" Omitted, because a result is missing: {_shortened(left_out)}." if left_out else ""
    if not differences:
        return [("warn", f"{where}: nothing to compare.{note}")] if left_out else []
    significant = "; ".join(_significant(metric, differences).values()) or "no significant difference"
    return [("plain", f"{where}: {significant} in {NAMES[metric]} (Holm).{note}")]


Cells = Mapping[tuple[str, ...], Mapping[int, float]]


def _over_cells(first: Cells, second: Cells) -> tuple[Estimate | None, list[tuple[str, ...]]]:
    """(paired difference over seeds of the means over cells that both sides measured, the cells that were not)."""
    shared = [cell for cell in first if cell in second]
    cells = [cell for cell in shared if first[cell] and second[cell]]
    seeds = set.intersection(*(set(first[c]) & set(second[c]) for c in cells)) if cells else set()
    means = [{seed: fmean(side[c][seed] for c in cells) for seed in seeds} for side in (first, second)]
    return paired(*means), [cell for cell in shared if cell not in cells]


def correlation(summaries: Sequence[PointSummary]) -> list[Sentence]:
    """Forgetting against KL on the new task over all runs: the claim of RL's Razor (2509.04259)."""
    rows = [row for point in summaries for row in point.rows if row.state in (DONE, STOPPED)]
    sentences = []
    for figure, name in (("kl_policy_ref", "KL(policy‖start)"), ("kl_ref_policy", "KL(start‖policy)")):
        pairs = forgetting_pairs(rows, figure)
        rank, linear = spearman(*_columns(pairs)), pearson(*_columns(pairs))
        if rank is not None and linear is not None:
            trend = "grows" if rank.value > 0 else "falls"
            relation = f"{trend} with {name}" if rank.excludes_zero else f"is not significantly correlated with {name}"
            text = f"Forgetting {relation} over {len(pairs)} runs"
            figures = f"Spearman {_format_correlation(rank)}, Pearson {_format_correlation(linear)}"
            sentences.append(("plain", f"{text}: {figures} (Fisher's intervals; runs of one seed share their start)."))
    return sentences


def _columns(pairs: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in pairs], [y for _, y in pairs]


def _format_correlation(r: Correlation) -> str:
    if r.p is not None:
        return f"{r.value:.2f} (exact p {r.p:.2g})"
    ci = "" if r.low is None or r.high is None else f" [{r.low:.2f}, {r.high:.2f}]"
    return f"{r.value:.2f}{ci}"


def _frontier(summaries: Sequence[PointSummary]) -> list[Sentence]:
    known = {name: (kl.mean, reward.mean) for name, (kl, reward) in frontier_points(summaries).items()}
    if len(known) < 2:
        return []
    labels = pareto_frontier(known)
    listed = ", ".join(f"{name} ({known[name][1]:.3g} at {known[name][0]:.3g})" for name in labels)
    return [("plain", f"On the frontier of mean reward against KL (nats per token): {listed}.")]
