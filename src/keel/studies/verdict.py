"""What a study's figures say, in sentences: generated from them alone, and no stronger than they allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from keel.studies.folder import DONE, FAILED, STOPPED
from keel.studies.grid import Axis
from keel.studies.rows import Row
from keel.studies.stats import Correlation, Estimate, Winner, estimate, frontier, holm, pearson, spearman, winner
from keel.studies.table import Summary, figure_of, shown

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
    seeds = max(len(one.rows) for one in summaries)
    found: list[Sentence] = []
    for state, tone, words in ((FAILED, "bad", "failed"), (STOPPED, "warn", "stopped by a guard")):
        labels = list(dict.fromkeys(row.point for row in rows if row.state == state))
        count = sum(row.state == state for row in rows)
        if count:
            found.append((tone, f"{count} of {len(rows)} runs {words}: {', '.join(labels)}."))
    if seeds < 3:
        found.append(
            ("warn", f"{seeds} seed{'s' * (seeds > 1)} a point: nothing here can be told from chance; run at least 3.")
        )
    return found


def best(summaries: Sequence[Summary], metric: str) -> list[Sentence]:
    """Which point is best, and whether that is more than chance."""
    chosen = winner({one.label: one.by_seed(metric) for one in summaries})
    if chosen is None:
        return [("warn", f"No run has a figure for {NAMES[metric]}.")]
    mean = shown(metric, next(one.means[metric] for one in summaries if one.label == chosen.best))
    if len(summaries) == 1:
        return [("plain", f"{chosen.best}: {NAMES[metric]} {mean}.")]
    if chosen.name is not None:
        others = [p for p in chosen.p.values() if p is not None]
        why = f"its interval overlaps no other, and every paired difference has p ≤ {max(others):.2g} (Holm)"
        return [("good", f"{chosen.name} has the best {NAMES[metric]}, {mean}, and that is significant: {why}.")]
    return [("plain", f"No winner in {NAMES[metric]}: {chosen.best} has the highest mean, {mean}, {_rivals(chosen)}.")]


def _rivals(chosen: Winner) -> str:
    few = ", ".join(chosen.rivals[:4]) + (f" and {len(chosen.rivals) - 4} more" if len(chosen.rivals) > 4 else "")
    return f"but is not told apart from {few} (overlapping 95 % intervals, or Holm's p ≥ {SIGNIFICANT:g})"


def against_baseline(summaries: Sequence[Summary], baseline: str, metric: str) -> list[Sentence]:
    """Which points differ from the baseline, seed by seed, after Holm's correction."""
    others = [one for one in summaries if one.label != baseline and one.differences.get(metric) is not None]
    if not others:
        return []
    adjusted = holm({one.label: _p(one.differences[metric]) for one in others})
    telling = []
    for one in others:
        p, difference = adjusted[one.label], one.differences[metric]
        if p is not None and p < SIGNIFICANT and difference is not None:
            telling.append(f"{one.label} {_signed(metric, difference)} (p {p:.2g})")
    name = NAMES[metric]
    if not telling:
        count = f"none of {len(others)} points differs" if len(others) > 1 else f"{others[0].label} does not differ"
        return [("plain", f"Against {baseline}, {count} significantly in {name} (paired over seeds, Holm).")]
    return [("plain", f"Against {baseline} in {name} (paired over seeds, Holm): {'; '.join(telling)}.")]


def _p(found: Estimate | None) -> float | None:
    return None if found is None else found.p


def _signed(metric: str, found: Estimate) -> str:
    text = shown(metric, found)
    return text if text.startswith("-") else f"+{text}"


def forgetting(summaries: Sequence[Summary]) -> list[Sentence]:
    """Where the old skills suffer: points whose loss, over seeds, is beyond chance; on a scale, where it begins."""
    known = {one.label: found for one in summaries if (found := one.means.get("forgetting")) is not None}
    if not known:
        return []
    adjusted = holm({label: found.p for label, found in known.items()})
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
    p: dict[str, float | None] = {}
    differences: dict[str, Estimate] = {}
    for value in rest:
        found = _over_cells(at[first], at[value])
        if found is not None:
            differences[value], p[value] = found, found.p
    adjusted = holm(p)
    telling = [
        f"{value} {_signed(metric, differences[value])} (p {found:.2g})"
        for value, found in adjusted.items()
        if found is not None and found < SIGNIFICANT
    ]
    where = f"{axis.name}, averaged over the other axes and paired with {first}"
    if not telling:
        return [("plain", f"{where}: no significant difference in {NAMES[metric]} (Holm).")]
    return [("plain", f"{where}: {'; '.join(telling)} in {NAMES[metric]} (Holm).")]


def _over_cells(
    first: Mapping[tuple[str, ...], Mapping[int, float]], second: Mapping[tuple[str, ...], Mapping[int, float]]
) -> Estimate | None:
    """One difference a seed, the mean over the cells that both have: seeds are what repeats."""
    cells = [cell for cell in first if cell in second]
    seeds = set.intersection(*(set(first[c]) & set(second[c]) for c in cells)) if cells else set()
    return estimate([fmean(second[c][seed] - first[c][seed] for c in cells) for seed in sorted(seeds)])


def correlation(summaries: Sequence[Summary]) -> list[Sentence]:
    """Forgetting against KL on the new task over all runs: the claim of RL's Razor (2509.04259)."""
    rows = [row for one in summaries for row in one.rows if row.state in (DONE, STOPPED)]
    found = []
    for figure, name in (("kl_policy_ref", "KL(policy‖start)"), ("kl_ref_policy", "KL(start‖policy)")):
        pairs = forgetting_pairs(rows, figure)
        rank, linear = spearman(*_columns(pairs)), pearson(*_columns(pairs))
        if rank is not None and linear is not None:
            strong = rank.low is not None and rank.high is not None and (rank.low > 0 or rank.high < 0)
            says = ("grows" if rank.value > 0 else "falls") + f" with {name}" if strong else f"is not tied to {name}"
            text = f"Forgetting {says} over {len(pairs)} runs: Spearman {_r(rank)}, Pearson {_r(linear)}"
            found.append(("plain", f"{text} (Fisher's intervals; runs of one seed share their start)."))
    return found


def forgetting_pairs(rows: Sequence[Row], figure: str) -> list[tuple[float, float]]:
    """(KL on the trained task, loss on the old skills) of every run that has both."""
    both = ((figure_of(row, figure), figure_of(row, "forgetting")) for row in rows)
    return [(kl, lost) for kl, lost in both if kl is not None and lost is not None]


def _columns(pairs: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in pairs], [y for _, y in pairs]


def _r(found: Correlation) -> str:
    ci = "" if found.low is None or found.high is None else f" [{found.low:.2f}, {found.high:.2f}]"
    return f"{found.value:.2f}{ci}"


def _frontier(summaries: Sequence[Summary]) -> list[Sentence]:
    known = {
        one.label: (kl.mean, reward.mean)
        for one in summaries
        if (kl := one.means.get("kl_policy_ref")) is not None and (reward := one.means.get("reward")) is not None
    }
    if len(known) < 2:
        return []
    kept = frontier(known)
    words = ", ".join(f"{label} ({known[label][1]:.3g} at {known[label][0]:.3g})" for label in kept)
    return [("plain", f"On the frontier of mean reward against KL (nats per token): {words}.")]
